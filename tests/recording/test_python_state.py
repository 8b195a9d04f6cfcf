"""A recorded model sees what Python changes of its state in place, wherever that is, and records no state twice."""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict

import pytest
import torch
from causal_lm_types import small_model
from models import SHORT, counting
from own_decoders import FACTORS, VOCAB, edit, own_model
from torch.overrides import TorchFunctionMode
from transformers import StoppingCriteriaList

import hf_fastpath
from hf_fastpath.patching.state import state_of
from hf_fastpath.recording import looked_at, proof
from hf_fastpath.recording import whole_step as recorded_step

IDS = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(3))


class Looking(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


@pytest.fixture
def records(monkeypatch):
    """Return a list that gets an entry for every step that is recorded."""
    found, record = [], recorded_step.record

    def noting(*given):
        found.append(given[1:])
        return record(*given)

    monkeypatch.setattr(recorded_step, "record", noting)
    return found


def generated(model, fast: bool = True, **options) -> list[int]:
    """Return what ``generate()`` adds to a prompt; assert which loop made it."""
    if state_of(model) is None:
        return model.generate(IDS, **SHORT, **options)[0].tolist()
    with counting(model) as counts:
        found = model.generate(IDS, **SHORT, **options)[0].tolist()
    assert bool(counts.fast) == fast and (fast or counts.reasons), counts
    return found


@pytest.mark.parametrize("place", FACTORS)
def test_edits_take_effect(place, records):
    """Stock's tokens after every edit; an edit that is taken back records nothing anew."""
    stock, ours = own_model(place), hf_fastpath.patch(own_model(place), quiet=True)
    is_read_live = "Tensor" in place or place == "HiddenModule"
    seen = []
    try:
        for value in (1.0, 3.0, 1.0):
            for model in (stock, ours):
                edit(model, value)
            records.clear()
            expected = generated(stock)
            assert generated(ours) == expected
            known = value in [number for number, _ in seen]
            if known and place not in ("OtherTensor", "NumberInTensor", "ReplacedFunction", "ReplacedMethod"):
                assert not records, f"{place}: recorded anew for a known value"
            if is_read_live and place not in ("OtherTensor", "NumberInTensor"):
                assert not records, f"{place}: recorded anew, though tensors are read live"
            seen.append((value, expected))
        assert len({tuple(tokens) for _, tokens in seen}) == 2, "a factor changes nothing, so the test shows nothing"
    finally:
        edit(ours, 1.0)


def _others(name: str):
    """Return a function that gives a module's containers to another module of its class."""

    def edit(model):
        first, second = (layer.self_attn.o_proj for layer in model.model.layers[:2])
        first.__dict__[name] = type(getattr(second, name))(getattr(second, name))

    return edit


def _hook(model):
    model.model.layers[0].self_attn.o_proj._forward_hooks = OrderedDict({0: lambda module, given, result: -result})


def _turn_around(model):
    model.model.layers._modules = dict(zip("01", [*model.model.layers][::-1]))


@pytest.mark.each_value
@pytest.mark.parametrize(
    "edited", (_others("_parameters"), _hook, _turn_around), ids=("parameters", "hooks", "modules")
)
@pytest.mark.parametrize("name", ("llama", "glm4"))
def test_replaced_containers(name, edited):
    """Other dicts in the place of those in which modules keep parameters, hooks and modules."""
    stock = small_model(name)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    before = ours.generate(IDS, **SHORT)
    for model in (stock, ours):
        edited(model)
    for _ in range(2):
        found = ours.generate(IDS, **SHORT)
        assert torch.equal(found, stock.generate(IDS, **SHORT)) and not torch.equal(found, before)


@pytest.mark.parametrize("place", ("InDict", "Global", "PlainTensor", "Enclosed", "LengthOfList"))
def test_edits_between_tokens(place, records):
    """A callback changes a value after some tokens, back and forth; it takes effect with the next token."""

    def switching(model):
        def switch(ids, scores, **_):
            edit(model, 3.0 if ids.shape[1] % 4 < 2 else 1.0)
            return torch.zeros(len(ids), dtype=torch.bool)

        return StoppingCriteriaList([switch])

    stock, ours = own_model(place), hf_fastpath.patch(own_model(place), quiet=True)
    plain = generated(stock)
    try:
        for _ in range(2):
            records.clear()
            found = []
            for model in (stock, ours):
                edit(model, 1.0)
                found.append(generated(model, stopping_criteria=switching(model)))
            assert found[0] == found[1] != plain
        assert not records, "values that were there before were recorded anew"
    finally:
        edit(ours, 1.0)


def test_what_is_not_proven_is_tried_again(monkeypatch):
    """A verdict is of the values that the step was recorded with: others have a proof of their own."""
    ours = hf_fastpath.patch(own_model("InDict"), quiet=True)
    expected = generated(own_model("InDict"))
    with monkeypatch.context() as patch:
        for name in ("difference", "_difference_at_once"):
            patch.setattr(proof, name, lambda *_: 1.0)
        with counting(ours) as counts:
            assert ours.generate(IDS, **SHORT)[0].tolist() == expected
        assert counts.reasons["not_proven"]
    assert generated(ours, fast=False) == expected  # of these values there is a verdict
    edit(ours, 3.0)
    assert generated(ours) != expected
    edit(ours, 1.0)
    assert generated(ours, fast=False) == expected


def test_lack_of_memory_is_no_verdict(monkeypatch):
    """An error that says nothing of the model, in the proof or while a step is recorded, is gone with the next call."""
    monkeypatch.setattr(looked_at, "made_or_kept", lambda model, code, what, make, *_: make())
    expected = generated(own_model("InDict"))
    for where, name in ((proof, "difference"), (recorded_step, "record")):
        ours = hf_fastpath.patch(own_model("InDict"), quiet=True)
        edit(ours, 3.0)
        edit(ours, 1.0)
        state_of(ours).plans.clear()

        def fails(*_):
            raise MemoryError("for this call")

        with monkeypatch.context() as patch:
            patch.setattr(where, name, fails)
            assert generated(ours, fast=False) == expected
        assert generated(ours) == expected


@pytest.mark.parametrize("adapter", (False, True))
def test_a_first_call_in_a_passing_state(adapter):
    """A first call under a mode, or with an adapter, is no reason for the calls behind it."""
    model = own_model("InDict")
    ours = hf_fastpath.patch(own_model("InDict"), quiet=True)
    expected = generated(model)
    if adapter:
        edit(ours, 3.0)
        generated(ours)
        edit(ours, 1.0)
    else:
        with Looking(), counting(ours) as counts:
            assert ours.generate(IDS, **SHORT)[0].tolist() == expected
        assert counts.reasons["torch_mode"] and not counts.fast
    assert generated(ours) == expected


def test_code_beside_the_models_does_not_matter():
    """Callbacks of the garbage collector, which tools install, run in any code; so may hooks of imports."""
    called = []

    def callback(phase, info):
        called.append(phase)
        globals()["CALLED"] = len(called)

    gc.callbacks.append(callback)
    before = gc.get_threshold()
    gc.set_threshold(50, 5, 5)
    try:
        ours = hf_fastpath.patch(own_model("InDict"), quiet=True)
        assert generated(ours) == generated(own_model("InDict"))
        edit(ours, 3.0)
        generated(ours)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(callback)
    assert called
