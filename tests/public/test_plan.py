"""What patch() decides before it touches anything: analyse(model, options) and apply(plan, state)."""

from __future__ import annotations

import copy

import pytest
import torch
from models import CPU, assert_same_instances, build, instances, over_architectures, require_native
from transformers.generation import GenerationMixin

import hf_fastpath
from hf_fastpath.options import Options
from hf_fastpath.patching.analyse import analyse
from hf_fastpath.patching.apply import apply, claim, undo
from hf_fastpath.patching.ledger import Ledger
from hf_fastpath.patching.module_patch import KEY
from hf_fastpath.patching.state import PatchState, state_of


@over_architectures
def test_analyse_binds_nothing(architecture, monkeypatch):
    """Nothing is bound, not even for a moment."""
    model = build(architecture)
    before, sample = instances(model), GenerationMixin._sample
    monkeypatch.setattr(Ledger, "put", lambda *given: pytest.fail("bound something"))
    plan = analyse(model, Options.parse())
    assert_same_instances(instances(model), before)
    assert GenerationMixin._sample is sample
    assert plan.loop_reason is None and plan.generates and not plan.declined
    assert plan.architecture.name == plan.family.architecture.name == architecture


@over_architectures
def test_patch_binds_what_was_decided(architecture):
    require_native(CPU)
    model = build(architecture)
    plan = analyse(model, Options.parse())
    hf_fastpath.patch(model, quiet=True)
    patched = {id(module): vars(module)[KEY] for module in model.modules() if KEY in vars(module)}
    assert {id(binding.part.module): binding.part for binding in plan.bindings} == {
        at: patch.part for at, patch in patched.items()
    }
    report = hf_fastpath.report(model)
    assert report.patched == plan.patched and sum(plan.patched.values()) <= len(plan.bindings)


def test_a_plan_is_applied_and_undone():
    require_native(CPU)
    model = build("llama")
    before = instances(model)
    state = PatchState(Options.parse())
    plan = analyse(model, state.options)
    assert claim(model, state) and not claim(model, PatchState(Options.parse()))
    apply(plan, state)
    assert state_of(model) is state and state.decided is plan and state.model is model
    undo(state)
    assert_same_instances(instances(model), before)


def test_a_plan_names_what_is_to_be_quantized():
    require_native(CPU)
    model = build("llama", num_hidden_layers=3)
    plan = analyse(model, Options.parse(weights="int8", lm_head="int8"))
    assert plan.refusal is None and [len(each.groups) for each in plan.replacements] == [4, 4, 4, 1]
    attention = model.model.layers[1].self_attn
    together = plan.replacements[1].groups[0]
    assert [id(linear) for linear in together] == [id(attention.q_proj), id(attention.k_proj), id(attention.v_proj)]
    assert plan.replacements[-1].is_head and plan.replacements[-1].groups == ((model.lm_head,),)
    assert not analyse(model, Options.parse()).replacements


def test_a_plan_says_why_there_can_be_no_quantizing():
    require_native(CPU)
    model = build("llama")
    model.model.layers[0].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight.data.double()
    plan = analyse(model, Options.parse(weights="int8"))
    assert not plan.replacements and "up_proj" in plan.refusal
    with pytest.raises(ValueError, match="decodes fast as a whole; this one: dtype"):
        hf_fastpath.patch(model, weights="int8", quiet=True)
    assert state_of(model) is None


def test_a_copy_has_its_own_plan():
    require_native(CPU)
    model = hf_fastpath.patch(build("llama"), quiet=True)
    made = copy.deepcopy(model)
    plan, own = state_of(model).decided, state_of(made).decided
    assert own.model is made and plan.model is model and own.patched == plan.patched
    assert all(binding.part is vars(binding.part.module)[KEY].part for binding in own.bindings)
    ids = torch.arange(5)[None]
    assert torch.equal(made.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4))
    assert state_of(made).plans.family is own.family
