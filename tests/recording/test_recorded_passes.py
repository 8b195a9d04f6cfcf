"""Each pass over recorded calls by itself: what it recognizes, that the result computes the same, and that it leaves
alone what is like that but not the same."""

from __future__ import annotations

import pytest
import torch
from recordings import WIDTH, Of, assert_same, attention, calls_of, linear, logits, names, parameter, recorded
from torch import nn

from hf_fastpath.choices import Activation, NormKind
from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import PASSES, lengths, modules, own_attention, passed, products, views
from hf_fastpath.recording.passes import attention as heads
from hf_fastpath.recording.recording import Unrecordable

_aten = torch.ops.aten
functional = nn.functional


@pytest.mark.parametrize("each", dict.fromkeys(PASSES), ids=lambda each: each.__name__)
def test_a_pass_that_finds_nothing_changes_nothing(each):
    def step(m, x, positions, cache):
        return torch.sin(x).cumsum(-1) * positions[..., None].exp() + x.flip(-1)

    recording, model = recorded(step)
    before = [(call, call.op, call.out, dict(call.arguments)) for call in recording.calls]
    registers, last = len(recording.facts), recording.logits
    each(recording, model)
    assert recording.logits is last and len(recording.facts) == registers
    assert len(recording.calls) == len(before) > 5
    for call, (same, op, out, arguments) in zip(recording.calls, before):
        assert call is same and call.op is op and call.out is out and list(call.arguments) == list(arguments)
        assert all(value is arguments[name] for name, value in call.arguments.items())


# ---- norms and activations, which are modules of their own ----------------------------------------------------------


def _rms(m, x, *_):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + m.eps)
    return m.weight * wide.to(x.dtype)


def _rms_in_float(m, x, *_):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + m.eps) * m.weight.float()).to(x.dtype)


def _rms_by_root(m, x, *_):
    return x / (x.pow(2).mean(-1, keepdim=True) + m.eps).sqrt() * m.weight


def _rms_by_length(m, x, *_):
    return m.weight * (x * torch.rsqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + m.eps))


def _one_plus(m, x, *_):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + m.eps)
    return (wide * (1.0 + m.weight.float())).type_as(x)


def _plain(m, x, *_):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.eps)


def _layer(m, x, *_):
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    wide = (wide - mean) * torch.rsqrt((wide - mean).pow(2).mean(-1, keepdim=True) + m.eps)
    return (m.weight.float() * wide).to(x.dtype)


def _layer_with_bias(m, x, *_):
    deviation, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
    return (x - mean) / torch.sqrt(deviation + m.eps) * m.weight + m.bias


def _layer_one_plus(m, x, *_):
    return functional.layer_norm(x, (WIDTH,), m.weight + 1, m.bias, m.eps)


W = dict(weight=(WIDTH,))
#: module -> what it holds, kind of norm, eps, whether its weight is added to one
NORMS = {
    _rms: (W, NormKind.RMS, 1e-6, False),
    _rms_in_float: (W, NormKind.RMS, 1e-5, False),
    _rms_by_root: (W, NormKind.RMS, 3e-4, False),
    _rms_by_length: (W, NormKind.RMS, 1e-6, False),
    _one_plus: (W, NormKind.RMS, 1e-6, True),
    _plain: ({}, NormKind.RMS, 1e-6, False),
    _layer: (W, NormKind.LAYER, 1e-5, False),
    _layer_with_bias: (W | dict(bias=(WIDTH,)), NormKind.LAYER, 1e-5, False),
    _layer_one_plus: (W | dict(bias=(WIDTH,)), NormKind.LAYER, 1e-5, True),
}


@pytest.mark.parametrize("function", NORMS, ids=lambda function: function.__name__)
def test_norms_in_many_spellings(function):
    shapes, kind, eps, offset = NORMS[function]
    norm = Of(function, eps=eps, **{name: parameter(*shape) for name, shape in shapes.items()})
    recording, model = recorded(lambda m, x, *_: m.out(m.norm(x)), norm=norm, out=linear())
    assert_same(recording, model, [modules.module_formulas])
    assert names(recording) == ["normed", "linear"]
    found = recording.calls[1].arguments
    assert (found["norm"].kind, found["norm"].eps, found.get("unit_offset", False)) == (kind, eps, offset)
    held = getattr(norm, "weight", None), getattr(norm, "bias", None)
    assert found["norm"].weight is held[0] and found["norm"].bias is held[1]


