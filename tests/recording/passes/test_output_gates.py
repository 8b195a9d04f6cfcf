"""Outputs behind a gate become one call; other gates of outputs stay."""

from __future__ import annotations

import pytest
import torch
from recordings import FEED_FORWARD, WIDTH, assert_same, calls_of, linear, names, parameter, recorded
from torch import nn

from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import output_gates, products, views


@pytest.mark.parametrize("order", ("x first", "gate first"))
def test_outputs_behind_a_sigmoid(order):
    def step(m, x, *_):
        shut = torch.sigmoid(m.gate(x))
        return m.out(m.x(x) * shut if order == "x first" else shut * m.x(x))

    recording, model = recorded(step, gate=linear(24), x=linear(24), out=linear(given=24))
    assert_same(recording, model, [output_gates.output_gates])
    assert names(recording) == ["linear", "linear", "sigmoid_gated", "linear"]


@pytest.mark.parametrize(("batch", "query_len"), ((1, 1), (3, 1), (2, 2)))
def test_a_gate_of_a_row(batch, query_len):
    """As of a shared expert's output."""

    def step(m, x, *_):
        rows = x.view(-1, WIDTH)
        return (torch.sigmoid(m.gate(rows)) * m.x(rows)).view(x.shape)

    recording, model = recorded(step, batch, query_len, gate=linear(1), x=linear())
    passes = [views.no_change, products.unflattened, views.no_change, output_gates.output_gates]
    assert_same(recording, model, passes)
    (call,) = calls_of(recording, marks.sigmoid_gated)
    assert [recording.fact(call.arguments[name]).shape[-1] for name in ("x", "gate")] == [WIDTH, 1]
    assert not {"sigmoid", "mul"} & set(names(recording))


@pytest.mark.parametrize("cut", (lambda y: y.chunk(2, dim=-1)[1], lambda y: y[..., 6:]))
@pytest.mark.parametrize("batch", (1, 3))
def test_gates_beside_queries_are_not_copied(cut, batch):
    def step(m, x, *_):
        gate = cut(m.both(x).view(*x.shape[:2], -1, 12)).reshape(*x.shape[:2], -1)
        return m.out(m.x(x) * gate.sigmoid())

    recording, model = recorded(step, batch=batch, both=linear(48), x=linear(24), out=linear(given=24))
    assert_same(recording, model, [views.no_change, output_gates.output_gates])
    (call,) = calls_of(recording, marks.sigmoid_gated)
    x, gate = (recording.fact(call.arguments[name]) for name in ("x", "gate"))
    assert x.shape == gate.shape == (batch, 1, 4, 6) and x.is_contiguous() and gate.stride()[-2:] == (12, 1)
    assert not {"sigmoid", "mul", "clone"} & set(names(recording))


@pytest.mark.parametrize(("width", "is_moved"), [(1, True), (WIDTH, False)])
@pytest.mark.parametrize("batch", (1, 3))
def test_gates_of_rows_in_front_of_a_product(width, is_moved, batch):
    """A shared expert's gate: the product behind it can take on the sum with what others give."""

    def step(m, x, *_):
        return m.gate(x).sigmoid() * m.down(m.up(x)) + x

    parts = dict(gate=linear(width), up=linear(8), down=linear(given=8))
    recording, model = recorded(step, batch=batch, **parts)
    passes = [products.unflattened, views.no_change, output_gates.output_gates, output_gates.gates_in_front]
    assert_same(recording, model, [*passes, products.residuals])
    found = (
        ["linear", "linear", "sigmoid_gated", "linear"]
        if is_moved
        else ["linear", "linear", "linear", "sigmoid_gated", "add"]
    )
    assert names(recording) == found
    (gated,) = calls_of(recording, marks.sigmoid_gated)
    assert recording.fact(gated.out).shape[-1] == (8 if is_moved else WIDTH)


def test_a_product_that_others_read_keeps_its_gate_behind_it():
    def step(m, x, *_):
        y = m.x(x)
        return m.gate(x).sigmoid() * y + y

    recording, model = recorded(step, gate=linear(1), x=linear())
    passes = [products.unflattened, views.no_change, output_gates.output_gates, output_gates.gates_in_front]
    assert_same(recording, model, passes)
    assert names(recording)[-2:] == ["sigmoid_gated", "add"]


def test_other_gates_of_outputs_stay():
    def read_twice(m, x, *_):
        shut = m.gate(x).sigmoid()
        return m.x(x) * shut + shut

    def of_columns(m, x, *_):
        return m.x(x).unflatten(-1, (4, 4)).mul(m.gate(x)[..., :4].unsqueeze(-2).sigmoid()).flatten(-2)

    def other(m, x, *_):
        return m.x(x) * m.gate(x).tanh()

    def by_number(m, x, *_):
        return 2 * m.gate(x).sigmoid()

    def wider(m, x, *_):
        return (m.x(x) * m.gate(x).double().sigmoid()).float()

    def written(m, x, *_):
        gate = m.gate(x)
        shut = gate.view(-1).sigmoid()
        gate.view(-1).mul_(2)
        return (m.x(x).view(-1) * shut).view(x.shape) + gate

    for step in (read_twice, of_columns, other, by_number, wider, written):
        recording, model = recorded(step, gate=linear(), x=linear())
        before = names(recording)
        assert_same(recording, model, [output_gates.output_gates])
        assert names(recording) == before and "mul" in before, step.__name__


def test_a_gate_of_what_is_no_product():
    """Gemma 4 lets through what its table of embeddings holds of a layer."""

    def step(m, x, positions, cache):
        return m.down(m.act(m.gate(x)) * m.table[positions])

    parts = dict(act=nn.GELU("tanh"), gate=linear(24), down=linear(given=24), table=parameter(64, 24))
    recording, model = recorded(step, **parts)
    passes = [*FEED_FORWARD, products.gates, output_gates.activated_gates, products.activations]
    assert_same(recording, model, passes)
    assert names(recording)[-4:] == ["linear", "index", "glu", "linear"] and "mul" not in names(recording)
