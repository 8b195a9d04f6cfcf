"""gemv, gemv_swiglu and qkv_rope_append of 9 to 64 rows, which run on Hopper's products of warpgroups."""

from __future__ import annotations

import pytest
import torch
from checks import assert_exact, assert_matches, small_integers
from linear_checks import beside_other_kernels
from memory import same_bits

from hf_fastpath.ops.gemv import MAX_ROWS, MAX_WGMMA_ROWS, SPEC, most_rows
from hf_fastpath.ops.gemv_swiglu import SPEC as GATED
from hf_fastpath.registry import Sample

half_types = pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
ROWS = (9, 16, 17, 32, 33, 48, 49, MAX_WGMMA_ROWS)


@pytest.fixture
def hopper(cuda):
    if most_rows(torch.empty(8, 8, dtype=torch.float16, device=cuda)) == MAX_ROWS:
        pytest.skip("no GPU of compute capability 9.0")
    return cuda


@half_types
@pytest.mark.parametrize("rows", ROWS)
def test_exact_on_integers(hopper, dtype, rows):
    """Sizes give one block, two that share k, a tile for every multiprocessor, several of one and of two copies."""
    for k, n in ((8, 1), (64, 9), (72, 33), (200, 700), (1000, 4099), (136, 8449), (64, 40_001)):
        x, weight = small_integers(hopper, dtype, (rows, k), (n, k))
        bias, residual = (torch.randint(-9, 10, s, device=hopper).to(dtype) for s in ((n,), (rows, n)))
        assert_exact(SPEC, Sample(x, weight))
        assert_exact(SPEC, Sample(x, weight, bias, residual, "relu"))


@half_types
@pytest.mark.parametrize("rows", ROWS)
def test_gated_matches(hopper, dtype, rows):
    for k, n in ((8, 1), (72, 33), (1024, 5000), (256, 20_003)):
        x, gate, up = (torch.randn(s, k, device=hopper).to(dtype) * k**-0.25 for s in (rows, n, n))
        for activation in ("silu", "gelu"):
            assert_matches(GATED, Sample(x, gate, up, activation))


@half_types
def test_rows_of_wider_matrices(hopper, dtype):
    """Weights are column slices, aligned to 16 bytes; NaN beside them must not leak in."""
    for rows in (17, MAX_WGMMA_ROWS):
        wide = torch.full((600, 320), float("nan"), device=hopper, dtype=dtype)
        wide[:, 64:200] = torch.randn(600, 136, device=hopper) * 0.1
        assert_matches(SPEC, Sample(torch.randn(rows, 136, device=hopper).to(dtype), wide[:, 64:200]))


@half_types
def test_special_values(hopper, dtype):
    """NaN and infinity reach exactly the outputs that they belong to."""
    x = torch.randn(40, 1000, device=hopper).to(dtype)
    weight = (torch.randn(900, 1000, device=hopper) / 30).to(dtype)
    weight[3, 5], weight[4, 6], weight[899, 999] = float("inf"), -float("inf"), float("nan")
    x[2, 7], x[39, 999] = -float("inf"), float("nan")
    for activation in ("none", "silu", "gelu_tanh", "gelu"):
        assert_matches(SPEC, Sample(x, weight, activation=activation))


@half_types
def test_rows_do_not_mix(hopper, dtype):
    """Other rows of a product of the same width change no bit."""
    x, weight = torch.randn(MAX_WGMMA_ROWS, 2048, device=hopper).to(dtype), torch.randn(515, 2048, device=hopper)
    weight = (weight / 45).to(dtype)
    whole = SPEC(x, weight)
    for rows in (49, 57, 63):
        assert same_bits(SPEC(x[:rows], weight), whole[:rows])


def test_other_weights_take_sixteen_rows(hopper):
    x = torch.randn(17, 72, device=hopper, dtype=torch.float16)
    weight = torch.randn(40, 72, device=hopper, dtype=torch.float16)
    unaligned = torch.randn(40, 73, device=hopper, dtype=torch.float16)[:, 1:]
    SPEC(x, weight)
    for refused in (dict(x=x.float(), weight=weight.float()), dict(x=x, weight=unaligned)):
        with pytest.raises(ValueError, match="x has 17 rows, expected 1 to 16: use nn.Linear"):
            SPEC(**refused)
    with pytest.raises(ValueError, match="x has 17 rows, expected 1 to 16: use nn.Linear"):
        SPEC(x, weight.t().contiguous(), transposed=True)
    with pytest.raises(RuntimeError, match="x has 17 rows, expected at most 16 .*: use nn.Linear"):
        SPEC.overload(x, unaligned)
    with pytest.raises(ValueError, match="x has 65 rows, expected 1 to 64"):
        SPEC(torch.randn(65, 72, device=hopper, dtype=torch.float16), weight)


@pytest.mark.parametrize("rows", (16, MAX_WGMMA_ROWS))
def test_beside_other_kernels(hopper, rows):
    beside_other_kernels(SPEC, rows, hopper)