@pytest.mark.parametrize(
    "norm",
    (
        nn.LayerNorm(WIDTH),
        nn.LayerNorm(WIDTH, bias=False),
        nn.LayerNorm(WIDTH, elementwise_affine=False),
        nn.RMSNorm(WIDTH, eps=1e-5),
        nn.RMSNorm(WIDTH, eps=1e-5, elementwise_affine=False),
    ),
    ids=lambda norm: repr(norm),
)
def test_norms_of_torch(norm):
    recording, model = recorded(lambda m, x, *_: m.out(m.norm(x)), norm=norm, out=linear())
    assert_same(recording, model, [modules.module_formulas])
    assert names(recording) == ["normed", "linear"]
    assert recording.calls[1].arguments["norm"].weight is getattr(norm, "weight", None)


def test_norms_that_are_alike_keep_their_own_weights():
    norms = [Of(_rms, eps=1e-6, weight=parameter(WIDTH)) for _ in range(3)]
    recording, model = recorded(lambda m, x, *_: m.two(m.one(m.zero(x))), **dict(zip(("zero", "one", "two"), norms)))
    assert_same(recording, model, [modules.module_formulas])
    found = [call.arguments["norm"].weight for call in calls_of(recording, marks.normed)]
    assert [id(each) for each in found] == [id(each.weight) for each in norms]


def test_the_epsilon_of_a_norm_is_its_own():
    norms = [Of(_rms, eps=eps, weight=parameter(WIDTH)) for eps in (1e-6, 1e-3)]
    recording, model = recorded(lambda m, x, *_: m.one(m.zero(x)), zero=norms[0], one=norms[1])
    assert_same(recording, model, [modules.module_formulas])
    assert [call.arguments["norm"].eps for call in calls_of(recording, marks.normed)] == [1e-6, 1e-3]


def _twice_plus(m, x, *_):
    return _plain(m, x) * (2 + m.weight)


def _middle(m, x, *_):
    return _plain(m, x - x.mean()) + m.weight


def _of_two(m, x, *_):
    return m.weight * functional.normalize(x, dim=-1)


def _reads_positions(m, x, positions, *_):
    return _rms(m, x) * (positions[..., None] + 1)


@pytest.mark.parametrize("function", (_twice_plus, _middle, _of_two, _reads_positions), ids=lambda f: f.__name__)
def test_what_is_nearly_a_norm_stays(function):
    norm = Of(function, eps=1e-6, weight=parameter(WIDTH))
    recording, model = recorded(lambda m, x, positions, cache: m.out(m.norm(x, positions)), norm=norm, out=linear())
    before = names(recording)
    assert_same(recording, model, [modules.module_formulas])
    assert names(recording) == before and "normed" not in before


ACTIVATIONS = {
    Activation.SILU: (
        nn.SiLU(),
        Of(lambda m, x, *_: x * torch.sigmoid(x)),
        Of(lambda m, x, *_: x / (1 + torch.exp(-x))),
    ),
    Activation.RELU: (nn.ReLU(), nn.ReLU(inplace=True), Of(lambda m, x, *_: x.clamp(min=0))),
    Activation.GELU: (nn.GELU(), Of(lambda m, x, *_: 0.5 * x * (1 + torch.erf(x / 2**0.5)))),
    Activation.GELU_TANH: (
        nn.GELU("tanh"),
        Of(lambda m, x, *_: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x.pow(3))))),
    ),
}


