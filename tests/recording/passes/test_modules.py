"""Norms and activations that are modules of their own become one call; what is nearly one stays."""

from __future__ import annotations

import pytest
import torch
from recordings import (
    WIDTH,
    Of,
    assert_same,
    calls_of,
    linear,
    logits,
    names,
    parameter,
    plain_rms,
    recorded,
    rms_one_plus,
)
from torch import nn

from hf_fastpath.choices import Activation, NormKind
from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import PASSES, modules

functional = nn.functional


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
    rms_one_plus: (W, NormKind.RMS, 1e-6, True),
    plain_rms: ({}, NormKind.RMS, 1e-6, False),
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
    return plain_rms(m, x) * (2 + m.weight)


def _middle(m, x, *_):
    return plain_rms(m, x - x.mean()) + m.weight


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
    assert_same(recording, model, [modules.module_formulas, modules.activation_functions])
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
    assert_same(recording, model, [modules.activation_functions])
    assert names(recording) == ["activated", "linear"]
    assert recording.calls[1].arguments["activation"] == activation


@pytest.mark.parametrize(
    "module", (nn.Tanh(), nn.ELU(), nn.LeakyReLU(), Of(lambda m, x, *_: x * torch.sigmoid(1.702 * x)), nn.ReLU6())
)
def test_other_activations_stay(module):
    recording, model = recorded(lambda m, x, *_: m.out(m.act(m.first(x))), act=module, first=linear(), out=linear())
    before = names(recording)
    assert_same(recording, model, [modules.module_formulas, modules.activation_functions])
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
