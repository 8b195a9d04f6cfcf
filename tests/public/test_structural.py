"""Families without an architecture file are patched if their code is a listed family's, else declined by name."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import re
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from models import (
    CPU,
    SHORT,
    VOCAB,
    assert_same_instances,
    build,
    counting,
    instances,
    left_padded,
    prompt,
    require_native,
)
from parity import assert_equal_generation

import hf_fastpath
from hf_fastpath import UnsupportedModelError, structural
from hf_fastpath.architecture import architectures
from hf_fastpath.check.explain import examine
from hf_fastpath.patching import selftest

SIZES = dict(hidden_size=96, num_attention_heads=2, num_key_value_heads=1, intermediate_size=140)
SIZES |= dict(num_hidden_layers=2, vocab_size=VOCAB, bos_token_id=1, eos_token_id=None, pad_token_id=0)
SIZES |= dict(initializer_range=0.15)


#: name of the listed family -> prefix of its classes, and sizes that differ
FAMILIES = {"llama": ("Llama", {}), "qwen3": ("Qwen3", {"head_dim": 40}), "gpt2": ("GPT2", {})}


@pytest.fixture
def family(tmp_path, monkeypatch):
    """Make a model with code of its own: a listed family's under other names, with lines replaced."""

    def make(*changes: tuple[str, str], like: str = "llama"):
        name, sizes = FAMILIES[like]
        source = importlib.import_module(f"transformers.models.{like}.modeling_{like}")
        code = re.sub(rf"\b{name}(?!Config)", "Alpaca", inspect.getsource(source))
        code = code.replace("from ... import", "from transformers import").replace("from ...", "from transformers.")
        code = code.replace("from .configuration_", f"from transformers.models.{like}.configuration_")
        for old, new in changes:
            assert old in code, f"transformers' {name} has no {old!r}: choose another line to change"
            code = code.replace(old, new, 1)
        path = tmp_path / "modeling_alpaca.py"
        path.write_text(code)
        spec = importlib.util.spec_from_file_location("modeling_alpaca", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "modeling_alpaca", module)
        spec.loader.exec_module(module)
        cls = next(value for key, value in vars(module).items() if re.fullmatch("Alpaca(ForCausalLM|LMHeadModel)", key))
        torch.manual_seed(0)
        return cls(cls.config_class(**SIZES, **sizes)).eval()

    return make


@pytest.mark.parametrize("like", FAMILIES)
def test_a_twin_is_patched_and_right(like, family, device, capsys):
    require_native(device)
    stock = family(like=like).to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock))
    report = hf_fastpath.report(ours)
    assert report.loop == "fast" and report.like == like and not report.declined
    norms = {"llama": {"norm": 5}, "qwen3": {"norm": 9}, "gpt2": {}}
    assert report.patched == {"layer": 2, "attention": 2, "mlp": 2} | norms[like]
    assert f"(structural: like {like})" in capsys.readouterr().err
    assert examine(stock)[1].like == like
    assert_equal_generation(ours, stock)
    assert_equal_generation(copy.deepcopy(ours), stock)
    assert hf_fastpath.verify(ours, left_padded(device)["input_ids"], max_new_tokens=8).ok
    before = instances(stock)
    assert_same_instances(instances(hf_fastpath.unpatch(hf_fastpath.patch(stock, quiet=True))), before)


@pytest.mark.parametrize("architecture", architectures(), ids=lambda architecture: architecture.name)
def test_every_listed_family_is_its_own_twin(architecture):
    """The comparison finds the structure in the family itself, and in no other."""
    found = structural.match(build(architecture.name))
    assert found.like == architecture.name and not found.differences, str(found)
    assert found.architecture == replace(architecture, like=architecture.name)


@pytest.mark.parametrize("architecture", architectures(), ids=lambda architecture: architecture.name)
def test_families_are_told_apart_by_the_parts_of_a_layer(architecture):
    """A family's code is imported only if a layer has its parts; a module that no family names is none of them."""
    layer = build(architecture.name).get_submodule(f"{architecture.base}.{architecture.layers}")[0]
    assert structural._has_parts_of(layer, architecture)
    if architecture.mlp is not None and architecture.layer.mlp is not None:
        layer.further_norm = torch.nn.LayerNorm(4)
        assert not structural._has_parts_of(layer, architecture)
        del layer.further_norm
    delattr(getattr(layer, architecture.layer.attention), architecture.attention.out)
    assert not structural._has_parts_of(layer, architecture)


