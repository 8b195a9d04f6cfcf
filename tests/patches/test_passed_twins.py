"""Twins that have passed: what they are known by, and that another process finds them."""

from __future__ import annotations

import types

import pytest
import torch
from causal_lm_types import small_config
from models import build, require_native
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import hf_fastpath
from hf_fastpath.native import build_cache, loader
from hf_fastpath.patching import passed_twins, selftest

CPU, TYPE = torch.device("cpu"), torch.float32


@pytest.fixture(autouse=True)
def another_process(tmp_path, monkeypatch):
    """Start with an empty cache folder, and forget what this process knows; what is returned makes it forget again."""
    monkeypatch.setenv("HF_FASTPATH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(passed_twins, "_known", {})
    return passed_twins._known.clear


@pytest.fixture
def tried(monkeypatch):
    """The twins that are tried."""
    require_native(CPU)
    twins, difference = [], selftest._difference
    monkeypatch.setattr(selftest, "_difference", lambda twin, *how: (twins.append(twin), difference(twin, *how))[1])
    return twins


def recorded(**entries):
    torch.manual_seed(0)
    config = small_config("glm4")
    for name, value in entries.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config)


def notes():
    return sorted((build_cache.root() / build_cache.TWINS).glob("*"))


def test_another_process_finds_it(another_process, tried):
    hf_fastpath.patch(recorded(), quiet=True)
    (note,) = notes()
    assert len(tried) == 1 and float(note.read_text()) < 1e-5
    note.write_text("0.125")
    another_process()
    again = hf_fastpath.patch(recorded(hidden_size=96), quiet=True)  # the twin has its own size
    assert len(tried) == 1 and hf_fastpath.report(again).loop == "fast"
    assert selftest.run(again) == (None, 0.125)


def test_another_config_or_dtype_is_another_twin(tried):
    hf_fastpath.patch(recorded(), quiet=True)
    hf_fastpath.patch(recorded(), quiet=True)
    assert len(tried) == 1
    hf_fastpath.patch(recorded(rms_norm_eps=1e-3), quiet=True)
    hf_fastpath.patch(recorded().bfloat16(), quiet=True)
    assert len(tried) == len(notes()) == 3


def test_a_twin_that_fails_is_not_kept(tried, monkeypatch):
    monkeypatch.setattr(selftest, "different_tokens", lambda *what: "token 3 is 5 instead of 4")
    for _ in range(2):
        with pytest.raises(hf_fastpath.errors.UnsupportedModelError, match="token 3 is 5"):
            hf_fastpath.patch(recorded(), quiet=True)
    assert len(tried) == 2 and not notes()


@pytest.mark.parametrize("content", ("", "much", "nan", "inf", "0.5, 0.5", "\udcff"))
def test_a_damaged_note_is_none(content, another_process):
    passed_twins.keep("key", 0.5, recorded())
    (note,) = notes()
    note.write_bytes(content.encode(errors="surrogateescape"))
    another_process()
    assert passed_twins.find("key") is None


def test_a_note_of_others_is_not_trusted(another_process):
    passed_twins.keep("key", 0.5, recorded())
    (note,) = notes()
    another_process()
    assert passed_twins.find("key") == 0.5
    note.chmod(0o666)
    another_process()
    assert passed_twins.find("key") is None


@pytest.mark.parametrize("folder", ("/proc/nowhere", "~"))
def test_without_a_cache_this_process_remembers(folder, another_process, monkeypatch):
    if folder == "~":
        pytest.importorskip("platformdirs")
        monkeypatch.delenv("HF_FASTPATH_CACHE")
        monkeypatch.setattr("platformdirs.user_cache_dir", lambda *what, **how: folder)
    else:
        monkeypatch.setenv("HF_FASTPATH_CACHE", folder)
    passed_twins.keep("key", 0.5, recorded())
    assert passed_twins.find("key") == 0.5
    another_process()
    assert passed_twins.find("key") is None


def test_code_without_a_file_is_not_kept(another_process):
    """A later process may have other code by the same name."""
    model = recorded()
    model.__class__ = types.new_class("Typed", (type(model),), {}, lambda space: space.update(__module__="nowhere"))
    passed_twins.keep("key", 0.5, model)
    assert passed_twins.find("key") == 0.5 and not notes()


def test_what_a_key_is_made_of(monkeypatch):
    require_native(CPU)
    model = build("llama")
    keys = [passed_twins.key_of(model, CPU, TYPE)]
    assert passed_twins.key_of(build("llama"), CPU, TYPE) == keys[0]

    def changed(where, name, value):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            keys.append(passed_twins.key_of(model, CPU, TYPE))

    keys.append(passed_twins.key_of(model, CPU, torch.float16))
    changed(model.config, "rms_norm_eps", 0.5)
    changed(model.config, "_attn_implementation", "eager")
    changed(modeling_llama.LlamaMLP, "forward", lambda self, x: x)
    changed(modeling_llama.LlamaMLP, "forward", lambda self, x: x + 1)
    changed(passed_twins, "transformers_version", lambda: "99.0")
    changed(torch, "__version__", "99.0")
    changed(passed_twins, "_own_code", lambda: b"other")
    changed(passed_twins, "_hash_of", lambda path: path.encode())
    changed(loader, "_status", loader._status | {"cpu": loader._without("cpu", "HF_FASTPATH_NATIVE=0")})
    assert len({*keys}) == len(keys)


@pytest.mark.parametrize("groups", ((8, 4), (2, 2), (1, 1)))
def test_twins_of_routers_with_groups(groups, tried):
    """A group of the twin has as many experts as DeepSeek-V3's router sums."""
    config = small_config("deepseek_v3")
    config.n_routed_experts, config.num_experts_per_tok = 32, 2
    config.n_group, config.topk_group = groups
    model = hf_fastpath.patch(AutoModelForCausalLM.from_config(config), quiet=True)
    assert hf_fastpath.report(model).loop == "fast"
    (twin,) = tried
    assert (twin.config.n_group, twin.config.topk_group) == (min(groups[0], 2), 1)
    assert twin.config.n_routed_experts == 4
