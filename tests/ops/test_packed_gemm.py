"""packed_gemm: the common tests, tiles that several blocks share, exact integers, large products."""

from __future__ import annotations

import pytest
import torch
from checks import assert_exact, assert_matches, common_tests, over_dtypes
from memory import same_bits
from test_packed_gemv import noise_of, of_small_integers, over_formats, packed

from hf_fastpath.ops.packed_gemm import SPEC
from hf_fastpath.quantization import FORMATS, quantize
from hf_fastpath.registry import Sample


def odd_sizes(device, dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for format in FORMATS.values():
        sizes = ((17, 1, 1), (20, 3, 129), (33, 31, 9), (65, 127, 31), (18, 2049, 515), (129, 129, 71), (77, 1153, 70))
        for rows, k, n in sizes:
            weight = torch.randn(n, k, device=device) * k**-0.5
            yield Sample(randn(rows, k), *packed(format, weight), randn(n))


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
@over_formats
def test_packed_gemm_exact_on_integers(device, dtype, format):
    """Compare bit for bit: a skipped or doubled product, or one with another's weight, cannot hide in rounding."""
    for rows, k, n in ((17, 11, 37), (40, 150, 65), (100, 33, 300), (300, 64, 40)):
        x = torch.randint(-1, 2, (rows, k), device=device).to(dtype)
        x[:, ::2] = 0  # sums of all types stay below 256
        assert_exact(SPEC, Sample(x, *of_small_integers(format, n, k, device)), noise_of(format))


@over_dtypes
@over_formats
def test_packed_gemm_uses_every_weight_once(device, dtype, format):
    """Unit vectors as x pick out single weights."""
    for k, n in ((45, 23), (256, 40)):
        made = quantize(torch.randn(n, k, device=device), format)
        units = torch.eye(k, device=device, dtype=dtype)
        picked = SPEC(units, made.quants, made.scales, made.zeros, made.multiplier, format.name)
        expected = made.dequantize(torch.float64).t().to(dtype)
        torch.testing.assert_close(picked, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@over_dtypes
@over_formats
def test_packed_gemm_special_values(device, dtype, format):
    """Infinities and NaN in x reach the outputs of their row, and no other row, whose sums may run in another order."""
    for value in (float("inf"), float("nan"), float("-inf")):
        x = torch.randn(30, 130, device=device).to(dtype)
        made = packed(format, torch.randn(50, 130, device=device))
        clean = SPEC(x, *made)
        x[11, 129] = value
        whole, others = SPEC(x, *made), [row for row in range(30) if row != 11]
        assert not whole[11].isfinite().any()
        eps = torch.finfo(dtype).eps
        # products of a table's values are rounded, and by the numerics rule at the size of the largest sums
        size = float(clean.abs().amax()) if format.is_table else 1.0
        torch.testing.assert_close(whole[others], clean[others], rtol=2 * eps, atol=2 * eps * size)


@over_dtypes
@over_formats
def test_packed_gemm_small_and_large_inputs(device, dtype, format):
    """Inputs of very different sizes, zeros and subnormals are side by side; so are small and large scales."""
    weight = torch.randn(40, 512, device=device) / 16
    weight[::3] *= 2.0**-12
    for scale in (1e-7, 1e-3, 1.0, 1e3):
        x = torch.randn(20, 512, device=device) * scale
        x[:, ::37] *= 300
        x[:, 128:256] = 0
        x[1, 256:384] *= 1e-4
        assert_matches(SPEC, Sample(x.to(dtype), *packed(format, weight)))


@over_formats
@pytest.mark.parametrize("rows", (17, 64, 100, 200, 513))
def test_packed_gemm_every_tile(device, format, rows):
    """Tiles have any number of tokens; some are whole, and several blocks share others; repeats give the same bits."""
    for k, n in ((2048, 300), (1100, 1544)) if device.type == "cuda" else ((300, 40),):
        x = torch.randn(rows, k, device=device)
        made = packed(format, torch.randn(n, k, device=device) * k**-0.5)
        for dtype in (torch.float16, torch.bfloat16):
            out = assert_matches(SPEC, Sample(x.to(dtype), *made, torch.randn(n, device=device).to(dtype)))
            assert out.shape == (rows, n)
            assert same_bits(SPEC(x.to(dtype), *made), SPEC(x.to(dtype), *made))


@pytest.mark.full
@over_formats
def test_packed_gemm_large(device, format):
    """The sizes are a model's, so that the weight may be dequantized piece by piece."""
    if device.type != "cuda":
        pytest.skip("a GPU's sizes")
    for rows, k, n in ((70, 4096, 28672), (3900, 1024, 8200), (4100, 1024, 8200), (9000, 4096, 16384)):
        x = torch.randn(rows, k, device=device).half()
        assert_matches(SPEC, Sample(x, *packed(format, torch.randn(n, k, device=device) * k**-0.5)))
