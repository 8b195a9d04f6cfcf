"""fused_swiglu: the common tests, special values, gradients, agreement with transformers."""

from __future__ import annotations

import pytest
import torch
from checks import assert_gradients, assert_matches, common_tests, formula, over_dtypes
from memory import same_bits

from hf_fastpath.choices import Activation
from hf_fastpath.ops.fused_swiglu import ACTIVATIONS, GATES, SPEC
from hf_fastpath.registry import OpInputError, Sample

over_gates = pytest.mark.parametrize("activation", ACTIVATIONS)


def odd_sizes(device, dtype):
    def randn(*shape):
        return torch.randn(shape, device=device, dtype=dtype) * 3

    for size in (2, 3, 15, 17, 33, 127, 1025, 50_003):
        for activation in ACTIVATIONS:
            yield Sample(randn(size), randn(size), activation)
    yield Sample(randn(), randn(), "silu")
    yield Sample(randn(2, 0), randn(2, 0), "silu")
    both = randn(3, 5, 2 * 37)
    yield Sample(*both.chunk(2, -1), "gelu")  # halves of one projection, unaligned
    yield Sample(randn(6, 35), randn(35, 6).t(), "silu")  # the two differ in layout
    yield Sample(randn(3, 5, 7).permute(1, 2, 0), randn(5, 7, 3), "gelu_tanh")
    for activation in ACTIVATIONS:
        yield Sample(randn(1, 1, 1), randn(1, 1, 2048), activation)
        yield Sample(randn(5, 8)[:, 3:4], randn(5, 37), activation)
    yield Sample(randn(3, 2)[:, :1], randn(3, 200)[:, :96], "sigmoid")
    yield Sample(randn(70_001, 1), randn(70_001, 3), "sigmoid")  # more rows than blocks
    for shape, heads in (((1, 1, 16), 256), ((3, 1, 5), 40), ((2, 3, 2), 33)):
        joined = randn(*shape[:2], shape[2] * 2 * heads + 8)[..., :-8]  # queries | gates by head, beside something else
        yield Sample(joined.unflatten(-1, (shape[2], 2 * heads))[..., heads:], randn(*shape, heads), "sigmoid")


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
@over_gates
def test_fused_swiglu_special_values(device, dtype, activation):
    """NaN and infinities of both factors come out where they do in float64, 0 * inf included."""
    values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.5, -1.5, 40.0, -40.0]
    gate, up = torch.cartesian_prod(*2 * [torch.tensor(values, device=device, dtype=dtype)]).unbind(1)
    assert_matches(SPEC, Sample(gate.contiguous(), up.contiguous(), activation))


@over_dtypes
@pytest.mark.parametrize("activation", GATES)
def test_fused_swiglu_exact_where_the_gate_is_open(device, dtype, activation):
    """Every gate is the identity at 64 and zero at 0, so small integers give exact products."""
    gate = torch.randint(0, 2, (999,), device=device).to(dtype) * 64
    up = torch.randint(-3, 4, (999,), device=device).to(dtype)
    assert torch.equal(SPEC(gate, up, activation), gate * up)


@over_dtypes
def test_fused_swiglu_exact_where_a_sigmoid_is_known(device, dtype):
    """A sigmoid is one at 64 and a half at 0, so small integers give exact products."""
    is_open = torch.randint(0, 2, (999,), device=device).to(dtype)
    up = torch.randint(-3, 4, (999,), device=device).to(dtype)
    assert torch.equal(SPEC(is_open * 64, up, "sigmoid"), up * (1 + is_open) / 2)


@over_dtypes
def test_fused_swiglu_sigmoid_of_a_gate_that_is_nearly_shut(device, dtype):
    """What is large stays there behind a small factor."""
    gate = torch.linspace(-80, -20, 211, device=device).to(dtype)
    largest = torch.finfo(dtype).max
    assert_matches(SPEC, Sample(gate, torch.full_like(gate, largest / 2), "sigmoid"))


@over_gates
def test_fused_swiglu_gradcheck(activation):
    """The backward formula agrees with finite differences in float64."""
    function = formula(SPEC)
    inputs = [(torch.randn(5, 7, dtype=torch.float64) * 3).requires_grad_() for _ in range(2)]
    assert torch.autograd.gradcheck(lambda gate, up: function.apply(gate, up, activation), inputs)


@over_dtypes
@over_gates
def test_fused_swiglu_gradient(device, dtype, activation):
    """The gradients through the op keep the rule against float64 autograd through the reference."""
    gate, up, upstream = (torch.randn(3, 257, device=device, dtype=dtype) * 2 for _ in range(3))
    assert_gradients(SPEC, (gate, up), upstream, activation)


@over_dtypes
def test_fused_swiglu_gradient_of_a_gate_for_a_row(device, dtype):
    gate, up, upstream = (torch.randn(7, size, device=device, dtype=dtype) for size in (1, 33, 33))
    assert_gradients(SPEC, (gate, up), upstream, Activation.SIGMOID)


@pytest.mark.parametrize(
    ("gate", "up"), (((3, 2), (3, 4)), ((1, 4), (3, 4)), ((3, 1), (4, 5)), ((1,), ()), ((3, 4), (3, 1)))
)
def test_fused_swiglu_refuses_other_shapes(gate, up):
    gate, up = torch.randn(gate), torch.randn(up)
    with pytest.raises(OpInputError, match="up has shape"):
        SPEC(gate, up)
    with pytest.raises(RuntimeError, match="gate has to be of up's shape, or have one element for a row"):
        SPEC.overload(gate, up, 2)


@over_dtypes
def test_fused_swiglu_reference_is_transformers(dtype):
    from transformers.activations import ACT2FN

    gate, up = torch.randn(2, 1000, dtype=dtype) * 3
    for activation, name in (
        ("silu", "silu"),
        ("gelu_tanh", "gelu_pytorch_tanh"),
        ("gelu", "gelu"),
        ("sigmoid", "sigmoid"),
    ):
        assert same_bits(SPEC.reference(gate, up, activation), ACT2FN[name](gate) * up)
