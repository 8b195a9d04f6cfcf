"""Passes that find what a step does with its states: what they recognize computes the same and leaves the same states,
and what is nearly the same stays as it is."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from causal_lm_types import small_model
from models import skip_if_cache_is_named_otherwise
from recordings import WIDTH, assert_same, calls_of, linear, names, parameter, recorded
from torch import nn

from hf_fastpath.choices import Activation
from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import PASSES, gated_norms, modules, products, states, views
from hf_fastpath.recording.skeleton import Skeleton
from hf_fastpath.recording.step import record

_aten = torch.ops.aten
functional = nn.functional
STATES = dict(layer_types=["linear_attention"])
HEADS, KEY, VALUE = 2, 4, 3

#: type -> the marks that take its states, and how many of each there are
FOUND = {
    "qwen3_5_text": {marks.short_convolution: 1, marks.gated_delta_step: 1, marks.gated_norm: 1},
    "olmo_hybrid": {marks.short_convolution: 1, marks.gated_delta_step: 1, marks.gated_norm: 1},
    "mamba": {marks.short_convolution: 2, marks.selective_state_step: 2},
    "mamba2": {marks.short_convolution: 2, marks.selective_state_step: 2, marks.gated_norm: 2},
    "falcon_h1": {marks.short_convolution: 2, marks.selective_state_step: 2},
    "zamba2": {marks.short_convolution: 2, marks.selective_state_step: 2, marks.gated_norm: 2},
    "lfm2": {marks.short_convolution: 2},
}


@pytest.mark.each_value
@pytest.mark.parametrize("model_type", FOUND)
@pytest.mark.parametrize("batch", (1, 3))
def test_states_of_a_family(batch, model_type):
    skip_if_cache_is_named_otherwise(model_type)
    model = small_model(model_type)
    recording = record(Skeleton(model), batch, 1)
    recording.drop_unread()
    assert_same(recording, model, PASSES)
    assert {mark: len(calls_of(recording, mark)) for mark in FOUND[model_type]} == FOUND[model_type]
    assert not calls_of(recording, _aten.convolution.default) and not calls_of(recording, _aten.bmm.default)
    written = [call for call in recording.calls if call.op is _aten.copy_.default]
    of_states = {register.index for found in recording.states for register in found}
    assert not any(call.arguments["self"].index in of_states for call in written)


def test_slices_of_a_projection_are_not_products_of_their_own():
    skip_if_cache_is_named_otherwise("mamba2")
    model = small_model("mamba2")
    recording = record(Skeleton(model), 1, 1)
    recording.drop_unread()
    assert_same(recording, model, PASSES)
    assert len(calls_of(recording, marks.linear)) == 2 * 2 + 1  # in and out of two layers, and the head


def test_functions_of_installed_packages_are_not_recorded(monkeypatch):
    """Where a package has taken the place of a function of transformers, the function is recorded."""
    model = small_model("qwen3_5_text")
    module = inspect.getmodule(type(model))
    function = module.causal_conv1d_update
    if "is_new_implementation" not in function.__code__.co_freevars:
        pytest.skip(f"transformers {transformers.__version__} chooses functions in another way")
    cells = dict(zip(function.__code__.co_freevars, function.__closure__))

    def kernel(*args, **kwargs):
        raise RuntimeError("a kernel was called")

    monkeypatch.setattr(cells["implementation"], "cell_contents", kernel)
    monkeypatch.setattr(cells["is_new_implementation"], "cell_contents", True)
    with pytest.raises(RuntimeError, match="a kernel was called"):
        model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=3)
    recording = record(Skeleton(model), 1, 1)
    assert calls_of(recording, _aten.convolution.default)


# ---- short convolutions ---------------------------------------------------------------------------------------------


def _windows(m, x, cache, after=lambda sums: sums, before=lambda columns: columns):
    """A convolution over the last three tokens, of 16 channels; and a projection behind it."""
    columns = before(m.given(x).transpose(1, 2))
    state = cache.layers[0].conv_states[0]
    if state is None:
        cache.update_conv_state(columns, 0, conv_kernel_size=3)
        return m.out(x)
    rows = torch.cat([state, columns], dim=-1)[..., 1:]
    state.copy_(rows)
    return m.out(after((rows * m.weight).sum(-1) + m.bias)[:, None])


_STEPS = [modules.activation_functions, views.no_change, states.short_convolutions]


def _recorded(after=lambda sums: sums, before=lambda columns: columns):
    def step(m, x, positions, cache):
        return _windows(m, x, cache, after, before)

    inside = dict(given=linear(), out=linear(13), weight=parameter(WIDTH, 3), bias=parameter(WIDTH))
    return recorded(step, batch=2, entries=STATES, **inside)


@pytest.mark.parametrize(
    ("after", "activation"),
    [
        (lambda sums: sums, Activation.NONE),
        (functional.silu, Activation.SILU),
        (torch.relu, Activation.RELU),
        (lambda sums: sums * torch.sigmoid(sums), Activation.SILU),
    ],
)
def test_windows_that_are_no_call_of_a_convolution(after, activation):
    recording, model = _recorded(after)
    assert_same(recording, model, _STEPS)
    (call,) = calls_of(recording, marks.short_convolution)
    assert call.arguments["activation"] == activation
    assert names(recording).count("copy_") == 0


@pytest.mark.parametrize(
    ("after", "before"),
    [
        (torch.tanh, lambda columns: columns),
        (lambda sums: sums, torch.sin),
        (lambda sums: sums + 1, lambda columns: columns),
    ],
)
def test_another_formula_is_none(after, before):
    recording, model = _recorded(after, before)
    assert_same(recording, model, _STEPS)
    assert "copy_" in names(recording) or calls_of(recording, marks.short_convolution)
    for call in calls_of(recording, marks.short_convolution):  # what is around it stays
        assert call.arguments["activation"] == Activation.NONE
        assert any(each in names(recording) for each in ("tanh", "sin", "add"))


def test_a_state_that_something_else_reads_stays():
    def step(m, x, positions, cache):
        state = cache.layers[0].conv_states[0]
        return _windows(m, x, cache) + (0 if state is None else state.sum())

    inside = dict(given=linear(), out=linear(13), weight=parameter(WIDTH, 3), bias=parameter(WIDTH))
    recording, model = recorded(step, entries=STATES, **inside)
    assert_same(recording, model, _STEPS)
    assert not calls_of(recording, marks.short_convolution) and "copy_" in names(recording)


# ---- gated delta nets -----------------------------------------------------------------------------------------------


def _delta(m, x, cache, decayed=lambda state, decay: state * decay, power=1.0):
    """A gated delta rule of two heads; and a projection behind it."""
    state = cache.layers[0].recurrent_states[0]
    if state is None:
        cache.update_conv_state(x.transpose(1, 2), 0, conv_kernel_size=1)
        cache.update_recurrent_state(x.new_zeros(len(x), HEADS, KEY, VALUE), 0)
        return m.out(m.v(x))
    q, k = (each(x).view(-1, HEADS, KEY) for each in (m.q, m.k))
    v = m.v(x).view(-1, HEADS, VALUE)
    q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    decay = (-m.a_log.exp() * functional.softplus(m.a(x) + m.dt_bias)).exp().view(-1, HEADS, 1, 1)
    beta = power * torch.sigmoid(m.b(x)).view(-1, HEADS, 1)
    before = decayed(state, decay)
    known = torch.einsum("bhkv,bhk->bhv", before, k)
    new = before + k[..., None] * ((v - known) * beta)[..., None, :]
    cache.update_recurrent_state(new, 0)
    out = torch.einsum("bhkv,bhk->bhv", new, q) * KEY**-0.5
    return m.out(out.reshape(len(x), 1, -1))


def _recorded_delta(**how):
    def step(m, x, positions, cache):
        return _delta(m, x, cache, **how)

    keys, values = linear(HEADS * KEY), linear(HEADS * VALUE)
    inside = dict(q=keys, k=linear(HEADS * KEY), v=values, a=linear(HEADS), b=linear(HEADS))
    inside |= dict(a_log=parameter(HEADS), dt_bias=parameter(HEADS), out=linear(13, HEADS * VALUE))
    return recorded(step, batch=2, entries=STATES, **inside)


_DELTA_STEPS = [views.no_change, states.gated_delta_steps]


@pytest.mark.parametrize("power", (1.0, 2.0))
def test_a_delta_rule_in_other_words(power):
    recording, model = _recorded_delta(power=power)
    assert_same(recording, model, _DELTA_STEPS)
    (call,) = calls_of(recording, marks.gated_delta_step)
    assert call.arguments["beta_scale"] == power and call.arguments["l2_norm"]
    assert call.arguments["scale"] == pytest.approx(KEY**-0.5)


@pytest.mark.parametrize(
    "how",
    [
        dict(decayed=lambda state, decay: state * decay * decay),
        dict(decayed=lambda state, decay: state),
        dict(power=1.5),
    ],
)
def test_another_delta_rule_is_none(how):
    recording, model = _recorded_delta(**how)
    assert_same(recording, model, _DELTA_STEPS)
    assert not calls_of(recording, marks.gated_delta_step) and "copy_" in names(recording)


# ---- norms with a gate ----------------------------------------------------------------------------------------------


class _Gated(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight, self.eps, self.groups, self.function = parameter(WIDTH), 1e-5, 4, function

    def forward(self, x, gate):
        return self.function(self, x, gate)


def _norm(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


_NORMS = {
    "behind": lambda m, x, gate: m.weight * _norm(x, m.eps) * functional.silu(gate),
    "in front": lambda m, x, gate: _norm(x * functional.silu(gate), m.eps) * m.weight,
    "sigmoid": lambda m, x, gate: m.weight * (_norm(x, m.eps) * gate.sigmoid()),
    "groups": lambda m, x, gate: (
        m.weight * _norm((x * functional.silu(gate)).unflatten(-1, (m.groups, -1)), m.eps).flatten(-2)
    ),
}
_OTHERS = {
    "tanh": lambda m, x, gate: m.weight * _norm(x, m.eps) * gate.tanh(),
    "both": lambda m, x, gate: m.weight * _norm(x * functional.silu(gate), m.eps) * functional.silu(gate),
    "one plus": lambda m, x, gate: (1 + m.weight) * _norm(x, m.eps) * functional.silu(gate),
}


@pytest.mark.parametrize("how", [*_NORMS, *_OTHERS])
def test_norms_with_a_gate(how):
    def step(m, x, positions, cache):
        return m.out(m.norm(m.one(x), m.other(x)))

    norm = _Gated((_NORMS | _OTHERS)[how])
    recording, model = recorded(step, norm=norm, one=linear(), other=linear(), out=linear(13))
    assert_same(recording, model, [gated_norms.gated_norms])
    found = calls_of(recording, marks.gated_norm)
    assert len(found) == (how in _NORMS)
    if found:
        given = found[0].arguments
        assert given["gate_first"] == (how in ("in front", "groups")) and given["eps"] == 1e-5
        assert given["groups"] == (4 if how == "groups" else 1)


# ---- products -------------------------------------------------------------------------------------------------------


def test_a_product_from_the_left_is_one_of_rows():
    def step(m, x, positions, cache):
        return m.out((m.weight @ x.transpose(1, 2)).transpose(1, 2))

    recording, model = recorded(step, batch=2, query_len=3, weight=parameter(WIDTH, WIDTH), out=linear(13))
    assert_same(recording, model, [products.products_from_the_left])
    assert not calls_of(recording, marks.matmul) and len(calls_of(recording, marks.linear)) == 2
