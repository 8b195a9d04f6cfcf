"""patch(weights=...) of decoders without an architecture file."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from causal_lm_types import VOCAB, small_model
from models import CPU, counting, require_native
from parity import assert_same_tokens
from quantized import packed_in, with_dequantized

import hf_fastpath
from hf_fastpath.compat import CACHE
from hf_fastpath.patching.state import state_of
from hf_fastpath.quantization import FORMATS
from hf_fastpath.recording import layers

#: types that are not recorded before transformers 5.24: one takes its cache by another name, one needs four heads
NOT_BEFORE = {"mamba2", "codegen"}
GREEDY = dict(max_new_tokens=12, do_sample=False)
#: type -> what there is none of in the families with a file
TYPES = {
    "codegen": "fused projections in an order of its own",
    "deepseek_v2": "a latent, whose keys and values a layer makes, and experts",
    "glm4": "fused gate and up",
    "lfm2": "convolutions",
    "mamba2": "states alone",
    "nemotron": "no gate",
    "olmo": "norms without weights",
    "qwen2_moe": "shared experts",
    "qwen3_5_text": "recurrences",
}
#: type -> products of a layer's step: q, k and v are one without biases, which glm4 has, with gate and up in one matrix
_OF_A_LAYER = {
    "helium": ["packed_qkv_rope_append", "packed_gemv", "packed_gemv_swiglu", "packed_gemv"],
    "glm4": ["packed_gemv"] * 4 + ["packed_gemv_swiglu", "packed_gemv"],
}


def prompt(batch: int, device: torch.device) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, 9), generator=torch.Generator().manual_seed(0)).to(device)


def need(model_type: str) -> None:
    require_native(CPU)
    if model_type in NOT_BEFORE and CACHE != "cache":
        pytest.skip(f"{model_type} is not recorded in transformers {transformers.__version__}")


@pytest.mark.parametrize("model_type", TYPES)
def test_decodes_as_the_dequantized_model(model_type, device):
    need(model_type)
    require_native(device)
    format = list(FORMATS)[list(TYPES).index(model_type) % len(FORMATS)]
    stock = small_model(model_type).to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), weights=format, lm_head="int8", quiet=True)
    same = with_dequantized(stock, ours)
    for batch in (1, 3):
        with counting(ours) as counts:
            found = ours.generate(prompt(batch, device), **GREEDY)
        assert counts.fast == 12 * batch and not counts.reasons
        assert_same_tokens(found, same.generate(prompt(batch, device), **GREEDY))


def test_what_is_left_alone():
    """A mixture's router and shared expert, and a layer whose weight attention over latents reads by itself."""
    require_native(CPU)
    names = packed_in(hf_fastpath.patch(small_model("deepseek_v2"), weights="int8", quiet=True))
    attention = "model.layers.1.self_attn"
    assert f"{attention}.kv_a_proj_with_mqa" in names and f"{attention}.kv_b_proj" not in names
    assert f"{attention}.o_proj" in names
    of_mixture = {name.rpartition("layers.1.mlp.")[2] for name in names if "layers.1.mlp" in name}
    assert of_mixture == {"experts.gate_up_proj", "experts.down_proj"}


def test_numbers_for_heads_are_left_alone(monkeypatch):
    require_native(CPU)
    for least, are_left in ((1 / 16, False), (1 / 8, True)):  # of 64 features, 4 for the heads
        monkeypatch.setattr(layers, "_LEAST_OUTPUTS", least)
        names = packed_in(hf_fastpath.patch(small_model("qwen3_5_text"), weights="int8", quiet=True))
        gates = [name for name in names if name.endswith(("in_proj_a", "in_proj_b"))]
        assert (not gates) == are_left and any(name.endswith("in_proj_qkv") for name in names)


@pytest.mark.parametrize(("model_type", "of_a_layer"), _OF_A_LAYER.items())
def test_products_of_a_layer(model_type, of_a_layer):
    require_native(CPU)
    ours = hf_fastpath.patch(small_model(model_type), weights="int4", quiet=True)
    ours.generate(prompt(1, CPU), **GREEDY)
    (plan,) = state_of(ours).plans
    names = [name.split("::")[-1].split(".")[0] for name in plan.program.op_names() if "packed" in name]
    assert names == of_a_layer * len(ours.model.layers)


class Reading(torch.nn.Module):
    """A norm that reads the weight of the head of a model."""

    def __init__(self, norm, model):
        super().__init__()
        self.norm, self.model = norm, [model]

    def forward(self, x):
        return self.norm(x) + self.model[0].lm_head.weight.sum()


def test_a_head_whose_weight_the_model_reads():
    """Its type may be asked for, as Mamba 2 does; what is in it may not."""
    require_native(CPU)
    ours = small_model("glm4")
    ours.model.norm = Reading(ours.model.norm, ours)
    with pytest.raises(ValueError, match="lm_head='int8': the model's own code .*quantized has no 'sum'"):
        hf_fastpath.patch(ours, weights="int8", lm_head="int8", quiet=True)
    assert not packed_in(ours)


def test_queries_alone_are_quantized(monkeypatch):
    """Keys and values of few heads have few outputs."""
    require_native(CPU)
    monkeypatch.setattr(layers, "_LEAST_OUTPUTS", 0.75)
    stock = small_model("helium")
    ours = hf_fastpath.patch(copy.deepcopy(stock), weights="int4", quiet=True)
    attention = {name.rpartition(".")[2] for name in packed_in(ours) if "layers.0.self_attn" in name}
    assert "q_proj" in attention and not attention & {"k_proj", "v_proj"}
    same = with_dequantized(stock, ours)
    with counting(ours) as counts:
        found = ours.generate(prompt(2, CPU), **GREEDY)
    assert counts.fast == 24 and not counts.reasons
    assert_same_tokens(found, same.generate(prompt(2, CPU), **GREEDY))
