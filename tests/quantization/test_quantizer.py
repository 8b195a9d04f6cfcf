"""The quantizer is no worse than scales of the largest weight, close if it can be, and clear about what it refuses."""

from __future__ import annotations

import pytest
import torch

from hf_fastpath.quantization import FORMATS, quantize
from hf_fastpath.quantization.formats import scale_dtype

over_formats = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def plain(format, weight):
    """Quantize the weights with the scale that the largest weight gives, in float32 or a coarser type of the format."""
    rows, columns = weight.shape
    w = weight.view(rows, -1, format.group or columns)
    if format.has_zeros:
        low, high = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / format.highest
        zero = (-low / scale).round()
        return ((((w / scale).round() + zero).clamp(0, format.highest) - zero) * scale).view(rows, columns)
    scale = w.abs().amax(-1, keepdim=True) / format.highest
    if format.scale_bytes < 2:
        scale = scale.to(scale_dtype(format)).float()
    if format.is_float:
        return ((w / scale).to(torch.float8_e4m3fn).float() * scale).view(rows, columns)
    if format.is_table and format.scale_dtype != "float32":
        table = torch.tensor(format.table)
        return (table[((w / scale)[..., None] - table).abs().argmin(-1)] * scale).view(rows, columns)
    return ((w / scale).round().clamp(format.lowest, format.highest) * scale).view(rows, columns)


@over_formats
@pytest.mark.parametrize("kind", ("normal", "uniform", "heavy tails", "shifted"))
def test_no_worse_than_the_largest_weights_scale(format, kind):
    weight = torch.randn(64, 512) * 0.02
    if kind == "uniform":
        weight = torch.rand(64, 512) - 0.5
    if kind == "heavy tails":
        weight[torch.rand(64, 512) < 0.01] *= 20
    if kind == "shifted":
        weight += 0.05
    error = (quantize(weight, format).dequantize() - weight).square().mean()
    # a scale is rounded to 11 bits
    assert error <= (plain(format, weight) - weight).square().mean() * 1.01
    if kind == "normal" and format.bits == 4:
        assert error < 0.95 * (plain(format, weight) - weight).square().mean()


@over_formats
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_odd_shapes_and_types(format, dtype):
    for rows, columns in ((1, 1), (3, 31), (17, 129), (2, 300)):
        weight = (torch.randn(rows, columns) * 0.1).to(dtype)
        packed = quantize(weight, format)
        assert packed.in_features == columns and packed.out_features == rows
        error = (packed.dequantize() - weight.float()).norm() / weight.float().norm()
        coarse = 0.21 if format.scale_dtype == "e8m0" else 0.15  # a single 5 becomes 4 or 6 times a power of two
        assert error < (coarse if format.bits == 4 else 0.04 if format.highest > 31 else 0.06)


@over_formats
def test_pieces_give_what_the_whole_gives(format, monkeypatch):
    weight = torch.randn(50, 256)
    whole = quantize(weight, format)
    monkeypatch.setattr("hf_fastpath.quantization.quantizer._PIECE", 256 * 7)
    pieces = quantize(weight, format)
    assert torch.equal(whole.quants, pieces.quants) and torch.equal(whole.scales, pieces.scales)


@over_formats
@pytest.mark.parametrize("size", (1e-30, 1e-7, 1e4, 1e30))
def test_weights_of_any_size(format, size):
    weight = torch.randn(8, 256)
    error = (quantize(weight * size, format).dequantize().double() / size - weight).norm() / weight.norm()
    assert error < (0.15 if format.bits == 4 else 0.03 if format.highest > 31 else 0.05)


@over_formats
def test_zeros_stay_zeros(format):
    weight = torch.randn(6, 384)
    weight[2], weight[:, 128:256] = 0, 0
    made = quantize(weight, format).dequantize()
    assert not made[2].any() and not made[:, 128:256].any()
    assert not quantize(torch.zeros(3, 100), format).dequantize().any()


@over_formats
def test_refuses_what_it_cannot_hold(format):
    weight = torch.randn(4, 100)
    for value in (float("nan"), float("inf")):
        weight[1, 7] = value
        with pytest.raises(ValueError, match="infinities or NaN"):
            quantize(weight, format)
    with pytest.raises(ValueError, match="expected a matrix"):
        quantize(torch.randn(4), format)
    with pytest.raises(ValueError, match="expected a matrix"):
        quantize(torch.ones(4, 4, dtype=torch.int8), format)
