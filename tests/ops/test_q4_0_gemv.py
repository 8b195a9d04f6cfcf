"""q4_0_gemv: the common tests, the layouts as they are documented, exact integers, and packed_gemv's result."""

from __future__ import annotations

import struct

import pytest
import torch
from checks import common_tests, is_native, over_dtypes

from hf_fastpath import ops
from hf_fastpath.ops.q4_0_gemv import LAYOUTS, SPEC, dequantize, laid_out
from hf_fastpath.quantization import FORMATS, quantize
from hf_fastpath.registry import Sample

over_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def packed(rows, columns, device="cpu", format="int4_g32"):
    return quantize(torch.randn(rows, columns, device=device) * columns**-0.5, FORMATS[format])


def odd_sizes(device, dtype):
    for k, n in ((32, 3), (160, 129), (1024, 7), (3104, 65)):
        for layout in LAYOUTS:
            yield Sample(torch.randn(1, k, device=device, dtype=dtype), *laid_out(packed(n, k, device), layout))


globals().update(common_tests(SPEC, odd_sizes))


def test_q4_0_gemv_interleaved_is_ggmls_block():
    """A block is a float16, then 16 bytes with weights 0 to 15 in the low four bits and 16 to 31 in the high bits."""
    weight = packed(3, 64)
    values = weight.dequantize()
    quants, scales = laid_out(weight, "interleaved")
    assert scales is None and quants.shape == (3, 36)
    for row in range(3):
        data = bytes(quants[row].tolist())
        for block in range(2):
            scale, *found = struct.unpack_from("<e16B", data, 18 * block)
            nibbles = [byte & 15 for byte in found] + [byte >> 4 for byte in found]
            expected = [scale * (nibble - 8) for nibble in nibbles]
            assert values[row, 32 * block : 32 * block + 32].tolist() == pytest.approx(expected, rel=1e-3)


@over_layouts
def test_q4_0_gemv_layouts_hold_the_same_weight(layout):
    weight = packed(5, 96)
    assert torch.allclose(dequantize(*laid_out(weight, layout)), weight.dequantize(), rtol=1e-3, atol=0)
    with pytest.raises(ValueError, match="int4_g32"):
        laid_out(packed(5, 96, format="int4"), layout)


@over_dtypes
@over_layouts
def test_q4_0_gemv_is_exact_on_integers(device, dtype, layout):
    if not is_native(SPEC, device):
        pytest.skip("no native library")
    quants, scales = laid_out(packed(70, 288, device), "split")
    scales = torch.full_like(scales, 0.5)
    given = (quants, scales)
    if layout == "interleaved":
        blocks = torch.cat((scales[..., None].view(torch.uint8), quants.view(70, -1, 16)), dim=-1)
        given = (blocks.view(70, -1), None)
    x = torch.randint(-1, 2, (1, 288), device=device).to(dtype) * 2
    expected = x.double() @ dequantize(*given).double().t()
    assert torch.equal(SPEC(x, *given).double(), expected.to(dtype).double())


@over_layouts
@pytest.mark.parametrize("special", (float("inf"), float("nan"), 1e-7))
def test_q4_0_gemv_special_values(device, layout, special):
    x = torch.zeros(1, 64, device=device, dtype=torch.float16)
    x[0, 5], x[0, 40] = special, 3
    given = laid_out(packed(9, 64, device), layout)
    found, expected = SPEC(x, *given).float(), SPEC.reference(x, *given).float()
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())
    finite = expected.isfinite()
    assert torch.allclose(found[finite], expected[finite], rtol=2e-3, atol=1e-6)


def test_q4_0_gemv_is_what_packed_gemv_computes(device):
    weight = packed(48, 256, device)
    x = torch.randn(1, 256, device=device)
    ours = ops.packed_gemv(x, weight.quants, weight.scales, None, weight.multiplier, weight.format.name)
    for layout in LAYOUTS:
        assert torch.allclose(SPEC(x, *laid_out(weight, layout)), ours, rtol=1e-3, atol=1e-3)
