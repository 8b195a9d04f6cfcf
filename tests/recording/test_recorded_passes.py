"""Each pass over recorded calls by itself: what it recognizes, that the result computes the same, and that it leaves
alone what is like that but not the same."""

from __future__ import annotations

import pytest
import torch
from recordings import (
    WIDTH,
    Decoder,
    Experts,
    Of,
    assert_same,
    calls_of,
    linear,
    logits,
    names,
    parameter,
    recorded,
    softmax_first,
)
from torch import nn

from hf_fastpath.choices import Activation, NormKind
from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import (
    PASSES,
    axes,
    experts,
    filled_memory,
    joined_products,
    masked_writes,
    modules,
    norms,
    output_gates,
    products,
    products_of_heads,
    scaled_experts,
    views,
)
from hf_fastpath.recording.skeleton import Skeleton
from hf_fastpath.recording.step import record

_aten = torch.ops.aten
functional = nn.functional


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


# ---- constants and views --------------------------------------------------------------------------------------------


def test_constants_are_made_once():
    def step(m, x, *_):
        return m.out(x * (torch.arange(WIDTH).float() / WIDTH + 1).square()) + torch.arange(3).sum()

    recording, model = recorded(step, out=linear())
    assert_same(recording, model, [views.constants])
    assert names(recording) == ["mul", "linear", "add"]


def test_constants_are_beside_what_reads_them():
    """A graph cannot copy them from the host's memory to the GPU, for which "meta" stands here."""

    def step(m, x, positions, cache):
        return torch.index_put(x * m.scale, [torch.tensor([0])] * 2, torch.tensor(0.5)).sin()

    recording, model = recorded(step, scale=parameter(WIDTH))
    assert_same(recording, model, [views.constants])
    product, written = calls_of(recording, _aten.mul.Tensor) + calls_of(recording, _aten.index_put.default)
    for call in (product, written):
        recording.facts[call.out.index] = recording.fact(call.out).to("meta")
    views.constants(recording, model)
    assert written.arguments["indices"][-1].is_meta and written.arguments["values"].is_meta
    assert product.arguments["other"] is model.body.scale, "the model's own tensors stay where they are"


def test_numbers_in_tensors_are_computed_once():
    def step(m, x, positions, cache):
        return x * (torch.tensor(3.0) + 1).sqrt() + m.bias.sum() + torch.stack([m.bias])

    recording, model = recorded(step, bias=parameter(WIDTH))
    before = len(recording.calls)
    assert_same(recording, model, [views.constants])
    assert len(recording.calls) == before - 2
    assert {"sum", "stack"} <= set(names(recording)), "what reads the model's own tensors stays, also in a list"


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


class _InFloat32(Experts):
    """A gate that computes in float32, as Beam's."""

    def _apply_gate(self, gate_up):
        return super()._apply_gate(gate_up.float()).to(gate_up.dtype)


class _Bounded(Experts):
    """A gate whose values are bounded, as DeepSeek-V4's."""

    def _apply_gate(self, gate_up):
        return super()._apply_gate(gate_up.clamp(max=7.0))


TRANSPOSED = dict(is_transposed=True)
#: name -> experts, and the arguments of the op that they are besides their weights
LAYOUTS = {
    "plain": (Experts(), dict(activation=Activation.SILU)),
    "gelu": (Experts(act_fn=nn.GELU()), dict(activation=Activation.GELU)),
    "tanh": (Experts(act_fn=nn.GELU("tanh")), dict(activation=Activation.GELU_TANH)),
    "a function": (Experts(act_fn=functional.silu), dict(activation=Activation.SILU)),
    "float32": (_InFloat32(), dict(activation=Activation.SILU)),
    "no gate": (Experts(act_fn=lambda x: x.relu().square(), has_gate=False), dict(activation=Activation.SQUARED_RELU)),
    "transposed": (Experts(**TRANSPOSED), dict(activation=Activation.SILU, transposed=True, concatenated=True)),
    "in turn": (
        Experts(**TRANSPOSED, is_concatenated=False, has_bias=True),
        dict(activation=Activation.SILU, transposed=True, concatenated=False),
    ),
}


def _with_experts(module):
    """A recording of experts that a router chooses."""

    def step(m, x, *_):
        rows = x.view(-1, WIDTH)
        return m.experts(rows, *softmax_first(m.router(rows))).view(x.shape)

    return recorded(step, 2, 1, router=linear(6), experts=module)


