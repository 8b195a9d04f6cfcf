"""Mixtures whose classes run experts in a loop of their own, which nobody can record."""

from __future__ import annotations

import copy

import causal_lm_types
import multimodal_types
import pytest
import torch
from models import CPU, counting, require_native
from parity import assert_same_tokens
from recorded_types import left
from torch import nn

import hf_fastpath
from hf_fastpath import compat
from hf_fastpath.errors import UnsupportedModelError
from hf_fastpath.recording.passes import experts

FEW = dict(max_new_tokens=12, do_sample=False)


class Loop(nn.Module):
    """Experts as transformers' classes have them that know of no other functions."""

    def __init__(self, act_fn=nn.functional.silu):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 6))
        self.act_fn = act_fn

    def expert(self, x: torch.Tensor, number: int) -> torch.Tensor:
        gate, up = nn.functional.linear(x, self.gate_up_proj[number]).chunk(2, dim=-1)
        return nn.functional.linear(self.act_fn(gate) * up, self.down_proj[number])

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            rows, places = torch.where(top_k_index == number)
            out[rows] += self.expert(hidden_states[rows], number) * top_k_weights[rows, places, None]
        return out


class Scaled(Loop):
    """Experts that compute something else."""

    def expert(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return super().expert(x, number) * number


def test_a_loop_is_compared_with_products_of_gathered_weights():
    for module, is_alike in (Loop(), True), (Loop(torch.sin), True), (Scaled(), False):
        assert compat.loops_over_experts(module)
        assert experts._gathers(module, compat.expert_stacks(module)) is is_alike


class WithoutWeights(Loop):
    """Experts of which the last give what they are given, or another number of times that."""

    def __init__(self, times=1.0):
        super().__init__()
        self.down_proj = nn.Parameter(self.down_proj[:2])
        self.with_weights, self.times = 2, times

    def expert(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return super().expert(x, number) if number < self.with_weights else self.times * x


def test_experts_without_weights_give_what_they_are_given():
    for module, is_alike in (WithoutWeights(), True), (WithoutWeights(2.0), False):
        stacks = compat.expert_stacks(module)
        assert experts._passes_on(module, stacks) is is_alike
        assert not experts._gathers(module, stacks)


def test_modules_that_ask_for_functions_are_no_loops():
    mixture = causal_lm_types.small_model("qwen2_moe")
    modules = [each for each in mixture.modules() if compat.expert_stacks(each) is not None]
    assert modules and not any(map(compat.loops_over_experts, modules))


@pytest.mark.parametrize("limits", [None, [0.0, 0.1]], ids=["plain", "clamped"])
def test_tokens_of_a_loop(limits):
    """Step 3.7 clamps what some layers' experts compute, which no kernel does: gathered products do."""
    require_native(CPU)
    config = multimodal_types.small_config("step3p7")
    config.text_config.swiglu_limits = limits
    config.text_config.mlp_layer_types = ["dense", "sparse"]
    stock = multimodal_types.model_of(config)
    ours = hf_fastpath.patch(multimodal_types.model_of(config), quiet=True)
    inputs = multimodal_types.prompt("step3p7", (0, 0), padding=2)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **FEW)
    assert counts.fast == 24 and not counts.reasons
    assert set(left(ours)) == (set() if limits is None else {"experts"})
    assert_same_tokens(found, stock.generate(**inputs, **FEW))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_with_experts_without_weights(dtype):
    """LongCat-Flash's router may choose experts that compute nothing."""
    require_native(CPU)
    stock = causal_lm_types.small_model("longcat_flash").to(dtype)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    ids = causal_lm_types.prompt(2, 9, seed=1)
    with counting(ours) as counts:
        found = ours.generate(ids, **FEW)
    assert counts.fast == 24 and not counts.reasons and not set(left(ours))
    if dtype == torch.float32:
        assert_same_tokens(found, stock.generate(ids, **FEW))


def test_another_loop_is_refused():
    require_native(CPU)
    with pytest.raises(UnsupportedModelError, match="experts in a loop of DbrxExperts's own"):
        hf_fastpath.patch(causal_lm_types.small_model("dbrx"), quiet=True)
