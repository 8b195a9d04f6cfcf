"""gemm: the common tests, exact integers, pieces and strips, special values, and every way to multiply."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checks import DTYPES, assert_exact, assert_matches, common_tests, is_native, over_dtypes, small_integers
from memory import same_bits

from hf_fastpath.ops.gemm import SPEC
from hf_fastpath.ops.gemv import ACTIVATIONS
from hf_fastpath.registry import Sample

ROOT = Path(__file__).resolve().parents[2]
over_layouts = pytest.mark.parametrize("transposed", (False, True), ids=("linear", "conv1d"))


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


def exact_on_integers(device, dtype, transposed):
    for rows, k, n in ((17, 111, 37), (40, 2000, 65), (21, 64, 165), (200, 768, 40), (70, 129, 331)):
        x, weight = small_integers(device, dtype, (rows, k), (n, k))
        weight = weight.t().contiguous() if transposed else weight
        bias, residual = (torch.randint(-9, 10, s, device=device).to(dtype) for s in ((n,), (rows, n)))
        assert_exact(SPEC, Sample(x, weight, transposed=transposed))
        assert_exact(SPEC, Sample(x, weight, bias, residual, "none", transposed))
        assert_exact(SPEC, Sample(x, weight, bias, residual, "relu", transposed))


def uses_every_weight_once(device, dtype, transposed):
    for k, n in ((45, 23), (300, 140)):
        weight = torch.randn(n, k, device=device).to(dtype)
        stored = weight.t().contiguous() if transposed else weight
        picked = SPEC(torch.eye(k, device=device, dtype=dtype), stored, transposed=transposed)
        assert torch.equal(picked, weight.t())


def special_values(device, dtype, transposed):
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


def ignores_gaps_between_rows(device, dtype, transposed):
    x = torch.randn(30, 40 if transposed else 57, device=device).to(dtype)
    for start in range(9):
        wide = torch.full((40, 80), float("nan"), device=device, dtype=dtype)
        wide[:, start : start + 57] = torch.randn(40, 57, device=device) * 0.1
        assert_matches(SPEC, Sample(x, wide[:, start : start + 57], transposed=transposed))


@over_dtypes
@over_layouts
def test_gemm_exact_on_integers(device, dtype, transposed):
    """Bit for bit: a skipped or doubled product cannot hide in rounding."""
    exact_on_integers(device, dtype, transposed)


@over_dtypes
@over_layouts
def test_gemm_uses_every_weight_once(device, dtype, transposed):
    """Unit vectors as x pick out single weights, whatever their value."""
    uses_every_weight_once(device, dtype, transposed)


@over_dtypes
@over_layouts
def test_gemm_special_values(device, dtype, transposed):
    """NaN and infinity reach exactly the outputs they belong to."""
    special_values(device, dtype, transposed)


@over_dtypes
@over_layouts
def test_gemm_ignores_gaps_between_weight_rows(device, dtype, transposed):
    """Rows of a column slice, at every alignment; NaN in the rest of the wide matrix must not leak in."""
    ignores_gaps_between_rows(device, dtype, transposed)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@over_layouts
def test_gemm_in_pieces(dtype, transposed):
    """More rows than are widened at a time; their number and their neighbors change no bit of a row."""
    in_pieces(dtype, transposed, rows=4700)


def in_pieces(dtype, transposed, rows):
    x, weight = torch.randn(rows, 2100).to(dtype), (torch.randn(70, 2100) / 45).to(dtype)
    residual = torch.randn(rows, 70).to(dtype)
    stored = weight.t().contiguous() if transposed else weight
    whole = SPEC(x, stored, None, residual, "silu", transposed)
    ref = SPEC.reference(x.double(), stored.double(), None, residual.double(), "silu", transposed)
    assert (whole - ref).abs().max() <= 2 * torch.finfo(dtype).eps * ref.abs().max()
    return same_bits(whole[1500:1530], SPEC(x[1500:1530], stored, None, residual[1500:1530], "silu", transposed))


@pytest.mark.parametrize("isa", ("baseline", "avx2", "avx512"))
def test_gemm_every_way(isa):
    """The kernels this CPU does not choose by itself, in a process of their own."""
    if not is_native(SPEC, torch.device("cpu")):
        pytest.skip("no library for the CPU")
    environment = os.environ | {"HF_FASTPATH_CPU_ISA": isa, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, __file__, isa], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]


def every_way(isa: str) -> None:
    from hf_fastpath import loader

    loader.ensure("cpu")
    assert is_native(SPEC, torch.device("cpu"))
    device = torch.device("cpu")
    torch.manual_seed(1729)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for dtype in DTYPES:
            for samples in (SPEC.samples, odd_sizes):
                for sample in samples(device, dtype):
                    assert_matches(SPEC, sample, isa)
            for transposed in (False, True):
                for check in (exact_on_integers, uses_every_weight_once, special_values, ignores_gaps_between_rows):
                    check(device, dtype, transposed)
    for dtype in DTYPES[1:]:
        same = in_pieces(dtype, False, rows=4700)
        assert same or isa == "baseline", "the sums of a row depend on its neighbors"


def test_gemm_reference_is_the_models_layers():
    from transformers.pytorch_utils import Conv1D

    x, weight, bias = torch.randn(30, 24), torch.randn(10, 24), torch.randn(10)
    linear, conv = torch.nn.Linear(24, 10), Conv1D(10, 24)
    with torch.no_grad():
        linear.weight.copy_(weight), linear.bias.copy_(bias)
        assert same_bits(SPEC.reference(x, linear.weight, linear.bias), linear(x))
        x, weight, bias = (torch.randint(-3, 4, t.shape).float() for t in (x, weight, bias))  # exact in any order
        conv.weight.copy_(weight.t()), conv.bias.copy_(bias)
        assert torch.equal(SPEC.reference(x, conv.weight, conv.bias, transposed=True), conv(x))


if __name__ == "__main__":
    with torch.no_grad():
        every_way(sys.argv[1])
