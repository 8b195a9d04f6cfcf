"""Quantizing weights: a search finds the scales of least squared error, instead of scaling to the largest weight.

Formats with a table and scales in float32 take the largest weight of a group as its scale. Of formats with records a
group's range gives scale and minimum.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from ..packed_formats import QuantValues
from .formats import Format, PackedWeight, factors, pack, padded, scale_bits, scale_values

#: factors of the plain scale that are tried: a smaller scale clips the largest weights and is finer for all others
_SHRINKS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.81, 0.77, 0.72)
#: how often the scale is then set to the best one for the present quants
_REFINEMENTS = 2
#: number of weights worked on at a time: the search holds some ten float32 copies of them
_PIECE = 1 << 22
#: the largest scale lies below 2 ** this, so that float16 holds scales 2 ** 20 times smaller with all bits
_LARGEST_SCALE = 7
_TINY = torch.finfo(torch.float32).tiny


def quantize(weight: torch.Tensor, format: Format) -> PackedWeight:
    """Quantize a matrix.

    Args:
        weight: [out_features, in_features], any float type, on any device.
        format: the format.

    Raises:
        ValueError: the weights are no matrix, or some are not finite.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"quantize() got {weight.dtype} {tuple(weight.shape)}, expected a matrix of floats")
    with torch.no_grad():
        largest = float(weight.abs().max()) if weight.numel() else 0.0
        if not math.isfinite(largest):
            raise ValueError("the weights hold infinities or NaN, which no quantized format has: mend them first")
        takes_largest = format.is_table and format.scale_dtype == "float32"  # such a scale needs no multiplier
        plain = 0.0 if takes_largest else largest / format.highest
        multiplier = 2.0 ** (math.frexp(plain)[1] - _LARGEST_SCALE) if plain else 1.0
        width = padded(weight.shape[1])
        rows = max(1, _PIECE // max(width, 1))
        each = _look_up_rows if takes_largest else _fit_rows if format.record else _quantize_rows
        pieces = [each(piece, format, width, multiplier) for piece in weight.split(rows)]
        quants, scales, zeros = (None if each[0] is None else torch.cat(each) for each in zip(*pieces))
        if format.scale_dtype == "e8m0":  # whose range is that of float32
            scales, multiplier = (scales.int() + (math.frexp(multiplier)[1] - 1)).clamp_(0, 254).to(torch.uint8), 1.0
    return PackedWeight(format, weight.shape[1], quants, scales, zeros, multiplier)


def _look_up_rows(weight: torch.Tensor, format: Format, width: int, multiplier: float):
    """Quantize as bitsandbytes does: the products with 1 / scale are compared with the means of neighboring values."""
    rows = weight.shape[0]
    w = functional.pad(weight.float(), (0, width - weight.shape[1])).view(rows, format.groups(width), -1)
    scales = w.abs().amax(-1) / format.highest
    steps = (w * (1 / scales.clamp(min=_TINY))[..., None]).clamp_(format.lowest, format.highest).view(rows, -1)
    quants = _nearest(steps, format)
    quants[:, weight.shape[1] :] = format.empty_quant
    return pack(format, quants), scales, None


def _fit_rows(weight: torch.Tensor, format: Format, width: int, multiplier: float):
    """Quantize to records: the least and the largest quant are a group's least and largest weight, or the largest
    magnitude is its scale's."""
    rows = weight.shape[0]
    w = functional.pad(weight.float() / multiplier, (0, width - weight.shape[1])).view(rows, format.groups(width), -1)
    low, high = w.amin(-1).clamp_(max=0), w.amax(-1).clamp_(min=0)
    if not format.has_minimums:
        low, high = torch.zeros_like(low), torch.maximum(-low, high)
    records = scale_bits(format, (high - low) / format.highest, low)
    scales, minimums = factors(format, records)
    steps = w if minimums is None else w - minimums[..., None]
    steps = steps / torch.where(scales == 0, torch.ones_like(scales), scales)[..., None]
    quants = steps.round_().clamp_(format.lowest, format.highest).view(rows, -1)
    quants[:, weight.shape[1] :] = format.empty_quant
    return pack(format, quants.to(torch.int8).view(torch.uint8)), records, None


def _nearest(steps: torch.Tensor, format: Format) -> torch.Tensor:
    """Return the quants, uint8, whose values are nearest to weights in units of their scale."""
    values, order = torch.tensor(format.codebook, device=steps.device).sort(stable=True)
    values = values[values.isfinite()]  # NaN is sorted behind all numbers
    return order[torch.bucketize(steps, (values[:-1] + values[1:]) / 2)].to(torch.uint8)


def _quantize_rows(weight: torch.Tensor, format: Format, width: int, multiplier: float):
    rows = weight.shape[0]
    w = functional.pad(weight.float() / multiplier, (0, width - weight.shape[1])).view(rows, format.groups(width), -1)
    best = _Best(w, format)
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    if format.has_zeros:  # the range of such a group has to contain zero
        low, high = low.clamp_(max=0), high.clamp_(min=0)
    extreme = torch.where(-low > high, low, high)
    for shrink in _SHRINKS:
        if format.has_zeros:
            scale = (high - low) * (shrink / format.highest)
            zero = (-low * shrink / scale.clamp(min=_TINY)).round_().clamp_(0, format.highest)
            best.try_scale(scale, zero)
            continue
        best.try_scale(extreme.abs() * (shrink / format.highest))
        if format.lowest != -format.highest:  # tried as well: the extreme weight gets the one quant that is farther out
            best.try_scale(extreme * (shrink / format.lowest))
    for _ in range(_REFINEMENTS):
        best.refine()
    return best.packed(rows)


class _Best:
    """The best scale and zero point of every group found so far."""

    def __init__(self, w: torch.Tensor, format: Format):
        self._w, self._format = w, format
        self._error = torch.full_like(w[..., :1], torch.inf)
        self._scale = torch.zeros_like(self._error)
        self._zero = torch.full_like(self._error, format.zero)

    def _steps(self, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Return the weights in units of the scale, rounded as the format holds them."""
        format = self._format
        # if the scale is zero, all weights of the group are zero, or too small for the scale's type
        units = self._w / torch.where(scale == 0, torch.ones_like(scale), scale)
        if format.values is QuantValues.INTEGERS:
            shift = zero if format.has_zeros else 0
            return units.round_().add_(shift).clamp_(format.lowest, format.highest).sub_(shift)
        if format.is_float:
            return units.clamp(format.lowest, format.highest).to(torch.float8_e4m3fn).float()
        return torch.tensor(format.codebook, device=units.device)[_nearest(units, format).int()]

    def try_scale(self, scale: torch.Tensor, zero: torch.Tensor | None = None) -> None:
        """Take the scale, rounded as the format holds it, in the groups in which it makes the squared error less."""
        zero = self._zero if zero is None else zero
        scale = scale_values(self._format, scale_bits(self._format, scale))
        error = (self._steps(scale, zero) * scale).sub_(self._w).square_().sum(-1, keepdim=True)
        better = error < self._error
        self._error = torch.where(better, error, self._error)
        self._scale = torch.where(better, scale, self._scale)
        self._zero = torch.where(better, zero, self._zero)

    def refine(self) -> None:
        """Try the scale that is best for the present quants."""
        steps = self._steps(self._scale, self._zero)
        norm = steps.square().sum(-1, keepdim=True)
        self.try_scale((steps * self._w).sum(-1, keepdim=True) / norm.clamp(min=_TINY), self._zero)

    def packed(self, rows: int):
        format = self._format
        steps = self._steps(self._scale, self._zero).view(rows, -1)
        scales = scale_bits(format, self._scale).view(rows, -1)
        zeros = self._zero.to(torch.uint8).view(rows, -1) if format.has_zeros else None
        if format.is_float:
            return pack(format, steps.to(torch.float8_e4m3fn).view(torch.uint8)), scales, zeros
        if format.values is not QuantValues.INTEGERS:
            return pack(format, _nearest(steps, format)), scales, zeros
        if format.bits == 8 and not format.has_zeros:
            return pack(format, steps.to(torch.int8).view(torch.uint8)), scales, zeros
        shift = self._zero.expand_as(self._w).reshape(rows, -1) if format.has_zeros else format.zero
        return pack(format, (steps + shift).to(torch.uint8)), scales, zeros
