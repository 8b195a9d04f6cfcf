"""Formats: the documented order of quants, packing and its inverse, bytes."""

from __future__ import annotations

import pytest
import torch

from hf_fastpath.quantization import FORMATS, quantize
from hf_fastpath.quantization.formats import BLOCK, factors, pack, padded, unpack

over_formats = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


@over_formats
def test_unpack_undoes_pack(format):
    quants = torch.randint(0, 1 << format.bits, (5, 3 * BLOCK), dtype=torch.uint8)
    packed = pack(format, quants)
    assert packed.shape == (5, 3 * BLOCK * format.bits // 8) and packed.is_contiguous()
    assert torch.equal(unpack(format, packed), quants)


@over_formats
def test_order_is_the_documented_one(format):
    """Word ``4 w + s`` of a block is the ``w``-th word of the ``s``-th 32 weights, the first in the lowest bits."""
    quants = torch.randint(0, 1 << format.bits, (1, 2 * BLOCK), dtype=torch.uint8)
    words = pack(format, quants).view(torch.int32)[0].tolist()
    held, words_of_block = 32 // format.bits, BLOCK * format.bits // 32
    for block in range(2):
        for stretch in range(4):
            for w in range(words_of_block // 4):
                word = words[block * words_of_block + 4 * w + stretch] & 0xFFFFFFFF
                for i in range(held):
                    weight = block * BLOCK + stretch * 32 + w * held + i
                    assert word >> format.bits * i & (1 << format.bits) - 1 == quants[0, weight]


@over_formats
@pytest.mark.parametrize("in_features", (1, 128, 200))
def test_bytes_are_those_of_the_tensors(format, in_features):
    packed = quantize(torch.randn(7, in_features), format)
    parts = [packed.quants, packed.scales] + ([packed.zeros] if format.has_zeros else [])
    assert format.nbytes(7, in_features) == sum(part.nbytes for part in parts)
    assert (packed.zeros is not None) == format.has_zeros
    assert packed.quants.shape[1] * 8 // format.bits == padded(in_features)


@over_formats
def test_split_gives_views(format):
    packed = quantize(torch.randn(12, 130), format)
    first, second = packed.split((5, 7))
    assert second.quants.data_ptr() == packed.quants[5:].data_ptr()
    whole = torch.cat((first.dequantize(), second.dequantize()))
    assert torch.equal(whole, packed.dequantize())


@over_formats
def test_the_codebook_has_the_values_of_all_quants(format):
    quants = torch.arange(1 << format.bits, dtype=torch.uint8)
    if format.is_float:
        values = quants.view(torch.float8_e4m3fn).double()
    elif format.is_table:
        values = torch.tensor(format.table, dtype=torch.float64)
    else:
        is_signed = format.bits == 8 and not format.has_zeros
        values = (quants.view(torch.int8) if is_signed else quants).double() - format.zero
    found = torch.tensor(format.codebook, dtype=torch.float64)
    torch.testing.assert_close(found, values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit(), values.signbit()) or format.is_float  # that of a NaN is none
    assert found[: format.finite_bytes].isfinite().all()
    assert format.finite_bytes == 256 or not found[format.finite_bytes].isfinite()
    assert format.has_zeros or found[format.empty_quant] == 0


@over_formats
def test_float32_holds_every_weight(format):
    packed = quantize(torch.randn(64, 384) * 3e-4, format)
    steps = torch.tensor(format.codebook, dtype=torch.float64)[unpack(format, packed.quants).long()]
    zeros = 0 if packed.zeros is None else packed.zeros.double()[..., None]
    steps = steps.view(64, format.groups(384), -1) - zeros
    scales, minimums = factors(format, packed.scales)
    exact = steps * (scales.double()[..., None] * packed.multiplier)
    if minimums is not None:
        exact += minimums.double()[..., None] * packed.multiplier
    exact = exact.view(64, -1)
    if format.scale_dtype == "float32" or format.has_minimums:  # the product or the sum is rounded once
        exact = exact.float().double()
    assert torch.equal(packed.dequantize().double(), exact)
