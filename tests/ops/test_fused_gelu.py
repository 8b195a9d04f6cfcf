"""fused_gelu: the common tests, special values, gradients, agreement with transformers."""

from __future__ import annotations

import pytest
import torch
from checks import assert_gradients, assert_matches, common_tests, formula, over_dtypes
from memory import same_bits

from hf_fastpath.ops.fused_gelu import APPROXIMATIONS, SPEC
from hf_fastpath.registry import Sample

over_approximations = pytest.mark.parametrize("approximate", APPROXIMATIONS)


def odd_sizes(device, dtype):
    for size in (2, 3, 15, 17, 31, 33, 127, 1025, 100_003):
        for approximate in APPROXIMATIONS:
            yield Sample(torch.randn(size, device=device, dtype=dtype) * 4, approximate)
    yield Sample(torch.randn((), device=device, dtype=dtype))
    yield Sample(torch.randn(1, 3, 0, 5, device=device, dtype=dtype))
    yield Sample(torch.randn(3, 5, 7, 11, device=device, dtype=dtype).permute(2, 0, 3, 1), "none")


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
@over_approximations
def test_fused_gelu_special_values(device, dtype, approximate):
    """NaN and infinities come out where they do in float64; zeros, denormals and saturated values too."""
    inf, tiny = float("inf"), torch.finfo(dtype).tiny
    values = [
        float("nan"),
        inf,
        -inf,
        0.0,
        -0.0,
        tiny,
        -tiny,
        tiny / 4,
        30.0,
        -30.0,
        1e4,
        -1e4,
        5.5,
        -5.5,
        -0.75,
    ]
    for repeats in (1, 5):  # tail loop, then vector loop
        assert_matches(SPEC, Sample(torch.tensor(values * repeats, device=device, dtype=dtype), approximate))


@over_dtypes
@over_approximations
def test_fused_gelu_every_magnitude(device, dtype, approximate):
    """A sweep covers the range where the function bends; its tails, where terms cancel, are judged by themselves."""
    for low, high in ((-12.0, -4.0), (-4.0, -1.0), (-1.0, 1.0), (1.0, 12.0)):
        x = torch.linspace(low, high, 4001, device=device).to(dtype)
        assert_matches(SPEC, Sample(x, approximate))


@over_approximations
def test_fused_gelu_gradcheck(approximate):
    """The backward formula agrees with finite differences in float64."""
    function = formula(SPEC)
    x = torch.randn(5, 7, dtype=torch.float64) * 3
    assert torch.autograd.gradcheck(lambda x: function.apply(x, approximate), x.requires_grad_())


@over_dtypes
@over_approximations
def test_fused_gelu_gradient(device, dtype, approximate):
    """The gradient through the op keeps the rule against float64 autograd through the reference."""
    x = torch.randn(3, 257, device=device, dtype=dtype) * 3
    upstream = torch.randn_like(x)
    assert_gradients(SPEC, (x,), upstream, approximate)


def test_fused_gelu_trains_through_views_and_compile(device):
    x = torch.randn(6, 10, device=device).t().requires_grad_()
    (expected,) = torch.autograd.grad(torch.ops.hf_fastpath.fused_gelu(x).square().sum(), x)
    compiled = torch.compile(lambda x: torch.ops.hf_fastpath.fused_gelu(x), fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(x).square().sum(), x)
    assert same_bits(got, expected)


@over_dtypes
def test_fused_gelu_reference_is_transformers(dtype):
    from transformers.activations import ACT2FN

    x = torch.randn(1000, dtype=dtype) * 3
    assert same_bits(SPEC.reference(x, "tanh"), ACT2FN["gelu_new"](x))
    assert same_bits(SPEC.reference(x, "none"), ACT2FN["gelu"](x))