@pytest.mark.parametrize(
    ("activation", "module"),
    [(activation, module) for activation, each in ACTIVATIONS.items() for module in each],
)
def test_activations(activation, module):
    recording, model = recorded(lambda m, x, *_: m.out(m.act(m.first(x))), act=module, first=linear(), out=linear())
    assert_same(recording, model, [modules.module_formulas, modules.functions])
    assert names(recording) == ["linear", "activated", "linear"]
    assert calls_of(recording, marks.activated)[0].arguments["activation"] == activation


@pytest.mark.parametrize(
    ("activation", "function"),
    (
        (Activation.SILU, functional.silu),
        (Activation.RELU, functional.relu),
        (Activation.RELU, torch.relu),
        (Activation.GELU, functional.gelu),
        (Activation.GELU_TANH, lambda x: functional.gelu(x, approximate="tanh")),
    ),
)
def test_activations_that_are_functions(activation, function):
    recording, model = recorded(lambda m, x, *_: m.out(function(x)), out=linear())
    assert_same(recording, model, [modules.functions])
    assert names(recording) == ["activated", "linear"]
    assert recording.calls[1].arguments["activation"] == activation


@pytest.mark.parametrize(
    "module", (nn.Tanh(), nn.ELU(), nn.LeakyReLU(), Of(lambda m, x, *_: x * torch.sigmoid(1.702 * x)), nn.ReLU6())
)
def test_other_activations_stay(module):
    recording, model = recorded(lambda m, x, *_: m.out(m.act(m.first(x))), act=module, first=linear(), out=linear())
    before = names(recording)
    assert_same(recording, model, [modules.module_formulas, modules.functions])
    assert names(recording) == before and "activated" not in before


def test_modules_of_a_class_are_not_alike_where_a_number_differs():
    def powered(m, x, *_):
        return _rms(m, x).pow(m.power)

    inside = {f"p{power}": Of(powered, eps=1e-6, power=power, weight=parameter(WIDTH)) for power in (1, 3)}
    recording, model = recorded(lambda m, x, *_: m.out(m.p3(m.p1(x))), **inside, out=linear())
    assert_same(recording, model, [modules.module_formulas])
    assert names(recording).count("normed") == 1


def test_modules_of_a_class_are_not_alike_where_a_buffer_differs():
    def shifted(m, x, *_):
        return _rms(m, x) * m.gain

    one, three = (Of(shifted, eps=1e-6, gain=torch.tensor(gain), weight=parameter(WIDTH)) for gain in (1.0, 3.0))
    recording, model = recorded(lambda m, x, *_: m.three(m.one(x)), one=one, three=three)
    assert_same(recording, model, [modules.module_formulas])
    before = logits(recording)
    three.gain.fill_(6)
    torch.testing.assert_close(logits(recording), 2 * before, rtol=1e-12, atol=0)


def test_a_module_that_writes_into_what_others_read_stays():
    def step(m, x, *_):
        y = m.first(x)
        m.act(y.view(-1))
        return m.out(y)

    recording, model = recorded(step, act=nn.ReLU(inplace=True), first=linear(), out=linear())
    assert recording.mutated
    assert_same(recording, model, PASSES)


# ---- constants and views --------------------------------------------------------------------------------------------


def test_constants_are_made_once():
    def step(m, x, *_):
        return m.out(x * (torch.arange(WIDTH).float() / WIDTH + 1).square()) + torch.arange(3).sum()

    recording, model = recorded(step, out=linear())
    assert_same(recording, model, [views.constants])
    assert names(recording) == ["mul", "linear", "add"]


def test_constants_are_as_exact_as_the_models_own():
    recording, model = recorded(lambda m, x, *_: x * torch.arange(1, 1 + WIDTH).float().rsqrt())
    views.constants(recording, model)
    (factor,) = (each for each in recording.calls[-1].arguments.values() if isinstance(each, torch.Tensor))
    assert factor.dtype == torch.float32
    assert torch.equal(factor, torch.arange(1, 1 + WIDTH).float().rsqrt())


