"""Changes of a patched model between calls of generate() are noticed; without changes, modules are not asked again."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
from models import SHORT, build, counting, fresh, prompt
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import GenerationConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_fastpath
from hf_fastpath.decode.model import structure
from hf_fastpath.decode.plans import plan_cache
from hf_fastpath.decode.state.snapshot import Snapshot
from hf_fastpath.patching.state import state_of

CPU = torch.device("cpu")


def looked_at(architecture="llama"):
    """Return a patched model, and the snapshot that two calls of generate() leave."""
    model = hf_fastpath.patch(build(architecture), quiet=True)
    for _ in range(2):
        model.generate(prompt(CPU), **SHORT)
    snapshot = state_of(model).plans.snapshot
    assert snapshot is not None and snapshot.holds()
    return model, snapshot


def layer_of(model):
    return model.model.layers[1]


def bind(owner, name, value):
    """Return a function that changes an attribute."""
    return lambda model, patch: patch.setattr(owner(model), name, value(model), raising=False)


def other_data(parameter):
    parameter.data = parameter.data.clone()


def as_bytes(parameter):
    parameter.requires_grad_(False).data = parameter.data.view(torch.int32)


def home(model):
    return sys.modules[type(model).__module__]


CHANGES = {
    "module": lambda model, patch: setattr(layer_of(model).mlp, "up_proj", nn.Linear(112, 304, bias=False)),
    "parameter": lambda model, patch: setattr(
        layer_of(model).mlp.up_proj, "weight", nn.Parameter(layer_of(model).mlp.up_proj.weight.data)
    ),
    "data": lambda model, patch: other_data(layer_of(model).mlp.up_proj.weight),
    "dtype": lambda model, patch: as_bytes(layer_of(model).mlp.up_proj.weight),
    "strides": lambda model, patch: setattr(
        layer_of(model).mlp.up_proj.weight, "data", layer_of(model).mlp.up_proj.weight.data.t()
    ),
    "another type": lambda model, patch: model.half(),
    "bias": lambda model, patch: setattr(layer_of(model).mlp.up_proj, "bias", nn.Parameter(torch.zeros(304))),
    "fewer layers": lambda model, patch: model.model.layers.__delitem__(1),
    "hook": lambda model, patch: layer_of(model).mlp.register_forward_hook(lambda *_: None),
    "hook in front": lambda model, patch: model.lm_head.register_forward_pre_hook(lambda *_: None),
    "hook of all modules": lambda model, patch: patch.setitem(torch_module._global_forward_hooks, 0, lambda *_: None),
    "training": lambda model, patch: model.train(),
    "training of one module": lambda model, patch: layer_of(model).self_attn.train(),
    "forward of an instance": bind(lambda m: layer_of(m).mlp.act_fn, "forward", lambda m: lambda x: x),
    "forward of a class": bind(lambda m: nn.Linear, "forward", lambda m: lambda self, x: x),
    "activation": bind(lambda m: layer_of(m).mlp, "act_fn", lambda m: nn.GELU()),
    "setting": bind(lambda m: layer_of(m).input_layernorm, "variance_epsilon", lambda m: 0.5),
    "scaling": bind(lambda m: layer_of(m).self_attn, "scaling", lambda m: 0.123),
    "setting taken away": lambda model, patch: patch.delattr(layer_of(model).self_attn, "scaling"),
    "configuration": bind(lambda m: m.config, "num_attention_heads", lambda m: 1),
    "list in the configuration": lambda model, patch: patch.setitem(model.config.rope_parameters, "rope_theta", 5.0),
    "attention": lambda model, patch: model.set_attn_implementation("eager"),
    "attention of that name": lambda model, patch: patch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *a, **k: None
    ),
    "function of the model's file": lambda model, patch: patch.setattr(home(model), "apply_rotary_pos_emb", print),
    "frequencies": lambda model, patch: model.model.rotary_emb.inv_freq.mul_(2),
    "rope": bind(lambda m: m.model.rotary_emb, "rope_type", lambda m: "dynamic"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen(name, monkeypatch):
    model, snapshot = looked_at()
    CHANGES[name](model, monkeypatch)
    assert not snapshot.holds()
    assert state_of(model).plans.part_of(model) is not snapshot.part


def declined(monkeypatch):
    """Return a patched model with a hook, the hook, and who has been asked for a reason since its third call began."""
    model = hf_fastpath.patch(build("llama"), quiet=True)
    hook = layer_of(model).register_forward_hook(lambda module, args, output: None)
    asked, reason = [], structure.ModelInRoles.reason
    monkeypatch.setattr(structure.ModelInRoles, "reason", lambda self: (asked.append(self), reason(self))[1])
    for _ in range(3):
        asked.clear()
        model.generate(prompt(CPU), **SHORT)
    return model, hook, asked


def test_a_reason_is_found_once(monkeypatch):
    """Of a model that stays as it is, and again once it is another one."""
    model, hook, asked = declined(monkeypatch)
    assert not asked
    hook.remove()
    for _ in range(2):
        with counting(model) as counts:
            model.generate(prompt(CPU), **SHORT)
        assert counts.fast and not counts.reasons
    layer_of(model).register_forward_pre_hook(lambda module, args: None)
    with counting(model) as counts:
        model.generate(prompt(CPU), **SHORT)
    assert set(counts.reasons) == {"hooks"}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_a_model_with_a_reason_are_seen(name, monkeypatch):
    model, _, asked = declined(monkeypatch)
    plans = state_of(model).plans
    part = plans.part_of(model)
    assert plans.reason_of(part) == "hooks" and not asked
    CHANGES[name](model, monkeypatch)
    assert plans.part_of(model) is not part and asked


def test_a_model_that_is_another_one_in_each_call_is_not_noted_each_time(monkeypatch):
    """To note what a model holds takes longer than to look at it."""
    model, hook, asked = declined(monkeypatch)
    noted = []
    monkeypatch.setattr(plan_cache, "Snapshot", lambda *given: noted.append(given) or Snapshot(*given))
    for _ in range(2 * plan_cache.LOOK_AGAIN):
        hook.remove()
        hook = layer_of(model).register_forward_hook(lambda module, args, output: None)
        assert state_of(model).plans.reason_of(state_of(model).plans.part_of(model)) == "hooks"
    assert len(asked) == 2 * plan_cache.LOOK_AGAIN
    assert len(noted) <= plan_cache.MOST_IN_VAIN + 2


def test_a_model_that_cannot_be_noted_is_left_to_stock(monkeypatch):
    """What is in a model with a reason against it may be anything."""
    model, _, asked = declined(monkeypatch)
    expected = model.generate(prompt(CPU), **SHORT)
    layer_of(model).register_forward_hook(lambda module, args, output: None)

    def refused(*given):
        raise OSError("no such thing")

    monkeypatch.setattr(plan_cache, "Snapshot", refused)
    assert torch.equal(model.generate(prompt(CPU), **SHORT), expected) and asked


def test_changes_of_values_are_none():
    """Training, loading, moving back and other defaults of generate() leave what plans depend on as it was."""
    model, snapshot = looked_at()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})
    model.train().eval()
    assert snapshot.holds()
    model(prompt(CPU), labels=prompt(CPU)).loss.backward()
    assert snapshot.holds()
    model.generation_config = GenerationConfig(max_new_tokens=3)
    assert snapshot.holds() and model.generate(prompt(CPU)).shape[1] == prompt(CPU).shape[1] + 3
    assert state_of(model).plans.snapshot is snapshot


@pytest.mark.parametrize("architecture", ("llama", "gpt2", "gemma2", "mixtral"))
def test_asked_once(architecture, monkeypatch, device):
    """As long as nothing changes, modules are not asked one by one."""
    stock, ours = fresh(architecture, device)
    asked = []
    for name in ("reason", "parameters"):
        method = getattr(structure.ModelInRoles, name)
        monkeypatch.setattr(
            structure.ModelInRoles, name, lambda self, method=method: (asked.append(self), method(self))[1]
        )
    inputs = {"input_ids": prompt(device)} | SHORT
    with counting(ours) as counts:
        for turn in range(3):
            asked.clear()
            found = ours.generate(**inputs)
            assert bool(asked) == (turn == 0)
    assert torch.equal(found, stock.generate(**inputs)) and not counts.reasons


def test_nothing_is_kept_alive():
    """Modules that were taken out of a model are freed with the next call; so is a model."""
    model, snapshot = looked_at()
    taken = weakref.ref(layer_of(model).mlp.up_proj)
    layer_of(model).mlp.up_proj = build("llama").model.layers[1].mlp.up_proj
    assert not snapshot.holds()
    del snapshot
    model.generate(prompt(CPU), **SHORT)
    gc.collect()
    assert taken() is None
    whole = weakref.ref(model)
    del model
    gc.collect()
    assert whole() is None


def test_a_model_that_is_not_ready_is_asked_every_time():
    model, _ = looked_at()
    handle = layer_of(model).mlp.register_forward_hook(lambda *_: None)
    for _ in range(2):
        with counting(model) as counts:
            model.generate(prompt(CPU), **SHORT)
        assert counts.reasons["hooks"] and state_of(model).plans.snapshot is None
    handle.remove()
    with counting(model) as counts:
        model.generate(prompt(CPU), **SHORT)
    assert not counts.reasons and state_of(model).plans.snapshot.holds()


def test_unpatch_forgets():
    model, _ = looked_at()
    state = state_of(model)
    hf_fastpath.unpatch(model)
    assert state.plans.snapshot is None
