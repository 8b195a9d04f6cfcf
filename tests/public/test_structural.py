"""Families without an architecture file: patched if their code is a listed one's, else declined by name."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys

import pytest
import torch
import transformers
from models import CPU, GREEDY, VOCAB, assert_same_instances, instances, left_padded, require_native
from parity import assert_equal_generation
from transformers.models.llama import modeling_llama

import hf_fastpath
from hf_fastpath import UnsupportedModelError, selftest, structural
from hf_fastpath.explain import explain
from hf_fastpath.patching import examine

SIZES = dict(hidden_size=96, num_attention_heads=2, num_key_value_heads=1, intermediate_size=140)
SIZES |= dict(num_hidden_layers=2, vocab_size=VOCAB, bos_token_id=1, eos_token_id=None, pad_token_id=0)
SIZES |= dict(initializer_range=0.15)


def relative(model_code: str, old: str, new: str) -> str:
    assert old in model_code, f"transformers' Llama has no {old!r}: choose another line to change"
    return model_code.replace(old, new, 1)


@pytest.fixture
def family(tmp_path, monkeypatch):
    """Makes a model of remote code: Llama's under other names, with lines replaced."""

    def make(*changes: tuple[str, str], **config):
        code = inspect.getsource(modeling_llama).replace("LlamaConfig", "Config").replace("Llama", "Alpaca")
        code = code.replace("from ...", "from transformers.").replace("from .configuration_llama import", "# ")
        code = code.replace("import torch\n", "import torch\nfrom transformers import LlamaConfig as Config\n", 1)
        for old, new in changes:
            code = relative(code, old, new)
        path = tmp_path / "modeling_alpaca.py"
        path.write_text(code)
        spec = importlib.util.spec_from_file_location("modeling_alpaca", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "modeling_alpaca", module)
        spec.loader.exec_module(module)
        torch.manual_seed(0)
        return module.AlpacaForCausalLM(transformers.LlamaConfig(**SIZES, **config)).eval()

    return make


def test_a_twin_is_patched_and_right(family, device, capsys):
    require_native(device)
    stock = family().to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock))
    report = hf_fastpath.report(ours)
    assert report.loop == "fast" and report.like == "llama" and not report.declined
    assert report.patched == {"layer": 2, "attention": 2, "mlp": 2, "norm": 5}
    assert "(structural: like llama)" in capsys.readouterr().out
    assert_equal_generation(ours, stock)
    assert_equal_generation(copy.deepcopy(ours), stock)
    assert hf_fastpath.verify(ours, left_padded(device)["input_ids"], max_new_tokens=8).ok
    before = instances(stock)
    assert_same_instances(instances(hf_fastpath.unpatch(hf_fastpath.patch(stock, quiet=True))), before)


def test_comments_annotations_and_docstrings_do_not_matter(family):
    model = family(
        ("down_proj = self.down_proj(", "# down\n        down_proj: torch.Tensor = self.down_proj("),
        ("def rotate_half(x):\n", 'def rotate_half(x: "torch.Tensor"):\n'),
    )
    assert structural.match(model).architecture is not None


#: what is other than in Llama -> what the error has to name
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
    "name": (("input_layernorm", "first_norm"), "input_layernorm is missing"),
}


@pytest.mark.parametrize(("change", "named"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_model_that_differs_is_declined_and_says_where(change, named, family):
    if change[0] == "input_layernorm":
        model = family()
        for layer in model.model.layers:
            layer.first_norm = layer._modules.pop("input_layernorm")
    else:
        model = family(change)
    before = instances(model)
    with pytest.raises(UnsupportedModelError, match=f"Most like llama, but: .*{named}"):
        hf_fastpath.patch(model, quiet=True)
    assert_same_instances(instances(model), before)


def test_a_twin_whose_attributes_mean_something_else_fails_the_self_test(family):
    """The code is the same, but what ``__init__`` sets is not: every layer reads the keys of layer 0."""
    require_native(CPU)
    model = family(("self.layer_idx = layer_idx", "self.layer_idx = 0"))
    before = instances(model)
    with pytest.raises(UnsupportedModelError, match="has no architecture file and was taken for a llama, and a small"):
        hf_fastpath.patch(model, quiet=True)
    assert_same_instances(instances(model), before)


def test_a_listed_family_needs_no_structure(monkeypatch):
    monkeypatch.setattr(structural, "match", lambda model: pytest.fail("looked for a twin"))
    monkeypatch.setattr(selftest, "run", lambda model: pytest.fail("ran the self-test"))
    require_native(CPU)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    assert hf_fastpath.report(hf_fastpath.patch(model, quiet=True)).like is None


@pytest.mark.skipif(not hasattr(transformers, "InternLM3ForCausalLM"), reason="this transformers has no InternLM3")
def test_a_family_of_transformers_without_a_file(tmp_path):
    """InternLM3 computes what Llama does."""
    require_native(CPU)
    config = transformers.InternLM3Config(**SIZES, head_dim=24 + 8)
    torch.manual_seed(0)
    stock = transformers.InternLM3ForCausalLM(config).eval()
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    assert hf_fastpath.report(ours).like == "llama"
    assert_equal_generation(ours, stock, **GREEDY)
    assert examine(stock).like == "llama"
    config.save_pretrained(tmp_path)
    found = explain(str(tmp_path))
    assert found.fast and found.self_tested and "patches/llama.py" in str(found)
