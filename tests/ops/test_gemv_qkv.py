"""gemv_qkv: the common tests, exact integers, one product at a time, special values."""

from __future__ import annotations

import torch
from checks import assert_exact, assert_matches, common_tests, over_dtypes, small_integers

from hf_fastpath.ops.gemv_qkv import SPEC
from hf_fastpath.registry import Sample


def odd_sizes(device, dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for rows, k, nq, nk, nv in (
        (1, 1, 1, 1, 1),
        (1, 17, 3, 1, 2),
        (2, 33, 65, 1, 7),
        (5, 129, 9, 31, 31),
        (11, 63, 5, 64, 3),
    ):
        weights = [randn(n, k) * k**-0.5 for n in (nq, nk, nv)]
        biases = [randn(n) for n in (nq, nk, nv)]
        yield Sample(randn(rows, k), *weights)
        yield Sample(randn(rows, k), *weights, *biases)
        yield Sample(randn(rows, k), *weights, biases[0], None, biases[2])  # Whisper: no bias on k
    fused = randn(40 + 8 + 8, 100) * 0.1
    yield Sample(randn(1, 1, 100), *fused.split((40, 8, 8)))  # three parts of one matrix
    yield Sample(randn(100), *(randn(n, 3 * 100)[:, 100:200] * 0.1 for n in (16, 4, 4)))  # strided rows


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
def test_gemv_qkv_exact_on_integers(device, dtype):
    """Bit for bit: a skipped product, or one of the wrong matrix, cannot hide in rounding."""
    for rows, k, nq, nkv in ((1, 111, 32, 8), (1, 2000, 64, 16), (3, 96, 33, 17), (16, 768, 12, 5)):
        x, *weights = small_integers(device, dtype, (rows, k), (nq, k), (nkv, k), (nkv, k))
        biases = [torch.randint(-9, 10, (n,), device=device).to(dtype) for n in (nq, nkv, nkv)]
        assert_exact(SPEC, Sample(x, *weights))
        assert_exact(SPEC, Sample(x, *weights, *biases))


@over_dtypes
def test_gemv_qkv_uses_every_weight_once(device, dtype):
    """Unit vectors as x pick out single weights, whatever their value."""
    weights = [torch.randn(n, 45, device=device).to(dtype) for n in (23, 7, 9)]
    units = torch.eye(45, device=device, dtype=dtype)
    for rows in (1, 15):
        picked = torch.cat([SPEC(unit, *weights) for unit in units.split(rows)])
        assert torch.equal(picked, torch.cat(weights).t())


@over_dtypes
def test_gemv_qkv_special_values(device, dtype):
    """NaN and infinity reach exactly the outputs they belong to."""
    x = torch.randn(2, 130, device=device).to(dtype)
    q, k, v = (torch.randn(n, 130, device=device).to(dtype) for n in (33, 8, 8))
    q[32, 129], k[0, 0], v[7, 64] = float("nan"), float("inf"), float("nan")
    result = assert_matches(SPEC, Sample(x, q, k, v))
    assert (~result.isfinite()).any(0).nonzero().flatten().tolist() == [32, 33, 48]