def test_what_is_made_of_weights_is_no_constant():
    recording, model = recorded(lambda m, x, *_: m.out(x * (1 + m.factor).exp()), out=linear(), factor=parameter(WIDTH))
    before = names(recording)
    assert_same(recording, model, [views.constants])
    assert names(recording) == before
    with torch.no_grad():
        model.body.factor.add_(1)
    changed = logits(recording)
    fresh, _ = recorded(model.body.function, out=model.body.out, factor=model.body.factor)
    fresh.calls[0].arguments["weight"] = model.embed.weight
    torch.testing.assert_close(changed, logits(fresh), rtol=1e-12, atol=0)


def test_memory_that_is_written_is_no_constant():
    def step(m, x, *_):
        rows = torch.zeros_like(x)
        rows[..., 3:5] = 1.5
        return m.out(x * rows)

    recording, model = recorded(step, out=linear())
    assert recording.mutated
    assert_same(recording, model, [views.constants, views.constant_views, views.no_change])
    assert "copy_" in names(recording) or "fill_" in names(recording)


def test_views_of_weights_are_weights():
    def step(m, x, *_):
        first, second = m.both.t()[:, :WIDTH], m.both.unsqueeze(0)[0, WIDTH:]
        return functional.linear(x @ first, second, m.bias.view(2, -1)[1])

    recording, model = recorded(step, both=parameter(2 * WIDTH, WIDTH), bias=parameter(2 * WIDTH))
    assert_same(recording, model, [views.constant_views])
    assert names(recording) == ["matmul", "linear"]
    product, behind = recording.calls[1:]
    start = model.body.both.data_ptr()
    assert product.arguments["b"].data_ptr() == start
    assert behind.arguments["weight"].data_ptr() == start + 4 * WIDTH * WIDTH
    assert behind.arguments["bias"].data_ptr() == model.body.bias.data_ptr() + 4 * WIDTH


def test_views_of_views_are_one_view():
    def step(m, x, *_):
        return m.out(x.view(-1, 2).view(4, 4).reshape(2, 8).view(1, 1, WIDTH)).view(1, 4, 4).view(1, 1, WIDTH)

    recording, model = recorded(step, out=linear())
    assert_same(recording, model, [views.no_change])
    assert names(recording) == ["linear"]


def test_what_changes_nothing_is_left_out():
    def step(m, x, *_):
        x = x.float().expand(1, 1, WIDTH)[..., :WIDTH].clone().to(torch.float32, copy=True)
        return m.out(torch.cat((x * 1.0,), dim=-1).contiguous())

    recording, model = recorded(step, out=linear())
    assert len(names(recording)) > 4
    assert_same(recording, model, [views.no_change])
    assert names(recording) == ["linear"]


def test_what_changes_something_stays():
    def step(m, x, *_):
        return m.out((x.double() * 3).to(torch.float16).float().flip(-1)[..., :8].repeat(1, 1, 2))

    recording, model = recorded(step, out=linear())
    before = names(recording)
    assert_same(recording, model, [views.no_change])
    assert names(recording) == before


# ---- products -------------------------------------------------------------------------------------------------------


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


# ---- gates, activations and residuals -------------------------------------------------------------------------------

FEED_FORWARD = [modules.module_formulas, modules.functions, views.no_change, products.split_products]


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
    assert_same(recording, model, [*FEED_FORWARD, products.gates])
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
    plain = Of(_plain, eps=1e-6)
    recording, model = recorded(lambda m, x, *_: m.out(m.norm(x)), norm=plain, out=linear())
    assert_same(recording, model, [modules.module_formulas, products.norms_in_front])
    assert names(recording) == ["normed", "linear"], "no kernel has an RMS norm without a weight"
    offset = Of(_one_plus, eps=1e-6, weight=parameter(WIDTH))
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


# ---- attention ------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, DIM = 4, 2, 8
ANGLES = 1.0 / 100 ** (torch.arange(0, DIM, 2) / DIM)


