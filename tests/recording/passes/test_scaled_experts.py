"""Experts that are all given every row become one call; other ways to give them rows stay."""

from __future__ import annotations

import pytest
import torch
from recordings import WIDTH, assert_same, calls_of, linear, names, parameter, recorded
from torch import nn

from hf_fastpath.choices import Activation
from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import modules, scaled_experts, views


def _scaled(m, x, share=torch.sigmoid, total=None):
    """Llama 4's experts: all are given every row, times the sigmoid of their score or times zero."""
    rows = x.reshape(-1, WIDTH)
    scores = m.router(rows)
    best, ids = scores.topk(2, dim=1)
    shares = share(torch.full_like(scores, float("-inf")).scatter_(1, ids, best).float()).to(x.dtype)
    given = rows.repeat(6, 1) * shares.transpose(0, 1).reshape(-1, 1)
    gate, up = torch.bmm(given.view(6, -1, WIDTH), m.gate_up).chunk(2, dim=-1)
    made = torch.bmm(up * m.act(gate), m.down).view(-1, WIDTH).reshape(6, -1, WIDTH)
    return (made.sum(dim=0) if total is None else total(made)).view(x.shape)


def _recorded_scaled(step):
    inside = dict(router=linear(6), gate_up=parameter(6, WIDTH, 20), down=parameter(6, 10, WIDTH), act=nn.SiLU())
    return recorded(step, 2, 1, **inside)


SCALED = [modules.module_formulas, modules.activation_functions, views.no_change, scaled_experts.scaled_experts]


def test_experts_that_are_given_all_rows():
    recording, model = _recorded_scaled(lambda m, x, *_: _scaled(m, x))
    assert_same(recording, model, SCALED)
    (call,) = calls_of(recording, marks.scaled_experts)
    assert (call.arguments["top_k"], call.arguments["activation"]) == (2, Activation.SILU)
    assert "bmm" not in names(recording) and "topk" not in names(recording)


@pytest.mark.parametrize(
    "step",
    (
        lambda m, x, *_: _scaled(m, x, share=lambda scores: scores.softmax(-1)),
        lambda m, x, *_: _scaled(m, x, total=lambda made: made.amax(0)),
        lambda m, x, *_: _scaled(m, x, total=lambda made: made.sum(0) * 2 + made.sum((0, 1))),
    ),
    ids=("other shares", "the largest", "read twice"),
)
def test_other_ways_to_give_rows_to_all_experts_stay(step):
    recording, model = _recorded_scaled(step)
    assert_same(recording, model, SCALED)
    assert not calls_of(recording, marks.scaled_experts)
