"""Twins that have passed: what they are known by, and that another process finds them."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import shutil
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from causal_lm_types import small_config
from models import build, require_native
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations import sdpa_attention
from transformers.models.llama import modeling_llama

import hf_fastpath
from hf_fastpath import compat, known_code
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


@pytest.fixture
def helped(tmp_path, monkeypatch):
    """Return a function that writes a model, a helper and a number in a module each, and imports them anew."""
    monkeypatch.setattr(compat.imported, "_started", lambda: time.time() + 60)
    monkeypatch.syspath_prepend(tmp_path)

    def make(factor="2", scale="1.0"):
        files = {
            "scales_of_twins": f"SCALE = {scale}",
            "helper_of_twins": f"def helped(x):\n    return x * {factor}\n",
            "model_of_twins": "import torch\nimport scales_of_twins\nfrom helper_of_twins import helped\n"
            "class Model(torch.nn.Linear):\n    def forward(self, x):\n"
            "        return helped(x) * scales_of_twins.SCALE\n",
        }
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        compat.imported._file_of.cache_clear()
        model = importlib.import_module("model_of_twins").Model(2, 2)
        model.config = LlamaConfig()
        return model

    yield make
    for name in ("model_of_twins", "helper_of_twins", "scales_of_twins"):
        sys.modules.pop(name, None)


def tried_as(model, forget):
    """Return what another process finds of a twin, or None; then try it, and keep that it has passed."""
    forget()
    key = passed_twins.key_of(model, CPU, TYPE)
    found = passed_twins.find(key)
    with passed_twins.hearing():
        model(torch.ones(1, 2))
    passed_twins.keep(key, 0.125, model)
    return found


def test_code_of_helpers_counts(helped, another_process):
    """A helper's file, a value of another module and a function put in its place are other code each."""
    assert tried_as(helped(), another_process) is None
    assert tried_as(helped(), another_process) == 0.125
    assert tried_as(helped(factor="3"), another_process) is None
    assert tried_as(helped(scale="0.5"), another_process) is None
    model = helped()
    sys.modules["model_of_twins"].helped = torch.abs
    assert tried_as(model, another_process) is None
    assert tried_as(helped(), another_process) == 0.125


def test_a_file_that_was_edited_behind_its_import_is_not_kept(helped, another_process, tmp_path, monkeypatch):
    model, (path,) = helped(), tmp_path.glob("helper*.py")
    path.write_text(path.read_text().replace("2", "40"))  # of another length: Python compares seconds and lengths
    assert tried_as(model, another_process) is None and not notes()
    model = helped()
    monkeypatch.setattr(compat.imported, "_started", lambda: time.time() - 60)
    compat.imported._file_of.cache_clear()
    assert tried_as(model, another_process) is None and not notes()


@pytest.mark.parametrize("why", ("development", "__main__", "memory", "profiler"))
def test_code_that_another_process_may_not_have_is_not_kept(why, helped, another_process, monkeypatch):
    model = helped()
    if why == "development":
        monkeypatch.setattr(known_code.transformers, "__version__", "5.99.0.dev0")
    elif why == "__main__":
        monkeypatch.setattr(type(model), "__module__", "__main__")
    elif why == "memory":
        exec("def helped(x): return x * 2", space := dict(vars(sys.modules["helper_of_twins"])))
        sys.modules["model_of_twins"].helped = space["helped"]
    before = sys.getprofile()
    if why == "profiler":
        sys.setprofile(lambda *event: None)
    try:
        assert tried_as(model, another_process) is None
    finally:
        sys.setprofile(before)
    assert not notes()


def test_a_pipe_or_a_link_is_no_note(helped, another_process, tmp_path):
    model = helped()
    tried_as(model, another_process)
    for place in (build_cache.TWINS, build_cache.HEARD):
        (note,) = (build_cache.root() / place).glob("*")
        content = note.read_bytes()
        for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir):
            note.rmdir() if note.is_dir() else note.unlink()
            make(note)
            another_process()
            assert passed_twins.find(passed_twins.key_of(model, CPU, TYPE)) is None
        note.rmdir()
        note.write_bytes(content)
    assert tried_as(model, another_process) == 0.125


def test_another_process_finds_it(another_process, tried):
    hf_fastpath.patch(recorded(), quiet=True)
    (note,) = notes()
    assert len(tried) == 1 and float(note.read_text()) < 1e-5
    note.write_text("0.125")
    another_process()
    again = hf_fastpath.patch(recorded(hidden_size=96), quiet=True)  # the twin has its own size
    assert len(tried) == 1 and hf_fastpath.report(again).loop == "fast"
    assert selftest.run(again) == (None, 0.125)


def test_code_that_runs_by_the_way_does_not_count(tried, monkeypatch):
    """Callbacks of the garbage collector and handlers of logs are the process's; no file has these."""
    exec("def ran(*what): calls.append(what)", space := {"calls": [], "__name__": "nowhere"})
    handler = logging.Handler()
    handler.emit = space["ran"]
    for name in ("", "torch.__trace"):  # PyTorch tells the latter of each size of a recording
        monkeypatch.setattr(logging.getLogger(name), "handlers", [handler])
    gc.callbacks.append(space["ran"])
    try:
        hf_fastpath.patch(recorded(), quiet=True)
    finally:
        gc.callbacks.remove(space["ran"])
    assert len(tried) == len(notes()) == 1 and {len(each) for each in space["calls"]} == {1, 2}


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


@pytest.mark.parametrize(
    "content", ("", "much", "nan", "inf", "0.1, 0.1", "\udcff", "-0.1", "0.3", "0.1" + " " * (1 << 18))
)
def test_a_damaged_note_is_none(content, another_process):
    passed_twins.keep("key", 0.125, recorded())
    (note,) = notes()
    note.write_bytes(content.encode(errors="surrogateescape"))
    another_process()
    assert passed_twins.find("key") is None


def test_a_note_of_others_is_not_trusted(another_process):
    passed_twins.keep("key", 0.125, recorded())
    (note,) = notes()
    another_process()
    assert passed_twins.find("key") == 0.125
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
    passed_twins.keep("key", 0.125, recorded())
    assert passed_twins.find("key") == 0.125
    another_process()
    assert passed_twins.find("key") is None


def test_code_without_a_file_is_not_kept(another_process):
    """A later process may have other code by the same name."""
    model = recorded()
    model.__class__ = types.new_class("Typed", (type(model),), {}, lambda space: space.update(__module__="nowhere"))
    passed_twins.keep("key", 0.125, model)
    assert passed_twins.find("key") == 0.125 and not notes()


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
    changed(known_code, "transformers_version", lambda: "99.0")
    changed(torch, "__version__", "99.0")
    changed(passed_twins, "own_code", lambda: b"other")
    changed(sdpa_attention, "repeat_kv", lambda states, groups: states)
    changed(compat.imported, "_file_of", lambda name, path: compat.imported._File(path.encode()))
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
