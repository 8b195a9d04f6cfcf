"""gemm: the common tests, exact integers, pieces and strips, special values, and every route."""

from __future__ import annotations

import pytest
import torch
from checks import DTYPES, assert_matches, common_tests, over_dtypes
from linear_checks import (
    exact_on_integers,
    ignores_gaps_between_weight_rows,
    over_layouts,
    reference_is_the_models_layers,
)
from memory import same_bits
from routes import main, over_instruction_sets, run_limited

from hf_fastpath.ops.gemm import SPEC
from hf_fastpath.ops.gemv import ACTIVATIONS
from hf_fastpath.registry import Sample


def odd_sizes(device, dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def matrix(k, n, transposed):
        return randn(*((k, n) if transposed else (n, k))) * k**-0.5

    sizes = ((1, 1, 1), (2, 3, 1), (17, 17, 3), (33, 31, 129), (25, 33, 63), (193, 257, 31), (97, 511, 161))
    for transposed in (False, True):
        for rows, k, n in sizes:
            yield Sample(randn(rows, k), matrix(k, n, transposed), randn(n), randn(rows, n), transposed=transposed)
        for rows in range(1, 27):  # every height of a tile
            yield Sample(randn(rows, 70), matrix(70, 21, transposed), transposed=transposed)
    yield Sample(randn(50), randn(7, 50), randn(7), randn(7), "silu")  # a single row without a batch dimension
    yield Sample(randn(0, 50), randn(7, 50), randn(7), randn(0, 7))
    yield Sample(randn(9, 50), randn(0, 50), randn(0), randn(9, 0))
    yield Sample(randn(2, 1, 13, 20), randn(9, 20), None, randn(2, 1, 13, 9), "gelu")


globals().update(common_tests(SPEC, odd_sizes))


def integers(device, dtype, transposed):
    """Compare bit for bit: a skipped or doubled product cannot hide in rounding."""
    sizes = ((17, 111, 37), (40, 2000, 65), (21, 64, 165), (200, 768, 40), (70, 129, 331))
    exact_on_integers(SPEC, sizes, device, dtype, transposed)


def every_weight_once(device, dtype, transposed):
    """Use unit vectors as x, which pick out single weights, whatever their values."""
    for k, n in ((45, 23), (300, 140)):
        weight = torch.randn(n, k, device=device).to(dtype)
        stored = weight.t().contiguous() if transposed else weight
        picked = SPEC(torch.eye(k, device=device, dtype=dtype), stored, transposed=transposed)
        assert torch.equal(picked, weight.t())


def special_values(device, dtype, transposed):
    """NaN and infinity have to reach exactly the outputs that they belong to."""
    nan, inf = float("nan"), float("inf")
    x = torch.randn(20, 300, device=device).to(dtype)
    weight = torch.randn(50, 300, device=device).to(dtype) / 16
    x[-1, -1], weight[3, 0], weight[7, 299], weight[9, 64] = inf, nan, inf, -inf
    stored = weight.t().contiguous() if transposed else weight
    for activation in ACTIVATIONS:
        assert_matches(SPEC, Sample(x, stored, activation=activation, transposed=transposed))
    clean = SPEC(x[:-1], stored, transposed=transposed)
    assert clean[:, 3].isnan().all()
    assert clean[:, [i for i in range(50) if i not in (3, 7, 9)]].isfinite().all()


def gaps_between_weight_rows(device, dtype, transposed):
    """NaN between the rows of a column slice must not leak in."""
    ignores_gaps_between_weight_rows(SPEC, 30, device, dtype, transposed)


CHECKS = (integers, every_weight_once, special_values, gaps_between_weight_rows)


@over_dtypes
@over_layouts
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_gemm_of(check, device, dtype, transposed):
    check(device, dtype, transposed)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@over_layouts
def test_gemm_in_pieces(dtype, transposed):
    """There are more rows than are converted at a time."""
    in_pieces(dtype, transposed, rows=4700)


def in_pieces(dtype, transposed, rows):
    """Neither the number of rows, up to 32 and above, nor the neighbors of a row change a bit of it.

    PyTorch's products promise less.
    """
    x, weight = torch.randn(rows, 2100).to(dtype), (torch.randn(70, 2100) / 45).to(dtype)
    residual = torch.randn(rows, 70).to(dtype)
    stored = weight.t().contiguous() if transposed else weight
    whole = SPEC(x, stored, None, residual, "silu", transposed)
    ref = SPEC.reference(x.double(), stored.double(), None, residual.double(), "silu", transposed)
    assert (whole - ref).abs().max() <= 2 * torch.finfo(dtype).eps * ref.abs().max()
    some = SPEC(x[1500:1532], stored, None, residual[1500:1532], "silu", transposed)  # as few as gemv's kernels take
    assert (some - ref[1500:1532]).abs().max() <= 2 * torch.finfo(dtype).eps * ref.abs().max()
    fewer = SPEC(x[1510:1530], stored, None, residual[1510:1530], "silu", transposed)
    more = SPEC(x[1500:1533], stored, None, residual[1500:1533], "silu", transposed)
    return same_bits(some[10:30], fewer) and same_bits(whole[1500:1533], more)


@over_instruction_sets
def test_gemm_every_route(isa):
    run_limited(SPEC, __file__, isa)


def every_route(isa: str) -> None:
    device = torch.device("cpu")
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for dtype in DTYPES:
            for samples in (SPEC.samples, odd_sizes):
                for sample in samples(device, dtype):
                    assert_matches(SPEC, sample, isa)
            for transposed in (False, True):
                for check in CHECKS:
                    check(device, dtype, transposed)
    for dtype in DTYPES[1:]:
        same = in_pieces(dtype, False, rows=4700)
        assert same or isa == "baseline", "the sums of a row depend on its neighbors"


def test_gemm_reference_is_the_models_layers():
    reference_is_the_models_layers(SPEC, rows=30)


if __name__ == "__main__":
    main(SPEC, every_route)
