"""Versions of transformers: the oldest is named in one place, and an untested version is tried on a twin first."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch
from models import CPU, assert_same_instances, build, fresh, instances, prompt, require_native
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.llama import modeling_llama

import hf_fastpath
from hf_fastpath import UnsupportedModelError, compat
from hf_fastpath.decode.sources import steps
from hf_fastpath.patching import passed_twins, selftest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def untested(monkeypatch):
    """Make the installed transformers seem untested; yield the models of which a twin was tried."""
    require_native(CPU)
    tried, run = [], selftest.run
    monkeypatch.setattr(passed_twins, "find", lambda key: None)
    monkeypatch.setattr(compat.versions.transformers, "__version__", "99.1.0")
    monkeypatch.setattr(selftest, "run", lambda model, *how: (tried.append(model), run(model, *how))[1])
    return tried


def test_oldest_version_is_a_tested_one():
    oldest = re.search(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()).group(1)
    assert oldest == compat.TESTED_TRANSFORMERS[0]


def test_newest_version_of_the_tests_is_a_tested_one():
    """So a release that breaks something is met when it is tried on purpose, not in the middle of other work."""
    major, minor = re.search(r'"transformers<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text()).groups()
    assert f"{major}.{int(minor) - 1}" == compat.TESTED_TRANSFORMERS[-1]


def test_tested_version_needs_no_self_test(monkeypatch):
    require_native(CPU)
    monkeypatch.setattr(selftest, "run", lambda *_: pytest.fail("ran the self-test"))
    hf_fastpath.patch(build("llama"), quiet=True)


def test_untested_version_that_computes_as_the_tested_ones_is_patched(untested):
    model = hf_fastpath.patch(build("llama"), quiet=True)
    assert untested == [model]
    assert hf_fastpath.report(model).loop == "fast"


def test_untested_version_that_computes_otherwise_is_declined(untested, monkeypatch):
    """transformers' own code has another MLP, which only a comparison can tell."""
    change = "def forward(self, x): return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
    exec(change, home := dict(vars(modeling_llama)))
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", home["forward"])
    model = build("llama")
    before = instances(model)
    with pytest.raises(
        UnsupportedModelError, match="transformers 99.1 is not among the tested versions .*, and a small"
    ):
        hf_fastpath.patch(model, quiet=True)
    assert untested == [model]
    assert_same_instances(instances(model), before)


def test_a_file_that_is_another_one_is_untested_whatever_its_version(monkeypatch):
    require_native(CPU)
    assert compat.why_untested(("transformers.models.llama.modeling_llama",)) is None
    for file in ("generation/utils.py", "models/llama/modeling_llama.py"):
        with monkeypatch.context() as patch:
            patch.setitem(compat.tested_code._TESTED, file, ("of another version",))
            patch.setattr(selftest, "run", lambda *_: ("token 3 is 5", 0.0))
            with pytest.raises(UnsupportedModelError, match=f"^{file} of transformers .* is another one .* 3 is 5"):
                hf_fastpath.patch(build("llama"), quiet=True)
    monkeypatch.setattr(compat.versions.transformers, "__version__", f"{compat.transformers_version()}.0.dev0")
    assert "under development" in compat.why_untested(())


CHANGED = {
    "temperature": (TemperatureLogitsWarper, lambda scores, warper: scores / warper.temperature**0.9),
    "top_p": (TopPLogitsWarper, lambda scores, warper: scores.masked_fill(scores.softmax(-1) < 0.01, -float("inf"))),
    "min_p": (MinPLogitsWarper, lambda scores, warper: scores),
    "top_k": (TopKLogitsWarper, lambda scores, warper: scores),
}


@pytest.mark.parametrize("what", (*CHANGED, "draw", "nothing"))
def test_sampling_that_changed_is_declined(what, untested, monkeypatch):
    """Each of our own draws comes of our own rule, which says nothing of stock's."""
    if what in CHANGED:
        cls, rule = CHANGED[what]
        monkeypatch.setattr(cls, "__call__", lambda self, input_ids, scores: rule(scores, self))
    elif what == "draw":
        real = torch.multinomial
        exec("def multinomial(p, num_samples): return real(p.flip(-1), num_samples).neg() + p.shape[-1] - 1",
             home := {"real": real})  # fmt: skip
        space = types.SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch) if name[:2] != "__"})
        space.multinomial = home["multinomial"]
        monkeypatch.setitem(vars(sys.modules["transformers.generation.utils"]), "torch", space)
    model = build("llama")
    if what == "nothing":
        assert hf_fastpath.report(hf_fastpath.patch(model, quiet=True)).loop == "fast"
        return
    with pytest.raises(UnsupportedModelError, match="does not decode as stock does"):
        hf_fastpath.patch(model, quiet=True)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
def test_layers_take_the_cache_by_its_old_name(monkeypatch):
    """Code that was written before 5.24 passes it so, and 5.24 still understands it."""
    require_native(CPU)
    outputs, fused, decoder_layer = [], [], steps.decoder_layer
    monkeypatch.setattr(steps, "decoder_layer", lambda *given: fused.append(0) or decoder_layer(*given))
    for model in fresh("llama"):
        cache = hf_fastpath.FastpathCache(model.config)
        model(prompt(CPU, 1, 9), **{compat.CACHE: cache})
        x = torch.linspace(-1, 1, model.config.hidden_size).view(1, 1, -1)
        angles = model.model.rotary_emb(x, torch.tensor([[9]]))
        outputs.append(model.model.layers[0](x, past_key_values=cache, position_embeddings=angles))
        assert cache.get_seq_length(0) == 10
    assert len(fused) == 1
    torch.testing.assert_close(*outputs)
