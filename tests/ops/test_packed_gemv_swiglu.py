"""packed_gemv_swiglu: the common tests, exact integers behind an open gate."""

from __future__ import annotations

import pytest
import torch
from checks import assert_exact, common_tests, over_dtypes
from test_packed_gemv import center_of, noise_of, ones, quants_of, scales_of

from hf_fastpath.ops.fused_swiglu import GATES
from hf_fastpath.ops.packed_gemv import random_weight
from hf_fastpath.ops.packed_gemv_swiglu import SPEC
from hf_fastpath.quantization import FORMATS
from hf_fastpath.quantization.formats import pack, padded
from hf_fastpath.registry import Sample


def odd_sizes(device, dtype):
    for format in FORMATS.values():
        for rows, k, n in (
            (1, 1, 1),
            (2, 3, 5),
            (3, 31, 129),
            (13, 127, 31),
            (1, 2049, 515),
            (5, 129, 7),
            (1, 4096, 8),
        ):
            x = torch.randn(rows, k, device=device, dtype=dtype)
            yield Sample(x, *random_weight(format, 2 * n, k, device))


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_packed_gemv_swiglu_exact_on_integers(device, dtype, activation, format):
    """Every gate is the identity at 64 and zero at 0; with such gates the whole op is exact."""
    for rows, k, n in ((1, 111, 37), (1, 2000, 65), (4, 768, 40), (16, 100, 19)):
        x = torch.randint(-1, 2, (rows, k), device=device).to(dtype)
        x[:, ::2] = 0
        x[:, -1] = 1  # the gates' only input is the last, where a tail would be lost
        center = 7 if format.has_zeros else center_of(format)
        whole = torch.zeros(2 * n, padded(k), device=device, dtype=torch.int64)
        whole[n:, :k] = torch.randint(-3, 4, (n, k), device=device)
        whole[:n, k - 1] = torch.randint(0, 2, (n,), device=device)
        quants, groups = quants_of(format, whole, center), (2 * n, format.groups(k))
        scales = ones(format, groups, device)
        scales[:n] = scales_of(format, torch.full((n, groups[1]), 64.0))
        zeros = torch.full(groups, center, device=device, dtype=torch.uint8) if format.has_zeros else None
        assert_exact(
            SPEC, Sample(x, pack(format, quants), scales, zeros, 1.0, format.name, activation), 64 * noise_of(format)
        )
