"""joined_gemv: the common tests, exact integers, refusals."""

from __future__ import annotations

import pytest
import torch
from checks import assert_exact, common_tests, over_dtypes, small_integers

from hf_fastpath.ops.joined_gemv import MAX_WEIGHTS, SPEC
from hf_fastpath.registry import OpInputError, Sample


def odd_sizes(device, dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for rows, k, features in (
        (1, 17, (40, 1, 1)),
        (13, 17, (3, 30)),
        (2, 33, (65, 7, 2)),
        (5, 129, (9, 9, 9)),
        (11, 63, (31, 1)),
        (1, 515, (1030, 31)),
        (1, 520, (48, 1, 33, 5)),
        (6, 72, (2, 30, 1, 9)),
        (1, 8, (70,)),
    ):
        yield Sample(randn(rows, k), [randn(n, k) * k**-0.5 for n in features])
    wide = [randn(n, 300)[:, start : start + 100] * 0.1 for n, start in ((40, 0), (9, 1), (24, 200))]
    yield Sample(randn(1, 1, 100), wide)  # strided rows, some of them not aligned
    yield Sample(randn(3, 200)[:, 100:], wide[:2])


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
def test_joined_gemv_exact_on_integers(device, dtype):
    for rows, k, features in ((1, 111, (37, 5)), (1, 2000, (65, 1, 8, 8)), (4, 768, (40, 32, 32)), (16, 100, (19, 3))):
        x, weight = small_integers(device, dtype, (rows, k), (sum(features), k))
        assert_exact(SPEC, Sample(x, list(weight.split(features))))


def test_joined_gemv_names_the_fault():
    x, weight = torch.randn(1, 8), torch.randn(3, 8)
    for weights, message in (
        ([], "0 weights, expected 1 to 4"),
        ([weight] * (MAX_WEIGHTS + 1), "5 weights, expected 1 to 4: take the others in another call"),
        ([weight, torch.randn(3, 9)], r"weights\[1\] has shape \(3, 9\), expected \[out, 8\]"),
        ([weight, weight.half()], r"weights\[1\] has dtype torch.float16, expected torch.float32: cast it"),
        ([weight, torch.randn(8, 3).t()], r"weights\[1\] has strides \(1, 3\): make its rows contiguous"),
    ):
        with pytest.raises(OpInputError, match=message):
            SPEC(x, weights)
    with pytest.raises(OpInputError, match="x has 17 rows, expected 1 to 16"):
        SPEC(torch.randn(17, 8), [weight])
