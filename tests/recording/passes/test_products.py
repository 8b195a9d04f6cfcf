"""Products take on what stands around them: slices, gates, activations, residuals, norms; what is nearly so stays."""

from __future__ import annotations

import pytest
import torch
from recordings import (
    FEED_FORWARD,
    WIDTH,
    Of,
    assert_same,
    calls_of,
    linear,
    names,
    parameter,
    plain_rms,
    recorded,
    rms_one_plus,
)
from torch import nn

from hf_fastpath.choices import Activation, NormKind
from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import PASSES, modules, products, views

functional = nn.functional


@pytest.mark.parametrize(
    ("step", "transposed", "biased"),
    (
        (lambda m, x, *_: x @ m.weight, True, False),
        (lambda m, x, *_: torch.matmul(x, m.weight.t()), False, False),
        (lambda m, x, *_: torch.mm(x.view(-1, WIDTH), m.weight).view(1, 1, -1), True, False),
        (lambda m, x, *_: torch.addmm(m.bias, x.view(-1, WIDTH), m.weight).view(1, 1, -1), True, True),
    ),
)
def test_products_with_matrices_of_the_model(step, transposed, biased):
    recording, model = recorded(step, weight=parameter(WIDTH, WIDTH), bias=parameter(WIDTH))
    views_of_weights = [views.constant_views]
    assert_same(recording, model, [*views_of_weights, products.matrix_products, products.unflattened, views.no_change])
    (call,) = calls_of(recording, marks.linear)
    assert names(recording) == ["linear"]
    assert bool(call.arguments.get("transposed")) == transposed
    assert call.arguments["weight"].data_ptr() == model.body.weight.data_ptr()
    assert (call.arguments["bias"] is model.body.bias) == biased


@pytest.mark.parametrize(
    "step",
    (
        lambda m, x, *_: x @ (x.mT @ x),
        lambda m, x, *_: torch.addmm(m.bias, x[0], m.weight, beta=2).unsqueeze(0),
        lambda m, x, *_: x @ m.cube[0:1],
    ),
)
def test_other_products_stay(step):
    recording, model = recorded(
        step, weight=parameter(WIDTH, WIDTH), bias=parameter(WIDTH), cube=parameter(2, WIDTH, WIDTH)
    )
    assert_same(recording, model, [products.matrix_products])
    assert not [call for call in calls_of(recording, marks.linear) if call.arguments["weight"].dim() != 2]


def test_a_product_of_rows_is_one_of_what_they_were():
    def step(m, x, *_):
        return m.out(x.view(-1, WIDTH)).view(1, 1, -1)

    recording, model = recorded(step, out=linear(24))
    assert_same(recording, model, [products.unflattened, views.no_change])
    assert names(recording) == ["linear"]
    assert recording.fact(recording.calls[-1].out).shape == (1, 1, 24)


def test_what_is_computed_of_rows_is_computed_of_what_they_were():
    def step(m, x, *_):
        rows = x.view(-1, WIDTH)
        out = m.down(functional.silu(m.gate(rows)) * m.up(rows)) * torch.sigmoid(m.share(rows))
        return x + (out + rows).view(x.shape)

    inside = dict(gate=linear(24), up=linear(24), down=linear(given=24), share=linear(1))
    for shape in ((1, 1), (2, 3)):
        recording, model = recorded(step, *shape, **inside)
        assert_same(
            recording, model, [modules.activation_functions, products.unflattened, views.no_change, products.gates]
        )
        assert "view" not in names(recording) and "gated" in names(recording)


def test_rows_that_meet_others_stay_rows():
    def step(m, x, *_):
        rows = x.view(-1, WIDTH)
        return (rows + m.other).view(x.shape) + (rows.view(-1, 1, WIDTH) * rows.view(1, -1, WIDTH)).sum(1).view(x.shape)

    recording, model = recorded(step, 2, 2, other=parameter(4, WIDTH))
    before = names(recording)
    assert_same(recording, model, [products.unflattened])
    assert names(recording) == before


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize(
    "parts",
    (
        lambda y: y.split((WIDTH, 8, 8), dim=-1),
        lambda y: torch.split(y, (WIDTH, 8, 8), dim=2),
        lambda y: (y[..., :WIDTH], y[..., WIDTH : WIDTH + 8], y[..., WIDTH + 8 :]),
        lambda y: (y[:, :, :WIDTH], y[:, :, -16:-8], y[:, :, -8:]),
    ),
)
def test_fused_projections_are_apart(parts, bias):
    def step(m, x, *_):
        q, k, v = parts(m.qkv(x))
        return m.out(q) * torch.cat((k, v.sin()), dim=-1)

    recording, model = recorded(step, qkv=linear(2 * WIDTH, bias=bias), out=linear())
    assert_same(recording, model, [products.split_products])
    made = calls_of(recording, marks.linear)[:3]
    weight = model.body.qkv.weight
    assert [each.arguments["weight"].shape[0] for each in made] == [16, 8, 8]
    assert [each.arguments["weight"].data_ptr() for each in made] == [
        weight.data_ptr() + 4 * WIDTH * row for row in (0, 16, 24)
    ]
    assert all((each.arguments["bias"] is not None) == bias for each in made)


