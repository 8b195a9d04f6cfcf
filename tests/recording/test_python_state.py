"""A recorded model sees what Python changes of its state in place, wherever that is, and records no state twice."""

from __future__ import annotations

import pytest
import torch
from models import CPU, SHORT, counting
from own_decoders import FACTORS, VOCAB, edit, own_model
from transformers import StoppingCriteriaList

import hf_fastpath
from hf_fastpath.patching.state import state_of
from hf_fastpath.recording import part as recorded_part

IDS = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def records(monkeypatch):
    """Return a list that gets an entry for every step that is recorded."""
    found, record = [], recorded_part.record

    def noting(*given):
        found.append(given[1:])
        return record(*given)

    monkeypatch.setattr(recorded_part, "record", noting)
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
        for value in (1.0, 3.0, 2.0, 3.0, 1.0):
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
        assert len({tuple(tokens) for _, tokens in seen}) == 3, "a factor changes nothing, so the test shows nothing"
    finally:
        edit(ours, 1.0)


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
    assert CPU  # the models are on the CPU