@pytest.mark.parametrize("case", LAYOUTS)
def test_experts_of_a_module(case):
    module, wanted = LAYOUTS[case]
    recording, model = _with_experts(module)
    assert len(calls_of(recording, marks.other_experts)) == 1
    experts.stacked_experts(recording, model)
    (call,) = calls_of(recording, marks.experts)
    held = {id(each): name for name, each in module.named_parameters()}
    weights = {role for role, value in call.arguments.items() if id(value) in held}
    assert len(weights) == len(held)
    assert {name: call.arguments[name] for name in call.arguments.keys() - weights - {"x", "ids", "weights"}} == wanted


OTHER_EXPERTS = {
    "bounded": _Bounded(),
    "another activation": Experts(act_fn=nn.Tanh()),
    "no gate, another activation": Experts(act_fn=nn.GELU(), has_gate=False),
    "biases of plain weights": Experts(has_bias=True),
    "weights of float64": Experts().double(),
}


@pytest.mark.parametrize("case", OTHER_EXPERTS)
def test_other_experts_stay(case):
    recording, model = _with_experts(OTHER_EXPERTS[case])
    experts.stacked_experts(recording, model)
    assert len(calls_of(recording, marks.other_experts)) == 1 and not calls_of(recording, marks.experts)


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


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize(("groups", "count"), ((WIDTH, 3), (4, 1), (1, 2)))
def test_convolutions_over_tokens(groups, count, bias):
    def step(m, x, *_):
        tokens = torch.cat([scale * x.transpose(1, 2) for scale in range(1, m.conv.kernel_size[0] + count)], dim=-1)
        return m.conv(tokens).sum(-1)[:, None]

    conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=groups, bias=bias)
    recording, model = recorded(step, 2, 1, conv=conv)
    assert_same(recording, model, [products_of_heads.convolutions])
    (call,) = calls_of(recording, marks.head_products)
    assert call.arguments["weight"].data_ptr() == model.body.conv.weight.data_ptr()
    assert "convolution" not in names(recording)


@pytest.mark.parametrize("options", (dict(stride=2), dict(padding=1), dict(dilation=2)), ids=str)
def test_other_convolutions_stay(options):
    def step(m, x, *_):
        return m.conv(torch.cat([scale * x.transpose(1, 2) for scale in range(1, 8)], dim=-1)).sum(-1)[:, None]

    recording, model = recorded(step, 2, 1, conv=nn.Conv1d(WIDTH, WIDTH, 3, groups=4, **options))
    assert_same(recording, model, [products_of_heads.convolutions])
    assert "convolution" in names(recording)


@pytest.mark.parametrize("batch", (1, 3))
def test_a_matrix_of_each_head(batch):
    """Zamba multiplies columns [heads, batch, inputs, 1] by matrices of its heads."""

    def step(m, x, *_):
        heads = x.view(batch, 4, 4, 1).transpose(0, 1)
        return (m.weight[:, None] @ heads).transpose(0, 1).reshape(batch, 1, -1)

    recording, model = recorded(step, batch, 1, weight=parameter(4, 6, 4))
    assert_same(recording, model, [views.constant_views, products_of_heads.products_of_heads])
    (call,) = calls_of(recording, marks.head_products)
    assert call.arguments["weight"].data_ptr() == model.body.weight.data_ptr()
    assert not calls_of(recording, marks.matmul)


def test_experts_add_a_residual():
    def step(m, x, *_):
        rows = x.view(-1, WIDTH)
        return x + m.experts(rows, *softmax_first(m.router(rows))).view(x.shape)

    recording, model = recorded(step, router=linear(6), experts=Experts())
    assert_same(recording, model, PASSES)
    (call,) = calls_of(recording, marks.routed_experts)
    assert call.arguments["residual"] is not None and "add" not in names(recording)


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

FEED_FORWARD = [modules.module_formulas, modules.activation_functions, views.no_change, products.split_products]


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


@pytest.mark.parametrize("act", (nn.SiLU(), nn.ReLU(), nn.GELU(), nn.GELU("tanh")))
def test_plain_mlps(act):
    recording, model = recorded(
        lambda m, x, *_: m.down(m.act(m.up(x))), act=act, up=linear(24, bias=True), down=linear(given=24, bias=True)
    )
    assert_same(recording, model, [*FEED_FORWARD, products.activations])
    assert names(recording) == ["linear", "linear"]
    up, down = calls_of(recording, marks.linear)
    assert up.arguments["activation"] != Activation.NONE and "activation" not in down.arguments


def test_a_gate_of_what_is_no_product():
    """Gemma 4 lets through what its table of embeddings holds of a layer."""

    def step(m, x, positions, cache):
        return m.down(m.act(m.gate(x)) * m.table[positions])

    parts = dict(act=nn.GELU("tanh"), gate=linear(24), down=linear(given=24), table=parameter(64, 24))
    recording, model = recorded(step, **parts)
    passes = [*FEED_FORWARD, products.gates, output_gates.activated_gates, products.activations]
    assert_same(recording, model, passes)
    assert names(recording)[-4:] == ["linear", "index", "glu", "linear"] and "mul" not in names(recording)


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


