"""Plans over several devices. On the CPU, layers only claim to be elsewhere: copies are made, and calls are split."""

from __future__ import annotations

import pytest
import torch
from models import CPU, GREEDY, SHORT, counting, fresh, left_padded, over_architectures, prompt, require_native
from parity import assert_same_tokens, both

from hf_fastpath.decode.layer_part import LayerPart
from hf_fastpath.decode.stages import Stages
from hf_fastpath.decode.structure import ModelPart
from hf_fastpath.patching.state import state_of


@pytest.fixture
def apart(monkeypatch):
    """Let every layer claim a device of its own, behind that of embeddings and head."""
    require_native(CPU)
    monkeypatch.setattr(LayerPart, "device", property(lambda part: torch.device("cpu", 1 + layer_of(part))))


def layer_of(part: LayerPart) -> int:
    return part.attention.module.layer_idx


def plans_of(model) -> list:
    return list(state_of(model).plans)


@over_architectures
def test_a_step_moves_from_device_to_device(apart, architecture):
    stock, ours = fresh(architecture, CPU)
    cases = (dict(input_ids=prompt(CPU)), GREEDY), (left_padded(CPU, 3), SHORT)
    cases += ((left_padded(CPU, 2), SHORT | dict(do_sample=True, top_k=20)),)
    for inputs, options in cases:
        with counting(ours) as counts:
            found, expected = both(stock, ours, **inputs, **options)
        assert_same_tokens(found, expected, stock, inputs.get("attention_mask"))
        assert counts.fast and not counts.reasons, counts.reasons
    for plan in plans_of(ours):
        program = plan.program
        assert isinstance(program, Stages)
        places = [stage.device for stage in program._stages]
        assert places == [CPU, torch.device("cpu", 1), torch.device("cpu", 2), CPU]
        assert all(stage.parcels for stage in program._stages[1:])


def test_a_plan_is_used_again_with_other_padding(apart):
    """Constant tensors are copied anew when another call begins."""
    stock, ours = fresh("llama", CPU)
    for seed in range(3):
        inputs = left_padded(CPU, 3)
        inputs["input_ids"] = inputs["input_ids"].roll(seed, 0) if seed else inputs["input_ids"]
        inputs["attention_mask"] = inputs["attention_mask"].roll(seed, 0)
        found, expected = both(stock, ours, **inputs, **SHORT)
        assert_same_tokens(found, expected, stock, inputs["attention_mask"])
    assert len(plans_of(ours)) == 1


@over_architectures
def test_a_tied_head_is_beside_the_embeddings(apart, monkeypatch, architecture):
    """device_map="auto" puts the final norm beside the last layer, and a tied head beside the embeddings."""
    last = torch.device("cpu", 2)
    monkeypatch.setattr(ModelPart, "norm_device", last)
    stock, ours = fresh(architecture, CPU)
    for batch in (1, 3):
        with counting(ours) as counts:
            found, expected = both(stock, ours, input_ids=prompt(CPU, batch), **SHORT)
        assert_same_tokens(found, expected, stock)
        assert counts.fast and not counts.reasons, counts.reasons
    for plan in plans_of(ours):
        assert [stage.device for stage in plan.program._stages] == [CPU, torch.device("cpu", 1), last, CPU]
        assert "norm" in plan.program._stages[2].program.op_names()[-1]


def test_one_device_is_one_program():
    require_native(CPU)
    _, ours = fresh("llama", CPU)
    ours.generate(prompt(CPU), **SHORT)
    assert not isinstance(plans_of(ours)[0].program, Stages)