def tables(positions: torch.Tensor, frequencies: torch.Tensor = ANGLES) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles of half a head at positions: cos and sin [batch, query_len, head_dim / 2]."""
    angles = positions[..., None].float() * frequencies.to(positions.device)
    return angles.cos(), angles.sin()


def halves(x, positions):
    cos, sin = (torch.cat((each, each), dim=-1).unsqueeze(1) for each in tables(positions))
    one, other = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-other, one), dim=-1) * sin


def scaled(x, positions):
    cos, sin = (1.25 * torch.cat((each, each), dim=-1).unsqueeze(1) for each in tables(positions, ANGLES / 8))
    one, other = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-other, one), dim=-1) * sin


def neighbors(x, positions):
    cos, sin = (each.repeat_interleave(2, dim=-1).unsqueeze(1) for each in tables(positions))
    crossed = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + crossed * sin


def partial(x, positions):
    cos, sin = (torch.cat((each, each), dim=-1).unsqueeze(1) for each in tables(positions, ANGLES[:2]))
    turned, rest = x[..., :4], x[..., 4:]
    one, other = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-other, one), dim=-1) * sin, rest), dim=-1)


def complex_numbers(x, positions):
    cos, sin = tables(positions)
    turns = torch.polar(torch.ones_like(cos), positions[..., None].float() * ANGLES).unsqueeze(1)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)


def half_tables(x, positions):
    cos, sin = (each.unsqueeze(1) for each in tables(positions))
    one, other = x.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)


def in_place(x, positions):
    x = x.contiguous() * 1.0
    x[..., :4] = partial(x, positions)[..., :4]
    return x


def in_place_behind_another(x, positions):
    x = x.contiguous() * 1.0
    first = x[..., :4]
    first.mul_(2)
    return halves(x, positions)


#: how queries and keys are turned -> which elements turn together, how many
ROTATIONS = {
    halves: ("halves", DIM),
    scaled: ("halves", DIM),
    partial: ("halves", 4),
    half_tables: ("halves", DIM),
    neighbors: ("neighbors", DIM),
    complex_numbers: ("neighbors", DIM),
}
LAYOUTS = ("apart", "fused", "grouped")


def attending(rotation, layout: str = "apart", bias: bool = False, **options):
    """A recording of projections, rotation and attention of four heads over two."""

    def step(m, x, positions, cache):
        if layout == "apart":
            rows = m.q(x), m.k(x), m.v(x)
        elif layout == "fused":
            rows = m.qkv(x).split((HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), dim=-1)
        else:
            group = HEADS // KV_HEADS
            parts = m.qkv(x).view(*x.shape[:2], KV_HEADS, group + 2, DIM).split((group, 1, 1), dim=3)
            rows = [each.flatten(2) for each in parts]
        q, k, v = (each.unflatten(-1, (-1, DIM)).transpose(1, 2) for each in rows)
        if rotation is not None:
            q, k = rotation(q, positions), rotation(k, positions)
        return m.out(attention(m, q, k, v, cache, **options))

    if layout == "apart":
        inside = dict(q=linear(HEADS * DIM, bias=bias), k=linear(WIDTH, bias=bias), v=linear(WIDTH, bias=bias))
    else:
        inside = dict(qkv=linear((HEADS + 2 * KV_HEADS) * DIM, bias=bias))
    return recorded(step, **inside, out=linear(given=HEADS * DIM))


def _name(rotation) -> str:
    return "none" if rotation is None else rotation.__name__


FRONT = [views.constants, views.constant_views, views.no_change, products.split_products]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotation", (*ROTATIONS, None), ids=_name)
def test_rotations(rotation, layout):
    recording, model = attending(rotation, layout)
    assert_same(recording, model, [*FRONT, heads.rotations])
    (call,) = calls_of(recording, marks.rotated_attention)
    assert not calls_of(recording, marks.append) and not calls_of(recording, marks.attend)
    found = call.arguments
    assert (found["num_heads"], found["num_kv_heads"], found["head_dim"]) == (HEADS, KV_HEADS, DIM)
    assert found["grouped"] == (layout == "grouped")
    if rotation is None:
        assert found["cos"] is found["sin"] is None
    else:
        pairs, count = ROTATIONS[rotation]
        assert found["pairs"] == pairs and len(calls_of(recording, marks.angles)) == 1
        angles = calls_of(recording, marks.angles)[0]
        shown = [
            torch.randn(recording.fact(each).shape).to(recording.fact(each).dtype)
            for each in angles.arguments["tables"]
        ]
        assert {each.shape[-1] for each in angles.arguments["formula"](shown, pairs)} == {count}
    assert names(recording)[-2:] == ["view", "linear"] or names(recording)[-3:-1] == ["rotated_attention", "view"]


def _only_queries(x, positions):
    return halves(x, positions) if x.shape[1] == HEADS else x


def _other_angles(x, positions):
    return halves(x, positions if x.shape[1] == HEADS else positions + 1)


def _squared(x, positions):
    return halves(x, positions).square()


ODD = (_only_queries, _other_angles, _squared, in_place, in_place_behind_another)


@pytest.mark.parametrize("rotation", ODD, ids=lambda each: each.__name__)
def test_what_is_nearly_a_rotation_stays(rotation):
    recording, model = attending(rotation)
    assert_same(recording, model, [*FRONT, heads.rotations])
    assert not calls_of(recording, marks.rotated_attention)
    assert len(calls_of(recording, marks.append)) == len(calls_of(recording, marks.attend)) == 1


@pytest.mark.parametrize("learned", (nn.Parameter(torch.ones(DIM)), torch.ones(DIM)), ids=("parameter", "buffer"))
def test_a_factor_that_may_change_stays(learned):
    """It is one when the step is recorded, as in a model that was just made, and in one of two layers."""

    def step(m, x, positions, cache):
        for layer in range(2):
            q, k, v = (each(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for each in (m.q, m.k, m.v))
            q = halves(q, positions) * (m.factor if layer else 1)
            x = x + m.out(attention(m, q, halves(k, positions), v, cache, layer=layer))
        return x

    inside = dict(q=linear(HEADS * DIM), k=linear(), v=linear(), out=linear(given=HEADS * DIM))
    recording, model = recorded(step, layers=2, **inside, factor=learned)
    plain, _ = recorded(step, layers=2, **inside, factor=learned)
    plain.calls[0].arguments["weight"] = model.embed.weight
    before = logits(plain)
    assert_same(recording, model, PASSES)
    with torch.no_grad():
        model.body.factor.mul_(-1.5)
    expected = logits(plain)
    assert not torch.allclose(expected, before)
    torch.testing.assert_close(logits(recording), expected, rtol=1e-9, atol=1e-12)


def test_options_of_attention_are_kept():
    recording, model = attending(halves, scaling=0.7, softcap=5.0, s_aux=None)
    assert_same(recording, model, [*FRONT, heads.rotations, heads.projections])
    (call,) = calls_of(recording, marks.projected_attention)
    assert (call.arguments["scale"], call.arguments["softcap"], call.arguments["layer"]) == (0.7, 5.0, 0)


def test_layers_share_their_angles():
    def step(m, x, positions, cache):
        for layer in range(2):
            q, k, v = (each(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for each in (m.q, m.k, m.v))
            q, k = halves(q, positions), halves(k, positions)
            x = x + m.out(attention(m, q, k, v, cache, layer=layer))
        return x

    recording, model = recorded(
        step, layers=2, q=linear(HEADS * DIM), k=linear(), v=linear(), out=linear(given=HEADS * DIM)
    )
    assert_same(recording, model, [*FRONT, heads.rotations])
    assert len(calls_of(recording, marks.rotated_attention)) == 2
    assert [call.arguments["layer"] for call in calls_of(recording, marks.rotated_attention)] == [0, 1]


def test_norms_of_heads_stand_between_projections_and_rotation():
    def step(m, x, positions, cache):
        q, k, v = (each(x).unflatten(-1, (-1, DIM)) for each in (m.q, m.k, m.v))
        q, k, v = m.q_norm(q).transpose(1, 2), m.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        q, k = halves(q, positions), halves(k, positions)
        return m.out(attention(m, q, k, v, cache))

    inside = dict(q=linear(HEADS * DIM), k=linear(), v=linear(), out=linear(given=HEADS * DIM))
    inside |= dict(q_norm=nn.RMSNorm(DIM, eps=1e-6), k_norm=nn.RMSNorm(DIM, eps=1e-6))
    recording, model = recorded(step, **inside)
    assert_same(recording, model, [*FRONT, heads.rotations, heads.projections])
    (call,) = calls_of(recording, marks.rotated_attention)
    made = {each.out.index: each.op for each in recording.calls}
    assert [made[each.index] for each in call.arguments["sources"]] == [marks.normed, marks.normed, marks.linear]


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("layout", ("apart", "fused"))
@pytest.mark.parametrize(
    "rotation", (halves, partial, scaled, None), ids=lambda each: getattr(each, "__name__", "none")
)
def test_projections_are_one_call_with_attention(rotation, layout, bias):
    recording, model = attending(rotation, layout, bias)
    assert_same(recording, model, [*FRONT, heads.rotations, heads.projections])
    (call,) = calls_of(recording, marks.projected_attention)
    assert len(calls_of(recording, marks.linear)) == 1, "the one behind attention"
    assert [each.shape[0] for each in call.arguments["weights"]] == [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
    assert rotation is None or call.arguments["pairs"] == ROTATIONS[rotation][0]
    assert all((each is not None) == bias for each in call.arguments["biases"])


def test_projections_by_group_stay_together():
    recording, model = attending(halves, "grouped")
    assert_same(recording, model, [*FRONT, heads.rotations, heads.projections])
    assert not calls_of(recording, marks.projected_attention)
    assert len(calls_of(recording, marks.rotated_attention)) == 1


def test_projections_that_are_read_twice_stay_apart():
    def step(m, x, positions, cache):
        rows = m.q(x), m.k(x), m.v(x)
        q, k, v = (each.unflatten(-1, (-1, DIM)).transpose(1, 2) for each in rows)
        return m.out(attention(m, q, k, v, cache)) * rows[1]

    recording, model = recorded(step, q=linear(HEADS * DIM), k=linear(), v=linear(), out=linear(given=HEADS * DIM))
    assert_same(recording, model, [*FRONT, heads.rotations, heads.projections])
    assert not calls_of(recording, marks.projected_attention)


# ---- attention of a model's own -------------------------------------------------------------------------------------


def own(weigh, layers: int = 1, **inside):
    """A recording of attention that the model computes by itself; ``weigh`` makes weights of scores."""

    def step(m, x, positions, cache):
        for layer in range(layers):
            q, k, v = (each(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for each in (m.q, m.k, m.v))
            k, v = cache.update(k, v, layer)
            k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
            weights = weigh(m, q @ k.transpose(-1, -2), layer)
            x = x + m.out((weights @ v).transpose(1, 2).flatten(2))
        return x

    modules_ = dict(q=linear(HEADS * DIM), k=linear(), v=linear(), out=linear(given=HEADS * DIM))
    return recorded(step, layers=layers, **modules_, **inside)


SLOPES = 2.0 ** -torch.arange(1, 1 + HEADS)


def _plain_scores(m, scores, layer):
    return (scores / DIM**0.5).softmax(-1)


def _other_scale(m, scores, layer):
    return torch.softmax(scores * 0.4, dim=-1, dtype=torch.float32)


def _alibi(m, scores, layer):
    bias = m.slopes[:, None, None] * torch.arange(scores.shape[-1])
    return (scores * DIM**-0.5 + bias).softmax(-1)


@pytest.mark.parametrize(
    ("weigh", "scale", "slopes"),
    ((_plain_scores, DIM**-0.5, None), (_other_scale, 0.4, None), (_alibi, DIM**-0.5, SLOPES)),
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_attention_of_a_models_own(weigh, scale, slopes):
    recording, model = own(weigh, slopes=SLOPES.clone())
    assert_same(recording, model, [*FRONT, own_attention.own_attention])
    (call,) = calls_of(recording, marks.attend)
    assert call.arguments["scale"] == pytest.approx(scale) and call.arguments["window"] == 0
    found = call.arguments["slopes"]
    assert found is None if slopes is None else torch.allclose(found, slopes)
    assert "_softmax" not in names(recording) and "bmm" not in names(recording)


def _capped(m, scores, layer):
    return (5 * torch.tanh(scores / 5)).softmax(-1)


def _sigmoids(m, scores, layer):
    return torch.sigmoid(scores)


def _squared_distance(m, scores, layer):
    return (scores - 1e-4 * torch.arange(scores.shape[-1]).square()).softmax(-1)


@pytest.mark.parametrize("weigh", (_capped, _sigmoids, _squared_distance), ids=lambda each: each.__name__)
def test_what_is_nearly_attention_stays(weigh):
    recording, model = own(weigh)
    assert_same(recording, model, [*FRONT, own_attention.own_attention])
    assert not calls_of(recording, marks.attend)


def test_layers_whose_masks_differ_are_told_apart():
    def masked(m, scores, layer):
        seen = (m.all, m.near)[layer][: scores.shape[-1]]
        return scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)

    everything = torch.ones(64, dtype=torch.bool)
    near = torch.arange(64) > 40
    recording, model = own(masked, layers=2, all=everything, near=near)
    assert_same(recording, model, [*FRONT, own_attention.own_attention])
    assert [call.arguments["layer"] for call in calls_of(recording, marks.attend)] in ([], [0])


def test_positions_are_counted_from_the_cache():
    def step(m, x, positions, cache):
        start = cache.get_seq_length()
        places = torch.arange(start, start + x.shape[1])
        return m.out(x + m.learned(places))

    recording, model = recorded(step, out=linear(), learned=nn.Embedding(64, WIDTH))
    lengths.positions_in_text(recording, model)
    recording.drop_unread()
    assert len(calls_of(recording, marks.text_positions)) == 1
    table = model.body.learned.weight.double()
    one, other = (logits(recording, position=position) for position in (3, 8))
    expected = (table[8] - table[3]) @ model.body.out.weight.double().t()
    torch.testing.assert_close((other - one)[0, 0], expected, rtol=1e-9, atol=1e-12)


def test_sizes_that_follow_the_text_are_refused():
    recording, model = recorded(lambda m, x, positions, cache: x * torch.ones(cache.get_seq_length()).sum())
    with pytest.raises(Unrecordable, match="a size that follows the length of the text"):
        passed(recording, model)


# ---- a layer --------------------------------------------------------------------------------------------------------


def test_attention_gives_features_side_by_side():
    recording, model = attending(halves)
    assert_same(recording, model, [*FRONT, heads.rotations, heads.projections, heads.flat_attention, views.no_change])
    assert names(recording)[-2:] == ["projected_attention", "linear"]
    assert recording.fact(recording.calls[-2].out).shape == (1, 1, HEADS * DIM)


@pytest.mark.parametrize(("batch", "query_len"), ((3, 1), (1, 4), (2, 3)))
@pytest.mark.parametrize("rotation", ROTATIONS, ids=lambda each: each.__name__)
def test_all_passes_on_a_layer_of_several_tokens(rotation, batch, query_len):
    def step(m, x, positions, cache):
        y = m.norm(x)
        q, k, v = (each(y).unflatten(-1, (-1, DIM)).transpose(1, 2) for each in (m.q, m.k, m.v))
        q, k = rotation(q, positions), rotation(k, positions)
        x = x + m.out(attention(m, q, k, v, cache))
        y = m.norm(x)
        return x + m.down(functional.silu(m.gate(y)) * m.up(y))

    inside = dict(q=linear(HEADS * DIM), k=linear(), v=linear(), out=linear(given=HEADS * DIM))
    inside |= dict(norm=nn.RMSNorm(WIDTH, eps=1e-6), gate=linear(24), up=linear(24), down=linear(given=24))
    recording, model = recorded(step, batch, query_len, **inside)
    assert_same(recording, model, PASSES)
    behind = [call.op for call in recording.calls if call.op not in (_aten.view.default,)][-4:]
    assert behind == [marks.projected_attention, marks.linear, marks.gated, marks.linear]