@pytest.mark.parametrize(
    "parts",
    (
        lambda y: (y[..., ::2], y[..., 1::2]),
        lambda y: (y[..., :WIDTH], y.flip(-1)[..., :WIDTH]),
        lambda y: (y.view(1, 1, 2, WIDTH)[:, :, 0], y.view(1, 1, 2, WIDTH)[:, :, 1] + y[..., :1]),
    ),
)
def test_projections_that_are_read_otherwise_stay_together(parts):
    def step(m, x, *_):
        one, other = parts(m.both(x))
        return one * other

    recording, model = recorded(step, both=linear(2 * WIDTH))
    assert_same(recording, model, [products.split_products])
    assert calls_of(recording, marks.linear)[0].arguments["weight"] is model.body.both.weight


def test_slices_that_share_memory_that_is_written_stay_together():
    def step(m, x, *_):
        y = m.both(x)
        one, other = y[..., :WIDTH], y[..., 8 : 8 + WIDTH]
        one.mul_(3)
        return one * other

    recording, model = recorded(step, both=linear(2 * WIDTH))
    assert_same(recording, model, PASSES)


@pytest.mark.parametrize("act", (nn.SiLU(), nn.GELU(), nn.GELU("tanh")))
@pytest.mark.parametrize("order", ("gate first", "up first"))
def test_gated_mlps(act, order):
    def step(m, x, *_):
        gate, up = m.act(m.gate(x)), m.up(x)
        return m.down(gate * up if order == "gate first" else up * gate)

    recording, model = recorded(step, act=act, gate=linear(24), up=linear(24), down=linear(given=24))
    assert_same(recording, model, [*FEED_FORWARD, products.gates])
    assert names(recording) == ["gated", "linear"]
    call = recording.calls[1].arguments
    assert call["gate_weight"] is model.body.gate.weight and call["up_weight"] is model.body.up.weight


@pytest.mark.parametrize("cut", (lambda y: y.chunk(2, dim=-1), lambda y: (y[..., :24], y[..., 24:])))
@pytest.mark.parametrize("gate_first", (True, False))
def test_fused_gated_mlps(cut, gate_first):
    def step(m, x, *_):
        one, other = cut(m.gate_up(x))
        gate, up = (one, other) if gate_first else (other, one)
        return m.down(functional.silu(gate) * up)

    recording, model = recorded(step, gate_up=linear(48), down=linear(given=24))
    assert_same(recording, model, [*FEED_FORWARD, products.gates])
    assert names(recording) == ["gated", "linear"]
    start, rows = model.body.gate_up.weight.data_ptr(), 4 * WIDTH * 24
    places = [recording.calls[1].arguments[name].data_ptr() - start for name in ("gate_weight", "up_weight")]
    assert places == ([0, rows] if gate_first else [rows, 0])


def test_gates_that_kernels_lack_stay_apart():
    def biased(m, x, *_):
        return functional.silu(m.gate(x)) * m.up(x)

    def read_twice(m, x, *_):
        gate = functional.silu(m.gate(x))
        return gate * m.up(x) + gate

    def of_two(m, x, *_):
        return functional.silu(m.gate(x)) * m.up(x.sin())

    def plain(m, x, *_):
        return functional.relu(m.gate(x)) * m.up(x)

    for step, bias in ((biased, True), (read_twice, False), (of_two, False), (plain, False)):
        recording, model = recorded(step, gate=linear(bias=bias), up=linear(bias=bias))
        assert_same(recording, model, [*FEED_FORWARD, products.gates])
        assert not calls_of(recording, marks.gated), step.__name__


@pytest.mark.parametrize("act", (nn.SiLU(), nn.ReLU(), nn.GELU(), nn.GELU("tanh")))
def test_plain_mlps(act):
    recording, model = recorded(
        lambda m, x, *_: m.down(m.act(m.up(x))), act=act, up=linear(24, bias=True), down=linear(given=24, bias=True)
    )
    assert_same(recording, model, [*FEED_FORWARD, products.activations])
    assert names(recording) == ["linear", "linear"]
    up, down = calls_of(recording, marks.linear)
    assert up.arguments["activation"] != Activation.NONE and "activation" not in down.arguments


