"""gemv: the common tests, exact integers, one product at a time, special values, strided weights."""

from __future__ import annotations

import functools

import pytest
import torch
from checks import DTYPES, assert_matches, common_tests, over_dtypes
from in_thread import Call
from linear_checks import (
    beside_other_kernels,
    exact_on_integers,
    ignores_gaps_between_weight_rows,
    over_layouts,
    reference_is_the_models_layers,
)
from memory import same_bits
from routes import main, over_instruction_sets, run_limited

from hf_fastpath.choices import NormKind
from hf_fastpath.ops.gemv import ACTIVATIONS, MAX_ROWS, SPEC
from hf_fastpath.registry import Sample


def odd_sizes(device, dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def matrix(k, n, transposed):
        return randn(*((k, n) if transposed else (n, k))) * k**-0.5

    sizes = (
        (1, 1, 1),
        (1, 1, 9),
        (2, 3, 1),
        (1, 17, 3),
        (3, 31, 129),
        (5, 33, 63),
        (13, 127, 31),
        (1, 2049, 515),
    )
    for transposed in (False, True):
        for rows, k, n in sizes:
            yield Sample(randn(rows, k), matrix(k, n, transposed), randn(n), randn(rows, n), transposed=transposed)
        for rows in range(1, MAX_ROWS + 1):
            yield Sample(randn(rows, 70), matrix(70, 21, transposed), transposed=transposed)
    yield Sample(randn(50), randn(7, 50), randn(7), randn(7), "silu")  # a single row without a batch dimension
    yield Sample(randn(2, 1, 3, 20), randn(9, 20), None, randn(2, 1, 3, 9), "gelu")


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
@over_layouts
def test_gemv_exact_on_integers(device, dtype, transposed):
    sizes = ((1, 111, 37), (1, 2000, 65), (2, 64, 65), (4, 768, 40), (7, 129, 33), (16, 1000, 19))
    exact_on_integers(SPEC, sizes, device, dtype, transposed)


@over_dtypes
@over_layouts
def test_gemv_uses_every_weight_once(device, dtype, transposed):
    """Unit vectors as x pick out single weights, whatever their values."""
    for k, n in ((45, 23), (96, 40)):
        weight = torch.randn(n, k, device=device).to(dtype)
        stored = weight.t().contiguous() if transposed else weight
        units = torch.eye(k, device=device, dtype=dtype)
        for rows in (1, MAX_ROWS):
            picked = torch.cat([SPEC(unit, stored, transposed=transposed) for unit in units.split(rows)])
            assert torch.equal(picked, weight.t())


@over_dtypes
@over_layouts
def test_gemv_special_values(device, dtype, transposed):
    """NaN and infinity reach exactly the outputs that they belong to."""
    nan, inf = float("nan"), float("inf")
    for rows in (1, 5):
        x, weight = (
            torch.randn(rows, 130, device=device).to(dtype),
            torch.randn(50, 130, device=device).to(dtype),
        )
        x[-1, -1], weight[3, 0], weight[7, 129], weight[9, 64] = inf, nan, inf, -inf
        for activation in ACTIVATIONS:
            stored = weight.t().contiguous() if transposed else weight
            assert_matches(SPEC, Sample(x, stored, activation=activation, transposed=transposed))
        clean = SPEC(x[:-1] if rows > 1 else torch.ones_like(x), stored, transposed=transposed)
        assert clean[:, 3].isnan().all()
        assert clean[:, [i for i in range(50) if i not in (3, 7, 9)]].isfinite().all()


@over_dtypes
@over_layouts
def test_gemv_ignores_gaps_between_weight_rows(device, dtype, transposed):
    ignores_gaps_between_weight_rows(SPEC, 3, device, dtype, transposed)


@over_layouts
def test_gemv_large(device, transposed):
    """The matrix has a model's size, so that work is really split; half precision accumulates in float32."""
    x, weight = torch.randn(1, 4096, device=device), torch.randn(1536, 4096, device=device) / 64
    for dtype in (torch.float32, torch.float16):
        stored = (weight.t().contiguous() if transposed else weight).to(dtype)
        result = assert_matches(SPEC, Sample(x.to(dtype), stored, transposed=transposed))
        assert same_bits(result, SPEC(x.to(dtype), stored, transposed=transposed))


@over_instruction_sets
def test_gemv_every_route(isa):
    run_limited(SPEC, __file__, isa)


def every_route(isa: str) -> None:
    device = torch.device("cpu")
    for dtype in DTYPES:
        for sample in odd_sizes(device, dtype):
            assert_matches(SPEC, sample, isa)
        x, weight = torch.randn(MAX_ROWS, 2100).to(dtype), (torch.randn(515, 2100) / 45).to(dtype)
        weight[7, 2099], weight[9] = float("nan"), torch.full((2100,), torch.finfo(dtype).tiny / 4)  # subnormal
        whole = SPEC(x, weight)
        assert_matches(SPEC, Sample(x, weight), isa)
        for threads in (1, 3):  # neither threads nor other rows change a bit
            torch.set_num_threads(threads)
            for rows in range(1, MAX_ROWS + 1):
                assert same_bits(SPEC(x[:rows], weight), whole[:rows]), (dtype, threads, rows)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("rows", (5, 8, 9, MAX_ROWS))
def test_gemv_of_several_rows_and_values_of_any_size(device, dtype, rows):
    """Values are not finite, subnormal, or too large for kernels that take a weight as two smaller numbers."""
    tiny, largest = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    x, weight = torch.randn(rows, 300, device=device).to(dtype), (torch.randn(100, 300, device=device) / 17).to(dtype)
    weight[33], weight[34], weight[50, 7], weight[51, 8] = tiny / 4, tiny * 1.5, 63.75, 64
    assert_matches(SPEC, Sample(x, weight))
    if dtype is torch.float16:  # products of subnormal bfloat16 are zeros on some CPUs
        assert_matches(SPEC, Sample(x / 64, weight[33:35] * 3))
    weight[3, 5], weight[4, 6], weight[20, 299], weight[70, 9] = float("inf"), -float("inf"), float("nan"), largest
    assert_matches(SPEC, Sample(x, weight))
    x[2, 7] = -float("inf")
    assert_matches(SPEC, Sample(x, weight))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_gemv_of_five_and_more_rows_does_not_mix_them(dtype):
    """Neither threads nor other rows change a bit; fewer rows may run other kernels."""
    x, weight = torch.randn(MAX_ROWS, 2100).to(dtype), (torch.randn(515, 2100) / 45).to(dtype)
    whole, before = SPEC(x, weight), torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for rows in range(5, MAX_ROWS + 1):
                assert same_bits(SPEC(x[:rows], weight), whole[:rows]), (threads, rows)
    finally:
        torch.set_num_threads(before)


def test_gemv_refuses_too_many_rows(device):
    x, weight = torch.randn(MAX_ROWS + 1, 8, device=device), torch.randn(4, 8, device=device)
    with pytest.raises(ValueError, match="x has 17 rows, expected 1 to 16: use nn.Linear"):
        SPEC(x, weight)
    with pytest.raises(ValueError, match="x has 0 rows"):
        SPEC(x[:0], weight)


def test_gemv_reference_is_the_models_layers():
    reference_is_the_models_layers(SPEC, rows=3)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("rows", (1, 2, 8))
def test_gemv_of_many_features(cuda, dtype, rows):
    """Every multiprocessor takes several groups of features; long rows of x come in parts."""
    for k, n in ((2048, 9001), (8192, 4300), (14336, 300)):
        weight = torch.randn(n, k, device=cuda, dtype=dtype) * k**-0.5
        x, residual = torch.randn(rows, k, device=cuda, dtype=dtype), torch.randn(rows, n, device=cuda, dtype=dtype)
        assert_matches(SPEC, Sample(x, weight, None, residual))


@pytest.mark.parametrize("rows", (1, 2, 8))
def test_next_weight_changes_nothing(cuda, rows):
    """The result does not depend on a prefetch of the next matrix: too small, in several pieces, its last bytes."""
    x = torch.randn(rows, 2048, device=cuda, dtype=torch.float16)
    weight = torch.randn(9001, 2048, device=cuda, dtype=torch.float16) / 45
    expected = SPEC(x, weight)
    for features in (7, 12_288, 40_001):
        following = torch.empty(features, 2048, device=cuda, dtype=torch.float16)
        assert same_bits(SPEC(x, weight, next_weight=following), expected)
        assert same_bits(SPEC(x, weight, next_weight=following[:, :1000]), expected)  # not contiguous, so not read
    torch.cuda.synchronize()


def test_next_weight_is_checked(device):
    x, weight = torch.randn(1, 16, device=device), torch.randn(8, 16, device=device)
    with pytest.raises(ValueError, match="next_weight has dtype torch.float16"):
        SPEC(x, weight, next_weight=weight.half())


@pytest.mark.parametrize("rows", (1, 2, 4, 8))
def test_gemv_beside_other_kernels(cuda, rows):
    beside_other_kernels(SPEC, rows, cuda)


def test_a_thread_that_needs_less_shared_memory(cuda):
    """It takes nothing away from another one, which launches the same kernel."""

    def calls_of(k: int) -> list:
        how = dict(device=cuda, dtype=torch.float16)
        given = torch.randn(8, k, **how), torch.randn(k, 512, **how) * k**-0.5
        norm = dict(norm=NormKind.RMS, norm_weight=torch.ones(k, **how), norm_eps=1e-6)
        return [functools.partial(SPEC, *given, transposed=True, **norm)] * 1000

    wide, narrow = calls_of(4096), calls_of(256)
    expected = wide[0]()
    threads = [Call(lambda calls=calls: [each() for each in calls][-1]) for calls in (wide, narrow)]
    assert same_bits([each.result() for each in threads][0], expected)


if __name__ == "__main__":
    main(SPEC, every_route)
