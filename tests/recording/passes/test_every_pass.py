"""A pass that finds nothing changes nothing."""

from __future__ import annotations

import pytest
import torch
from recordings import recorded

from hf_fastpath.recording.passes import PASSES


@pytest.mark.parametrize("each", {each.name: each for each in PASSES}.values(), ids=lambda each: each.name)
def test_a_pass_that_finds_nothing_changes_nothing(each):
    def step(m, x, positions, cache):
        return torch.sin(x).cumsum(-1) * positions[..., None].exp() + x.flip(-1)

    recording, model = recorded(step)
    before = [(call, call.op, call.out, dict(call.arguments)) for call in recording.calls]
    registers, last = len(recording.facts), recording.logits
    each.run(recording, model)
    assert recording.logits is last and len(recording.facts) == registers
    assert len(recording.calls) == len(before) > 5
    for call, (same, op, out, arguments) in zip(recording.calls, before):
        assert call is same and call.op is op and call.out is out and list(call.arguments) == list(arguments)
        assert all(value is arguments[name] for name, value in call.arguments.items())
