"""Checks of linear layers that `gemv` and `gemm` share; each passes the sizes its kernels divide in different ways."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from checks import assert_exact, assert_matches, small_integers
from memory import same_bits

from hf_fastpath.registry import OpSpec, Sample

over_layouts = pytest.mark.parametrize("transposed", (False, True), ids=("linear", "conv1d"))


def exact_on_integers(
    spec: OpSpec, sizes: Iterable[tuple[int, int, int]], device: torch.device, dtype: torch.dtype, transposed: bool
) -> None:
    """Compare bit for bit, for sizes of rows, in_features and out_features: a skipped or doubled product cannot hide in
    rounding."""
    for rows, k, n in sizes:
        x, weight = small_integers(device, dtype, (rows, k), (n, k))
        weight = weight.t().contiguous() if transposed else weight
        bias, residual = (torch.randint(-9, 10, s, device=device).to(dtype) for s in ((n,), (rows, n)))
        assert_exact(spec, Sample(x, weight, transposed=transposed))
        assert_exact(spec, Sample(x, weight, bias, residual, "none", transposed))
        assert_exact(spec, Sample(x, weight, bias, residual, "relu", transposed))


def ignores_gaps_between_weight_rows(
    spec: OpSpec, rows: int, device: torch.device, dtype: torch.dtype, transposed: bool
) -> None:
    """Check rows of a column slice, at every alignment; NaN in the rest of the wide matrix must not leak in."""
    x = torch.randn(rows, 40 if transposed else 57, device=device).to(dtype)
    for start in range(9):
        wide = torch.full((40, 80), float("nan"), device=device, dtype=dtype)
        wide[:, start : start + 57] = torch.randn(40, 57, device=device) * 0.1
        assert_matches(spec, Sample(x, wide[:, start : start + 57], transposed=transposed))


def reference_is_the_models_layers(spec: OpSpec, rows: int) -> None:
    """Compare the reference with ``nn.Linear`` and ``Conv1D``."""
    from transformers.pytorch_utils import Conv1D

    x, weight, bias = torch.randn(rows, 24), torch.randn(10, 24), torch.randn(10)
    linear, conv = torch.nn.Linear(24, 10), Conv1D(10, 24)
    with torch.no_grad():
        linear.weight.copy_(weight), linear.bias.copy_(bias)
        assert same_bits(spec.reference(x, linear.weight, linear.bias), linear(x))
        x, weight, bias = (torch.randint(-3, 4, t.shape).float() for t in (x, weight, bias))  # exact in any order
        conv.weight.copy_(weight.t()), conv.bias.copy_(bias)
        assert torch.equal(spec.reference(x, conv.weight, conv.bias, transposed=True), conv(x))


def beside_other_kernels(spec: OpSpec, rows: int, device: torch.device) -> None:
    """Fill slots of the rings again many times while other streams keep the multiprocessors busy."""
    for k, n in ((8192, 4300), (14336, 4096), (4096, 14336)):
        weight = torch.randn(n, k, device=device, dtype=torch.float16) * k**-0.5
        x = torch.randn(rows, k, device=device, dtype=torch.float16)
        expected = assert_matches(spec, Sample(x, weight))
        found = []
        for stream in [torch.cuda.Stream(device) for _ in range(4)]:
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                found += [spec.overload(x, weight) for _ in range(150)]
        torch.cuda.synchronize()
        assert not any((out != expected).any() for out in found)