@pytest.mark.parametrize("side", ("left", "right"))
def test_residuals_on_either_side(side):
    def step(m, x, *_):
        return x + m.out(x.sin()) if side == "left" else m.out(x.sin()) + x

    recording, model = recorded(step, out=linear())
    assert_same(recording, model, [products.residuals])
    assert names(recording) == ["sin", "linear"]
    assert recording.calls[-1].arguments["residual"].index == recording.calls[0].out.index


def test_two_residuals_one_behind_the_other():
    def step(m, x, *_):
        x = x + m.one(x.sin())
        return x + m.two(x.cos())

    recording, model = recorded(step, one=linear(), two=linear())
    assert_same(recording, model, [products.residuals])
    assert names(recording) == ["sin", "linear", "cos", "linear"]


@pytest.mark.parametrize(
    "total",
    (
        lambda x, a, f: x + a + f,
        lambda x, a, f: a + f + x,
        lambda x, a, f: x + (a + f),
        lambda x, a, f: f + a + x,
    ),
)
def test_parallel_blocks(total):
    def step(m, x, *_):
        return total(x, m.attention(x.sin()), m.feed_forward(x.cos()))

    recording, model = recorded(step, attention=linear(), feed_forward=linear())
    assert_same(recording, model, [products.residuals])
    assert sorted(names(recording)) == ["cos", "linear", "linear", "sin"]
    assert all(call.arguments["residual"] is not None for call in calls_of(recording, marks.linear))


def test_sums_that_are_no_residuals_stay():
    def wider(m, x, *_):
        return m.one(x) + x.double()

    def broadcast(m, x, *_):
        return m.one(x) + x.mean(-1, keepdim=True)

    def twice(m, x, *_):
        y = m.one(x)
        return torch.add(x, y, alpha=2)

    def read_again(m, x, *_):
        y = m.one(x)
        return (y + x) * y

    for step in (wider, broadcast, twice, read_again):
        recording, model = recorded(step, one=linear())
        assert_same(recording, model, [products.residuals])
        assert "add" in names(recording), step.__name__
        assert not any(call.arguments.get("residual") is not None for call in recording.calls), step.__name__


@pytest.mark.parametrize(
    "norm", (nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, bias=False), nn.RMSNorm(WIDTH, eps=1e-6)), ids=repr
)
def test_norms_in_front_of_products(norm):
    def step(m, x, *_):
        y = m.norm(x)
        return m.out(y) + functional.silu(m.gate(y)) * m.up(y)

    recording, model = recorded(step, norm=norm, out=linear(), gate=linear(), up=linear())
    assert_same(recording, model, [*FEED_FORWARD, products.gates, products.norms_in_front])
    assert names(recording) == ["linear", "gated", "add"]
    assert all(call.arguments["norm"].weight is norm.weight for call in recording.calls[1:3])


def test_norms_that_are_read_otherwise_stay():
    norm = nn.RMSNorm(WIDTH, eps=1e-6)
    recording, model = recorded(lambda m, x, *_: m.out(m.norm(x)) + m.norm(x).sin(), norm=norm, out=linear())
    assert_same(recording, model, [products.norms_in_front])
    assert names(recording).count("normed") == 1, "the sine reads it still"
    plain = Of(plain_rms, eps=1e-6)
    recording, model = recorded(lambda m, x, *_: m.out(m.norm(x)), norm=plain, out=linear())
    assert_same(recording, model, [modules.module_formulas, products.norms_in_front])
    assert names(recording) == ["normed", "linear"], "no kernel has an RMS norm without a weight"
    offset = Of(rms_one_plus, eps=1e-6, weight=parameter(WIDTH))
    recording, model = recorded(lambda m, x, *_: m.out(m.norm(x)), norm=offset, out=linear())
    assert_same(recording, model, [modules.module_formulas, products.norms_in_front])
    (call,) = calls_of(recording, marks.linear)
    assert names(recording) == ["linear"] and call.arguments["norm"].kind == NormKind.RMS_OFFSET


def test_a_norm_of_what_is_written_behind_it_stays_where_it_is():
    def step(m, x, *_):
        x = x * 2
        same = x.view(1, 1, WIDTH)
        y = m.norm(x)
        x.add_(m.one(y))
        x.add_(m.two(y))
        return m.out(same)

    inside = dict(norm=nn.RMSNorm(WIDTH, eps=1e-6), one=linear(), two=linear(), out=linear())
    recording, model = recorded(step, **inside)
    assert recording.mutated
    assert_same(recording, model, PASSES)
