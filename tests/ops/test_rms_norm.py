"""rms_norm: the common tests, special values, scale, agreement with transformers."""

from __future__ import annotations

import torch
from checks import assert_matches, common_tests, over_dtypes
from memory import same_bits

from hf_fastpath.ops.rms_norm import SPEC
from hf_fastpath.registry import Sample


def odd_sizes(device, dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for rows, hidden in (
        (1, 1),
        (3, 1),
        (1, 3),
        (2, 15),
        (5, 17),
        (13, 33),
        (1, 1025),
        (3, 4099),
        (2, 11008),
    ):
        yield Sample(randn(rows, hidden) * 2, randn(hidden), 1e-6)
    yield Sample(randn(77), randn(77), 1e-5)
    yield Sample(randn(2, 0, 64), randn(64), 1e-5)
    yield Sample(randn(3, 7, 5).transpose(0, 1), randn(5), 1e-5)  # q- and k-norm: rows of heads
    yield Sample(randn(4, 8, 2 * 40)[..., 40:], randn(40), 1e-5)


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
def test_rms_norm_special_values(device, dtype):
    """NaN and infinity stay in their row; a row of zeros gives zeros."""
    for hidden in (5, 128, 1000):
        x = torch.randn(6, hidden, device=device, dtype=dtype)
        x[1, -1], x[2, 0], x[4, hidden // 2] = float("nan"), float("inf"), -float("inf")
        x[5] = 0
        result = assert_matches(SPEC, Sample(x, torch.rand(hidden, device=device).to(dtype) + 0.5, 1e-5))
        assert result[[0, 3, 5]].isfinite().all() and not result[5].any()


@over_dtypes
def test_rms_norm_scale(device, dtype):
    """Squares neither overflow nor vanish: the accumulator is float32, whatever x is."""
    x = torch.randn(4, 333, device=device)
    weight = torch.randn(333, device=device).to(dtype)
    for factor in (1e-4, 1e-2, 1e2, 1e4):
        assert_matches(SPEC, Sample((x * factor).to(dtype), weight, 1e-12))


@over_dtypes
def test_rms_norm_reference_is_transformers(dtype):
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm

    norm = MistralRMSNorm(96, eps=1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, 96, dtype=dtype)
    assert same_bits(SPEC.reference(x, norm.weight.detach(), 1e-6), norm(x).detach())