@pytest.mark.parametrize("count", (1, 2, 4, 5, 6, 9))
def test_products_of_one_row_are_joined(count):
    def step(m, x, *_):
        x = m.norm(x)
        return sum((place + 1) * getattr(m, f"l{place}")(x).sin().sum(-1) for place in range(count))[..., None] * x

    inside = {f"l{place}": linear(8 * (place + 1)) for place in range(count)}
    recording, model = recorded(step, norm=nn.RMSNorm(WIDTH, eps=1e-6), **inside)
    passes = [modules.module_formulas, products.norms_in_front, joined_products.joined_products]
    assert_same(recording, model, passes)
    joined = [call.arguments["weights"] for call in calls_of(recording, marks.joined_linear)]
    alone = calls_of(recording, marks.linear)
    of_model = [getattr(model.body, f"l{place}").weight for place in range(count)]
    together, rest = of_model[: count - (count % 4 == 1)], of_model[count - (count % 4 == 1) :]
    assert [id(weight) for weights in joined for weight in weights] == [id(weight) for weight in together]
    assert [len(weights) for weights in joined] == [4] * (count // 4) + ([count % 4] if count % 4 > 1 else [])
    assert [id(call.arguments["weight"]) for call in alone] == [id(weight) for weight in rest]


@pytest.mark.parametrize(
    ("features", "joined"),
    (((17, 1), [[17, 1]]), ((8, 17, 1), [[8, 17, 1]]), ((17, 8, 8), [[8, 8]]), ((1, 17, 9), []), ((3, 4, 1), [[3, 1]])),
)
def test_slices_of_a_joined_product_are_aligned(features, joined):
    """A router of 17 experts and the gate of a shared one, for example."""

    def step(m, x, *_):
        return sum(getattr(m, f"l{place}")(x).sin().sum(-1) for place in range(len(features)))[..., None] * x

    inside = {f"l{place}": linear(count) for place, count in enumerate(features)}
    recording, model = recorded(step, **inside)
    assert_same(recording, model, [joined_products.joined_products])
    found = [[len(each) for each in call.arguments["weights"]] for call in calls_of(recording, marks.joined_linear)]
    assert found == joined


@pytest.mark.parametrize(
    "how", ("bias", "residual", "activation", "x", "norm", "alignment", "batch", "tokens", "written")
)
def test_products_that_are_not_of_one_row_or_more_than_products_stay_apart(how):
    def step(m, x, *_):
        if how == "written":
            x = x * 2
            one = m.one(x)
            x.add_(1)
            return one + m.two(x) * x
        of_two = x.sin() if how == "x" else m.norm(x) if how == "norm" else x
        one, two = m.one(x), m.two(of_two)
        two = two + x if how == "residual" else two
        return m.out(one.cos() * (two.relu() if how == "activation" else two.sin()))

    width = 17 if how == "alignment" else WIDTH
    inside = dict(one=linear(width, bias=how == "bias"), two=linear(width), out=linear(given=width))
    inside |= dict(norm=nn.RMSNorm(WIDTH, eps=1e-6))
    recording, model = recorded(step, 2 if how == "batch" else 1, 2 if how == "tokens" else 1, **inside)
    assert_same(recording, model, PASSES)
    assert not calls_of(recording, marks.joined_linear) and len(calls_of(recording, marks.linear)) >= 2


# ---- positions of several axes ---------------------------------------------------------------------------------------


def _interleaved(twice: bool = False):
    """Qwen3-VL's angles: of three axes, some of the second one's are written over those of the first."""

    def step(m, x, positions, cache):
        axes = positions[None].expand(3, *positions.shape)
        angles = (axes[..., None] * m.frequencies).cos()
        chosen, copied = angles[0], angles[1, ..., 1:7:3]
        chosen[..., 1:7:3] = copied * 2 if twice else copied
        return x * torch.cat((chosen, chosen), dim=-1)

    return step


def test_writes_from_one_axis_to_another_that_is_alike():
    recording, model = recorded(_interleaved(), frequencies=torch.rand(WIDTH // 2))
    assert calls_of(recording, _aten.copy_.default) and recording.mutated
    assert_same(recording, model, [axes.writes_of_like_axes])
    assert not calls_of(recording, _aten.copy_.default) and not recording.mutated


@pytest.mark.parametrize("is_alike", (True, False))
def test_axes_whose_angles_are_a_matrix_product(is_alike):
    """As in Qwen3.5 before transformers 5.24; the frequencies are a constant by then."""

    def step(m, x, positions, cache):
        frequencies = m.frequencies[None, None, :, None].expand(3, 1, -1, 1)
        if not is_alike:
            frequencies = frequencies * m.factors[:, None, None, None]
        product = frequencies @ positions[None].expand(3, *positions.shape)[:, :, None].float()
        angles = product.transpose(2, 3).cos()
        chosen = angles[0]
        chosen[..., 1:7:3] = angles[1, ..., 1:7:3]
        return x * torch.cat((chosen, chosen), dim=-1)

    inside = dict(frequencies=torch.rand(WIDTH // 2), factors=torch.tensor([1.0, 2.0, 3.0]))
    recording, model = recorded(step, **inside)
    assert_same(recording, model, [views.constant_views, axes.writes_of_like_axes])
    assert bool(calls_of(recording, _aten.copy_.default)) != is_alike


def test_a_transposed_axis_is_no_longer_the_first():
    def step(m, x, positions, cache):
        angles = positions[None].expand(2, *positions.shape)[..., None] * m.frequencies  # [2, 1, 1, 2]
        angles = angles.transpose(0, 3).cos()  # [2 that differ, 1, 1, 2 that are alike]
        chosen = angles[0]
        chosen[..., :1] = angles[1, ..., :1]
        return x * torch.cat([chosen] * (WIDTH // 2), dim=-1)

    recording, model = recorded(step, frequencies=torch.tensor([0.3, 0.7]))
    assert_same(recording, model, [axes.writes_of_like_axes])
    assert calls_of(recording, _aten.copy_.default)


def test_writes_of_other_numbers_stay():
    recording, model = recorded(_interleaved(twice=True), frequencies=torch.rand(WIDTH // 2))
    writes = len(calls_of(recording, _aten.copy_.default))
    assert_same(recording, model, [axes.writes_of_like_axes])
    assert writes and len(calls_of(recording, _aten.copy_.default)) == writes and recording.mutated


def test_writes_to_other_places_stay():
    def step(m, x, positions, cache):
        angles = (positions[None].expand(3, *positions.shape)[..., None] * m.frequencies).cos()
        chosen = angles[0]
        chosen[..., 1:7:3] = angles[1, ..., 0:6:3]
        return x * torch.cat((chosen, chosen), dim=-1)

    recording, model = recorded(step, frequencies=torch.rand(WIDTH // 2))
    assert_same(recording, model, [axes.writes_of_like_axes])
    assert calls_of(recording, _aten.copy_.default)


def test_writes_between_axes_that_differ_stay():
    """The second axis is ahead of the first."""

    def step(m, x, positions, cache):
        axes = torch.stack((positions, positions + 1))
        angles = (axes[..., None] * m.frequencies).cos()
        chosen = angles[0]
        chosen[..., 1:7:3] = angles[1, ..., 1:7:3]
        return x * torch.cat((chosen, chosen), dim=-1)

    recording, model = recorded(step, frequencies=torch.rand(WIDTH // 2))
    assert_same(recording, model, [axes.writes_of_like_axes])
    assert calls_of(recording, _aten.copy_.default)


def test_one_write_that_matters_keeps_all_of_that_memory():
    def step(m, x, positions, cache):
        angles = (positions[None].expand(3, *positions.shape)[..., None] * m.frequencies).cos()
        chosen = angles[0]
        chosen[..., :2] = x[..., :2]
        chosen[..., 1:7:3] = angles[1, ..., 1:7:3]
        return x * torch.cat((chosen, chosen), dim=-1)

    recording, model = recorded(step, frequencies=torch.rand(WIDTH // 2))
    writes = len(calls_of(recording, _aten.copy_.default))
    assert_same(recording, model, [axes.writes_of_like_axes])
    assert writes == len(calls_of(recording, _aten.copy_.default)) == 2


# ---- writes by a mask ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", (WIDTH, 1, 0))
def test_a_value_in_masked_places_is_a_choice(width):
    """A graph cannot hold PyTorch's search for the places."""

    def step(m, x, positions, cache):
        value = m.shift[:width] if width else m.shift[0]
        return torch.index_put(x.sin(), [positions.remainder(2) == 1], value)

    recording, model = recorded(step, shift=parameter(WIDTH))
    assert "index_put" in names(recording)
    assert_same(recording, model, [masked_writes.masked_writes])
    assert "index_put" not in names(recording) and "where" in names(recording)


def test_values_of_their_own_for_each_place_stay():
    def step(m, x, positions, cache):
        places = torch.zeros_like(positions, dtype=torch.bool)
        return torch.index_put(x.sin(), [places], m.shift[None, :])

    recording, model = recorded(step, shift=parameter(WIDTH))
    before = names(recording)
    masked_writes.masked_writes(recording, model)
    assert names(recording) == before


def test_a_number_in_the_hosts_memory_is_copied_once():
    """A graph cannot copy it to the GPU, for which "meta" stands here."""

    def step(m, x, positions, cache):
        return torch.index_put(x.sin(), [positions == positions], torch.tensor(0.5))

    recording, model = recorded(step)
    (call,) = calls_of(recording, _aten.index_put.default)
    for on_a_gpu in (call.arguments["self"], *call.arguments["indices"]):
        recording.facts[on_a_gpu.index] = recording.fact(on_a_gpu).to("meta")
    masked_writes.masked_writes(recording, model)
    (chosen,) = calls_of(recording, _aten.where.self)
    assert chosen.arguments["self"].is_meta and "index_put" not in names(recording)


# ---- memory that is filled --------------------------------------------------------------------------------------


def test_memory_that_one_write_fills_is_what_is_written():
    """A loop over tokens writes each of them; a step has one."""

    def step(m, x, positions, cache):
        memory = torch.zeros_like(x.unflatten(-1, (2, -1)))
        for place in range(x.shape[1]):
            memory[:, place] = x[:, place].sin().unflatten(-1, (2, -1))
        return memory.flatten(2) * 2

    recording, model = recorded(step)
    assert "copy_" in names(recording)
    assert_same(recording, model, [filled_memory.filled_memory])
    assert not {"full_like", "zeros_like", "copy_"} & set(names(recording))


@pytest.mark.parametrize("kind", ("a part", "read before", "written twice", "another type"))
def test_memory_that_holds_more_stays(kind):
    def step(m, x, positions, cache):
        memory = torch.ones(*x.shape[:2], 1, x.shape[-1], dtype=torch.float64 if kind == "another type" else x.dtype)
        before = memory * 3 if kind == "read before" else 0
        if kind == "a part":
            memory[:, 0, :, 1:] = x[:, :, 1:].sin()
        else:
            memory[:, 0] = x.sin()
        if kind == "written twice":
            memory[:, 0, :, :2] = x[:, :, :2].cos()
        return (memory + before)[:, :, 0].to(x.dtype)

    recording, model = recorded(step)
    before = names(recording)
    assert_same(recording, model, [filled_memory.filled_memory])
    assert names(recording) == before


# ---- what stands beside norms ---------------------------------------------------------------------------------------


class _Stream(nn.Module):
    """Two layers that add to a residual stream in float32, as Mamba's do in 16 bits."""

    def __init__(self, reads_the_sum: bool = False):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2))
        self.products = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.reads_the_sum = reads_the_sum

    def forward(self, x, positions, cache):
        stream, more = x.float(), 0
        for norm, product in zip(self.norms, self.products):
            rounded = stream.to(x.dtype)
            more = more + rounded if self.reads_the_sum else more
            stream = stream + product(norm(rounded))
        return stream.to(x.dtype) + more


@pytest.mark.parametrize("reads_the_sum", (False, True))
def test_residual_streams_in_float32(reads_the_sum):
    model = Decoder(_Stream(reads_the_sum)).bfloat16()
    recording = record(Skeleton(model), 1, 1)
    recording.drop_unread()
    for each in (modules.activation_functions, products.unflattened, views.no_change, norms.float32_residuals):
        each(recording, model)
    made = calls_of(recording, marks.add_normed)
    assert len(made) == (0 if reads_the_sum else 1)
    for call in made:
        assert recording.fact(call.arguments["residual"]).dtype == torch.float32
        assert recording.fact(call.arguments["x"]).dtype == torch.bfloat16


@pytest.mark.parametrize(("of", "is_one"), [(1, True), (WIDTH, False)])
def test_a_learned_factor_behind_a_norm(of, is_one):
    def step(m, x, positions, cache):
        return (x + m.norm(m.up(x))) * m.factor

    recording, model = recorded(step, norm=nn.RMSNorm(WIDTH, eps=1e-6), up=linear(), factor=parameter(of))
    passes = [
        modules.activation_functions,
        products.unflattened,
        views.no_change,
        products.residuals,
        norms.norm_factors,
    ]
    assert_same(recording, model, passes)
    assert names(recording) == ["linear", "normed"] + ([] if is_one else ["mul"])
    (call,) = calls_of(recording, marks.normed)
    assert call.arguments["residual"] is not None and ("factor" in call.arguments) == is_one
