"""The quantizer is no worse than scales of the largest weight, close if it can be, and clear about what it refuses."""

from __future__ import annotations

import pytest
import torch

from hf_fastpath.quantization import FORMATS, quantize

over_formats = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def plain(form, weight):
    """Quantize the weights with a float32 scale that the largest weight gives."""
    rows, columns = weight.shape
    w = weight.view(rows, -1, form.group or columns)
    if form.has_zeros:
        low, high = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / form.highest
        zero = (-low / scale).round()
        return ((((w / scale).round() + zero).clamp(0, form.highest) - zero) * scale).view(rows, columns)
    scale = w.abs().amax(-1, keepdim=True) / form.highest
    if form.is_float:
        return ((w / scale).to(torch.float8_e4m3fn).float() * scale).view(rows, columns)
    return ((w / scale).round().clamp(form.lowest, form.highest) * scale).view(rows, columns)


@over_formats
@pytest.mark.parametrize("kind", ("normal", "uniform", "heavy tails", "shifted"))
def test_no_worse_than_the_largest_weights_scale(form, kind):
    weight = torch.randn(64, 512) * 0.02
    if kind == "uniform":
        weight = torch.rand(64, 512) - 0.5
    if kind == "heavy tails":
        weight[torch.rand(64, 512) < 0.01] *= 20
    if kind == "shifted":
        weight += 0.05
    error = (quantize(weight, form).dequantize() - weight).square().mean()
    # a scale is rounded to 11 bits
    assert error <= (plain(form, weight) - weight).square().mean() * 1.01
    if kind == "normal" and form.bits == 4:
        assert error < 0.95 * (plain(form, weight) - weight).square().mean()


@over_formats
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_odd_shapes_and_types(form, dtype):
    for rows, columns in ((1, 1), (3, 31), (17, 129), (2, 300)):
        weight = (torch.randn(rows, columns) * 0.1).to(dtype)
        packed = quantize(weight, form)
        assert packed.in_features == columns and packed.out_features == rows
        error = (packed.dequantize() - weight.float()).norm() / weight.float().norm()
        assert error < (0.15 if form.bits == 4 else 0.04)


@over_formats
def test_pieces_give_what_the_whole_gives(form, monkeypatch):
    weight = torch.randn(50, 256)
    whole = quantize(weight, form)
    monkeypatch.setattr("hf_fastpath.quantization.quantizer._PIECE", 256 * 7)
    pieces = quantize(weight, form)
    assert torch.equal(whole.quants, pieces.quants) and torch.equal(whole.scales, pieces.scales)


@over_formats
@pytest.mark.parametrize("size", (1e-30, 1e-7, 1e4, 1e30))
def test_weights_of_any_size(form, size):
    weight = torch.randn(8, 256)
    error = (quantize(weight * size, form).dequantize().double() / size - weight).norm() / weight.norm()
    assert error < (0.15 if form.bits == 4 else 0.03)


@over_formats
def test_zeros_stay_zeros(form):
    weight = torch.randn(6, 384)
    weight[2], weight[:, 128:256] = 0, 0
    made = quantize(weight, form).dequantize()
    assert not made[2].any() and not made[:, 128:256].any()
    assert not quantize(torch.zeros(3, 100), form).dequantize().any()


@over_formats
def test_refuses_what_it_cannot_hold(form):
    weight = torch.randn(4, 100)
    for value in (float("nan"), float("inf")):
        weight[1, 7] = value
        with pytest.raises(ValueError, match="infinities or NaN"):
            quantize(weight, form)
    with pytest.raises(ValueError, match="expected a matrix"):
        quantize(torch.randn(4), form)
    with pytest.raises(ValueError, match="expected a matrix"):
        quantize(torch.ones(4, 4, dtype=torch.int8), form)
