"""layer_norm: the common tests, special values, cancellation, agreement with nn.LayerNorm."""

from __future__ import annotations

import torch
from checks import assert_matches, common_tests, over_dtypes
from memory import same_bits

from hf_fastpath.ops.layer_norm import SPEC
from hf_fastpath.registry import Sample


def odd_sizes(device, dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for rows, hidden in ((1, 2), (2, 15), (5, 17), (13, 33), (1, 1025), (3, 4099), (2, 12288)):
        yield Sample(randn(rows, hidden) * 2 - 1, randn(hidden), randn(hidden), 1e-5)
    yield Sample(randn(77), None, randn(77), 1e-5)
    yield Sample(randn(2, 0, 64), randn(64), randn(64), 1e-5)
    yield Sample(randn(3, 7, 50).transpose(0, 1), randn(50), randn(50), 1e-5)
    for rows, hidden in ((3, 17), (2, 1025), (1, 4096), (70, 96)):
        yield Sample(randn(rows, hidden) * 2 - 1, randn(hidden), randn(hidden), 1e-5, randn(rows, hidden))


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
def test_layer_norm_special_values(device, dtype):
    """NaN and infinity make their row NaN and no other; a constant row gives the bias."""
    for hidden in (5, 128, 1000):
        x = torch.randn(6, hidden, device=device, dtype=dtype)
        x[1, -1], x[2, 0], x[4, hidden // 2] = float("nan"), float("inf"), -float("inf")
        x[5] = 2
        weight, bias = torch.randn(2, hidden, device=device).to(dtype)
        result = assert_matches(SPEC, Sample(x, weight, bias, 1e-5))
        assert result[[1, 2, 4]].isnan().all() and torch.equal(result[5], bias)


@over_dtypes
def test_layer_norm_survives_cancellation(device, dtype):
    """The mean is far above the deviation, which a variance in one pass (mean of squares minus squared mean) loses."""
    weight, bias = torch.randn(2, 768, device=device).to(dtype)
    for mean in (10.0, 100.0, 1000.0):
        x = (torch.randn(3, 768, device=device) + mean).to(dtype)
        assert_matches(SPEC, Sample(x, weight, bias, 1e-5))


@over_dtypes
def test_layer_norm_rounds_before_it_adds(device, dtype):
    """Bit for bit the sum of what the norm alone gives."""
    for hidden in (40, 111, 4096):
        x, residual = torch.randn(2, 3, hidden, device=device).to(dtype)
        weight, bias = torch.randn(2, hidden, device=device).to(dtype)
        assert same_bits(SPEC(x, weight, bias, 1e-5, residual), residual + SPEC(x, weight, bias, 1e-5))


@over_dtypes
def test_layer_norm_reference_is_torch(dtype):
    norm = torch.nn.LayerNorm(96, dtype=dtype)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 5, 96, dtype=dtype)
    weight, bias = norm.weight.detach(), norm.bias.detach()
    assert same_bits(SPEC.reference(x, weight, bias, norm.eps), norm(x).detach())
