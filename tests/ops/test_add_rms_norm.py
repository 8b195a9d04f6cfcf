"""add_rms_norm: the common tests, a stream that grows, special values, agreement with transformers."""

from __future__ import annotations

import pytest
import torch
from checks import assert_matches, common_tests, over_dtypes
from memory import same_bits

from hf_fastpath.ops.add_rms_norm import SPEC
from hf_fastpath.registry import OpInputError, Sample


def odd_sizes(device, dtype):
    wide = torch.promote_types(dtype, torch.float32)

    def call(*shape, programmatic_launch=False):
        x, weight = (torch.randn(*each, device=device, dtype=dtype) for each in (shape, shape[-1:]))
        residual = 3 * torch.randn(*shape, device=device, dtype=wide)
        return Sample(x, residual, weight, 1e-6, programmatic_launch)

    for shape in ((1, 1), (3, 1), (1, 3), (2, 15), (5, 17), (13, 33), (1, 1025), (3, 4099), (2, 11008), (77,)):
        yield call(*shape)
    for shape in ((1, 1, 2560), (2, 1, 8192), (1, 1, 4097)):
        yield call(*shape, programmatic_launch=True)
    yield call(2, 0, 64)


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
def test_add_rms_norm_keeps_the_stream_in_float32(device, dtype):
    """The sum is float32's, bit for bit: small steps are not lost beside a large stream."""
    for hidden in (40, 111, 4096):
        x = torch.randn(2, 3, hidden, device=device).to(dtype)
        stream = 1000 * torch.randn(2, 3, hidden, device=device)
        weight = torch.randn(hidden, device=device).to(dtype)
        _, total = SPEC(x, stream, weight, 1e-5)
        assert same_bits(total, stream + x.float())


@over_dtypes
def test_add_rms_norm_special_values(device, dtype):
    """NaN and infinity stay in their row; a sum of zeros gives zeros."""
    for hidden in (5, 128, 1000):
        x = torch.randn(6, hidden, device=device, dtype=dtype)
        stream = torch.randn(6, hidden, device=device)
        x[1, -1], stream[2, 0] = float("nan"), float("inf")
        x[5], stream[5] = 0, 0
        sample = Sample(x, stream, torch.rand(hidden, device=device).to(dtype) + 0.5, 1e-5)
        assert_matches(SPEC, sample)
        normed, total = SPEC(*sample.args)
        assert normed[[0, 3, 4, 5]].isfinite().all() and not normed[5].any() and not total[5].any()


def test_add_rms_norm_reference_is_transformers():
    from transformers.models.mamba2.modeling_mamba2 import Mamba2RMSNorm

    norm = Mamba2RMSNorm(96, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    x, stream = torch.randn(2, 3, 5, 96)
    normed, total = SPEC.reference(x, stream, norm.weight.detach(), 1e-5)
    assert same_bits(normed, norm(stream + x).detach()) and same_bits(total, stream + x)


@pytest.mark.parametrize(
    ("residual", "message"),
    (
        (torch.zeros(2, 64, dtype=torch.float16), "residual is torch.float16 on cpu, expected torch.float32"),
        (torch.zeros(1, 64), r"residual has shape \(1, 64\), expected \(2, 64\)"),
    ),
)
def test_add_rms_norm_names_the_fault(residual, message):
    with pytest.raises(OpInputError, match=message):
        SPEC(torch.zeros(2, 64), residual, torch.zeros(64), 1e-6)
