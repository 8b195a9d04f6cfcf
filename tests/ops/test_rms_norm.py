"""rms_norm: the common tests, special values, scale, agreement with transformers."""

from __future__ import annotations

import pytest
import torch
from checks import assert_matches, common_tests, over_dtypes
from memory import same_bits

from hf_fastpath.ops.rms_norm import SPEC
from hf_fastpath.registry import OpInputError, Sample


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
    for rows, hidden in ((1, 1), (3, 17), (2, 1025), (1, 4096), (3, 11008), (70, 96)):
        for offset in (0.0, 1.0):
            yield Sample(randn(rows, hidden) * 2, randn(hidden), 1e-6, randn(rows, hidden), offset)
    yield Sample(randn(2, 64), randn(64), 1e-6, randn(129)[1:].view(2, 64), 1.0)  # at an odd address


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
def test_rms_norm_rounds_before_it_adds(device, dtype):
    """As stock, where norm and sum are two ops: bit for bit the sum of what the norm alone gives."""
    for hidden in (40, 111, 4096):
        x, residual = torch.randn(2, 3, hidden, device=device).to(dtype)
        weight = torch.randn(hidden, device=device).to(dtype)
        for offset in (0.0, 1.0):
            alone = SPEC(x, weight, 1e-6, None, offset)
            assert same_bits(SPEC(x, weight, 1e-6, residual, offset), residual + alone)


@over_dtypes
def test_rms_norm_reference_is_transformers(dtype):
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm

    norm = MistralRMSNorm(96, eps=1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, 96, dtype=dtype)
    assert same_bits(SPEC.reference(x, norm.weight.detach(), 1e-6), norm(x).detach())


@over_dtypes
def test_rms_norm_reference_with_an_offset_is_transformers(dtype):
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    norm = GemmaRMSNorm(96, eps=1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, 96, dtype=dtype)
    assert same_bits(SPEC.reference(x, norm.weight.detach(), 1e-6, None, 1.0), norm(x).detach())


@pytest.mark.parametrize(
    ("residual", "message"),
    (
        (torch.zeros(2, 64, dtype=torch.float16), "residual has dtype torch.float16"),
        (torch.zeros(1, 64), r"residual has shape \(1, 64\), expected \(2, 64\)"),
    ),
)
def test_rms_norm_names_the_fault(residual, message):
    with pytest.raises(OpInputError, match=message):
        SPEC(torch.zeros(2, 64), torch.zeros(64), 1e-6, residual)