def test_comments_annotations_and_docstrings_do_not_matter(family):
    model = family(
        ("down_proj = self.down_proj(", "# down\n        down_proj: torch.Tensor = self.down_proj("),
        ("def rotate_half(x):\n", 'def rotate_half(x: "torch.Tensor"):\n'),
    )
    assert structural.match(model).architecture is not None


#: difference from Llama -> what the error has to name
DIFFERENT = {
    "mlp": (("self.act_fn(self.gate_proj(x))", "self.act_fn(0.5 * self.gate_proj(x))"), "AlpacaMLP.forward"),
    "norm": (
        ("return self.weight * hidden_states", "return (1 + self.weight) * hidden_states"),
        "AlpacaRMSNorm.forward",
    ),
    "layer": (
        ("hidden_states = residual + hidden_states", "hidden_states = residual - hidden_states"),
        "AlpacaDecoder",
    ),
    "rotation": (("return torch.cat((-x2, x1), dim=-1)", "return torch.cat((x2, -x1), dim=-1)"), r"rotate_half\(\)"),
    "angles": (("cos = emb.cos()", "cos = 2 * emb.cos()"), "AlpacaRotaryEmbedding.forward"),
    "decoder": (("hidden_states = self.norm(", "hidden_states = 2 * self.norm("), "AlpacaModel.forward"),
    "logits": (("logits = self.lm_head(", "logits = 2 * self.lm_head("), "AlpacaForCausalLM.forward"),
    "method": (
        (
            "class AlpacaMLP(nn.Module):\n",
            "class AlpacaMLP(nn.Module):\n    def __call__(self, x):\n        return x\n\n",
        ),
        r"only AlpacaMLP has __call__\(\)",
    ),
    "name": (("self.self_attn = ", "self.attention = "), "model.layers.0.self_attn is missing"),
}


@pytest.mark.parametrize(("change", "named"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_model_that_differs_is_no_twin_and_is_recorded(change, named, family):
    """The comparison says where it differs; what the model computes is recorded, if it computes anything."""
    require_native(CPU)
    model = family(change)
    found = structural.match(model)
    assert found.architecture is None and re.search(f"Most like llama, but: .*{named}", str(found))
    if "self.attention = " in change:  # its forward looks for another name
        before = instances(model)
        with pytest.raises(
            UnsupportedModelError, match=r"not_recorded\.\n.*'AlpacaDecoderLayer' object has no attribute"
        ):
            hf_fastpath.patch(model, quiet=True)
        return assert_same_instances(instances(model), before)
    ids = prompt(CPU)
    expected = model.generate(ids, **SHORT)
    hf_fastpath.patch(model, quiet=True, strict=True)
    assert torch.equal(model.generate(ids, **SHORT), expected)
    assert hf_fastpath.report(model).architecture == "recorded"


def test_a_twin_whose_attributes_mean_something_else_fails_the_self_test(family):
    """The code is the same, but ``__init__`` sets something else: every layer reads the keys of layer 0."""
    require_native(CPU)
    model = family(("self.layer_idx = layer_idx", "self.layer_idx = 0"))
    before = instances(model)
    with pytest.raises(UnsupportedModelError, match="has no architecture file and was taken for a llama, and a small"):
        hf_fastpath.patch(model, quiet=True)
    assert_same_instances(instances(model), before)


def test_a_forward_that_other_code_gives_a_twin_is_honored(family, monkeypatch):
    require_native(CPU)
    stock = family()
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    mlp = type(stock.model.layers[0].mlp)
    real = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: 2 * real(self, x))
    with counting(ours) as counts:
        assert_equal_generation(ours, stock, fast=False)
    assert counts.reasons["class_forward"], counts.reasons


def test_a_listed_family_needs_no_structure(monkeypatch):
    monkeypatch.setattr(structural, "match", lambda model: pytest.fail("looked for a twin"))
    monkeypatch.setattr(selftest, "run", lambda *_: pytest.fail("ran the self-test"))
    require_native(CPU)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    assert hf_fastpath.report(hf_fastpath.patch(model, quiet=True)).like is None
