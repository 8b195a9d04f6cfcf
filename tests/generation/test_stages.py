"""Plans over several devices. On the CPU, layers only claim to be elsewhere: copies are made, and calls are split."""

from __future__ import annotations

import pytest
import torch
from models import CPU, GREEDY, SHORT, counting, fresh, left_padded, over_architectures, prompt, require_native
from parity import assert_same_tokens, both

from hf_fastpath import FastpathCache
from hf_fastpath.cache.layer import FastpathLayer
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.loops import prompt as reading
from hf_fastpath.decode.model.layer_part import LayerPart
from hf_fastpath.decode.model.structure import ModelInRoles
from hf_fastpath.decode.placed.stages import Stages
from hf_fastpath.decode.plans.draft_plan import DraftPlan
from hf_fastpath.patching.state import state_of


@pytest.fixture
def apart(monkeypatch):
    """Let every layer claim a device of its own, behind that of embeddings and head."""
    require_native(CPU)
    monkeypatch.setattr(LayerPart, "device", property(lambda part: torch.device("cpu", 1 + layer_of(part))))


@pytest.fixture
def admitted(monkeypatch):
    """Let a plan take a filled cache, whose layers are where they claim not to be."""
    real = FastpathLayer.admit
    monkeypatch.setattr(FastpathLayer, "admit", lambda layer, *given: real(layer, *given[:-1], CPU))


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
    monkeypatch.setattr(ModelInRoles, "norm_device", last)
    stock, ours = fresh(architecture, CPU)
    for batch in (1, 3):
        with counting(ours) as counts:
            found, expected = both(stock, ours, input_ids=prompt(CPU, batch), **SHORT)
        assert_same_tokens(found, expected, stock)
        assert counts.fast and not counts.reasons, counts.reasons
    for plan in plans_of(ours):
        assert [stage.device for stage in plan.program._stages] == [CPU, torch.device("cpu", 1), last, CPU]
        assert "norm" in plan.program._stages[2].program.op_names()[-1]


def assert_beginning(program) -> None:
    """Assert that the last calls are on the device of the first."""
    assert isinstance(program, Stages) and program._stages[-1].device == CPU
    assert program.op_names()[-3:] == ["alias.default", "argmax.default", "copy_.default"]


@over_architectures
def test_drafts_go_from_device_to_device(apart, admitted, architecture):
    stock, ours = fresh(architecture, CPU)
    _, assistant = fresh(architecture, CPU, num_hidden_layers=1, layer_types=None)
    ids = prompt(CPU, 1, 9).repeat(1, 4)
    ways = dict(prompt_lookup_num_tokens=3), dict(assistant_model=assistant)
    for way in (*ways, ways[0] | dict(return_dict_in_generate=True, output_logits=True)):
        with counting(ours) as counts:
            found, expected = both(stock, ours, input_ids=ids, **SHORT, **way)
        if "output_logits" in way:
            torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits))
            found, expected = found.sequences, expected.sequences
        assert_same_tokens(found, expected, stock)
        assert counts.fast and not counts.reasons, counts.reasons
    found = [plan.program for plan in plans_of(ours) if isinstance(plan, DraftPlan)]
    assert found
    for program in found:
        assert_beginning(program)


def test_a_turn_goes_from_device_to_device(apart, admitted, monkeypatch):
    """A few tokens behind others are read as drafts are where steps are captured, which the CPU claims to do."""
    monkeypatch.setattr(reading, "_CAPTURES", {"cpu"})
    stock, ours = fresh("llama", CPU)
    cache = FastpathCache(ours.config)
    first = ours.generate(prompt(CPU), **SHORT, **{CACHE: cache})
    assert not any(isinstance(plan, DraftPlan) for plan in plans_of(ours))
    again = torch.cat((first, prompt(CPU, 1, 5)), dim=1)
    with counting(ours) as counts:
        found = ours.generate(again, **SHORT, **{CACHE: cache})
    assert_same_tokens(found, stock.generate(again, **SHORT), stock)
    assert counts.fast == 12 and not counts.reasons, counts.reasons
    (program,) = [plan.program for plan in plans_of(ours) if isinstance(plan, DraftPlan)]
    assert_beginning(program)


def test_one_device_is_one_program():
    require_native(CPU)
    _, ours = fresh("llama", CPU)
    ours.generate(prompt(CPU), **SHORT)
    assert not isinstance(plans_of(ours)[0].program, Stages)
