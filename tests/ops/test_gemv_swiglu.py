"""gemv_swiglu: the common tests, exact integers behind an open gate, special values."""

from __future__ import annotations

import pytest
import torch
from checks import assert_exact, assert_matches, common_tests, over_dtypes, small_integers

from hf_fastpath.ops.fused_swiglu import GATES
from hf_fastpath.ops.gemv_swiglu import SPEC
from hf_fastpath.registry import Sample


def odd_sizes(device, dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for rows, k, n in (
        (1, 1, 1),
        (13, 17, 3),  # with three outputs alone, stock's error would be a matter of luck
        (2, 33, 65),
        (5, 129, 9),
        (11, 63, 31),
        (15, 31, 7),
        (1, 515, 1030),
    ):
        for activation in GATES:
            yield Sample(randn(rows, k), randn(n, k) * k**-0.5, randn(n, k) * k**-0.5, activation)
    fused = randn(2 * 24, 100) * 0.1
    yield Sample(randn(1, 1, 100), *fused.chunk(2))  # one gate_up matrix
    yield Sample(randn(100), *(randn(24, 200)[:, 99:199] * 0.1 for _ in range(2)))  # strided rows


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
@pytest.mark.parametrize("activation", GATES)
def test_gemv_swiglu_exact_on_integers(device, dtype, activation):
    """Every gate is the identity at 64 and zero at 0; with such gates the whole op is exact."""
    for rows, k, n in ((1, 111, 37), (1, 2000, 65), (4, 768, 40), (16, 100, 19)):
        x, up = small_integers(device, dtype, (rows, k), (n, k))
        x[:, -1] = 1  # the gates' only input is the last, where a tail would be lost
        gate = torch.zeros(n, k, device=device, dtype=dtype)
        gate[:, -1] = torch.randint(0, 2, (n,), device=device) * 64
        assert_exact(SPEC, Sample(x, gate, up, activation))


@over_dtypes
def test_gemv_swiglu_uses_every_weight_once(device, dtype):
    """With x = 128 e_j and integer weights, the result is 128 gate[:, j] * 128 up[:, j], exactly."""
    gate = torch.randint(0, 3, (23, 45), device=device).to(dtype)
    up = torch.randint(-1, 2, (23, 45), device=device).to(dtype)
    units = torch.eye(45, device=device, dtype=dtype) * 128
    for rows in (1, 15):
        picked = torch.cat([SPEC(unit, gate, up) for unit in units.split(rows)])
        assert torch.equal(picked, (gate * up * 128 * 128).t())


@over_dtypes
def test_gemv_swiglu_special_values(device, dtype):
    """NaN and infinity of either projection reach exactly the outputs they belong to."""
    x, gate, up = (torch.randn(n, 130, device=device).to(dtype) for n in (2, 40, 40))
    gate[3, 0], gate[5, 129], up[7, 64], up[39, 129] = float("nan"), float("inf"), float("-inf"), float("nan")
    for activation in GATES:
        result = assert_matches(SPEC, Sample(x, gate, up, activation))
        assert set((~result.isfinite()).any(0).nonzero().flatten().tolist()) <= {3, 5, 7, 39}
