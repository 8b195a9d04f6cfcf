"""Formats of quantized weights: the one description that the quantizer, the kernels, the tests and the docs read.

A row of a weight is cut into groups. The weights of a group share one scale, and a zero point if the format has zero
points: ``weight = multiplier * scale * (quant - zero)``. Quants, scales and zeros are separate tensors, so that a
kernel reads each of them as one unbroken stream:

* quants, uint8 [rows, blocks * BLOCK * bits / 8]: rows are padded to whole blocks of 128 weights. A block consists of
  32-bit little-endian words of four or eight neighboring weights each, the first weight in the lowest bits. A block has
  four stretches of 32 weights, whose words take turns: word ``4 w + s`` is the ``w``-th word of stretch ``s``. So 16
  bytes hold one word of each stretch, and a lane that reads every fourth word reads one stretch.
* scales, float16 [rows, groups], and zeros, uint8 [rows, groups]; the padding of a block is quants of value zero.
* multiplier, a power of two for the whole matrix: it keeps the scales in float16's normal range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ..choices import PackedFormat

#: weights that are ordered together; rows are padded to whole blocks
BLOCK = 128
_STRETCHES = 4  # stretches of a block, whose words take turns


@dataclass(frozen=True)
class Format:
    """How weights of few bits are stored.

    Attributes:
        name: the name that ``patch(weights=)`` takes.
        bits: bits of a quant, 4 or 8.
        group: number of weights that share a scale; 0 for a whole row.
        lowest, highest: range of a quant, less its zero if that is fixed; of floats the largest magnitude.
        has_zeros: whether groups have zero points of their own; else ``zero`` holds for all groups.
        zero: quant of the weight 0.
        is_float: quants are float8_e4m3fn instead of integers.
    """

    name: str
    bits: int
    group: int
    lowest: int
    highest: int
    has_zeros: bool = False
    zero: int = 0
    is_float: bool = False

    @property
    def packed_format(self) -> PackedFormat:
        """The name that ops have for the format."""
        return PackedFormat[self.name.upper()]

    def groups(self, in_features: int) -> int:
        """Return the number of groups of a row."""
        return 1 if self.group == 0 else padded(in_features) // self.group

    def nbytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of a matrix that a product reads."""
        groups = self.groups(in_features) * (3 if self.has_zeros else 2)
        return out_features * (padded(in_features) * self.bits // 8 + groups)


def padded(in_features: int) -> int:
    """Return the number of weights of a row with its padding."""
    return -(-in_features // BLOCK) * BLOCK


def is_multiplier(value: Any) -> bool:
    """Whether a matrix may have this multiplier: a float and a power of two, within float32, which kernels take."""
    return type(value) is float and 0 < value <= 2.0**127 and math.frexp(value)[0] == 0.5


#: every format, by name
FORMATS = {
    format.name: format
    for format in (
        Format("int8", 8, 128, -127, 127),
        Format("fp8", 8, 0, -448, 448, is_float=True),
        Format("int4", 4, 128, 0, 15, has_zeros=True),
        Format("int4_g32", 4, 32, -8, 7, zero=8),
    )
}


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight; see the module's docstring for its tensors.

    Attributes:
        format: its format.
        in_features: weights of a row, without padding.
        quants: uint8 [out_features, bytes of a row].
        scales: float16 [out_features, groups].
        zeros: uint8 [out_features, groups], or None if the format has no zero points.
        multiplier: a power of two.
    """

    format: Format
    in_features: int
    quants: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    multiplier: float

    #: argument of an op -> attribute
    PARTS: ClassVar[dict[str, str]] = {
        "quants": "quants",
        "scales": "scales",
        "zeros": "zeros",
        "multiplier": "multiplier",
        "format": "format.packed_format",
    }

    @property
    def out_features(self) -> int:
        return self.quants.shape[0]

    @property
    def device(self) -> torch.device:
        return self.quants.device

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float, PackedFormat]:
        """The weight as ops take it, in the order of :attr:`PARTS`."""
        return self.quants, self.scales, self.zeros, self.multiplier, self.format.packed_format

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [each for each in (self.quants, self.scales, self.zeros) if each is not None]

    @staticmethod
    def joined(weights: Sequence[PackedWeight]) -> PackedWeight | None:
        """Return weights over the same input as one weight, or None if they do not lie behind each other in memory."""
        first = weights[0]
        kind = first.format, first.in_features, first.multiplier
        if any((each.format, each.in_features, each.multiplier) != kind for each in weights):
            return None
        parts: dict[str, torch.Tensor | None] = {}
        for name in ("quants", "scales", "zeros"):
            tensors = [getattr(each, name) for each in weights]
            if tensors[0] is None:
                parts[name] = None
                continue
            storage, at = tensors[0].untyped_storage().data_ptr(), tensors[0].data_ptr()
            for tensor in tensors:
                lies_behind = tensor.untyped_storage().data_ptr() == storage and tensor.data_ptr() == at
                if not lies_behind or not tensor.is_contiguous():
                    return None
                at += tensor.nbytes
            shape = sum(len(tensor) for tensor in tensors), tensors[0].shape[1]
            parts[name] = tensors[0].as_strided(shape, tensors[0].stride())
        return replace(first, **parts)

    def rows(self, first: int, count: int) -> PackedWeight:
        """Return a weight of so many output features, as views."""
        return self.split([first, count, self.out_features - first - count])[1]

    def split(self, rows: Sequence[int]) -> list[PackedWeight]:
        """Split the weight into views of so many rows each."""
        zeros = [None] * len(rows) if self.zeros is None else self.zeros.split(rows)
        parts = zip(self.quants.split(rows), self.scales.split(rows), zeros)
        return [PackedWeight(self.format, self.in_features, *tensors, self.multiplier) for tensors in parts]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights, [out_features, in_features], rounded to ``dtype``; float32 holds them exactly."""
        format, quants = self.format, unpack(self.format, self.quants)
        if format.bits == 8:
            quants = quants.view(torch.float8_e4m3fn if format.is_float else torch.int8)
        rows, scales = self.out_features, self.scales.float()[..., None]
        values = quants.float().view(rows, scales.shape[1], -1)
        if format.zero or self.zeros is not None:
            values -= format.zero if self.zeros is None else self.zeros.float()[..., None]
        values *= scales * self.multiplier
        return values.view(rows, -1)[:, : self.in_features].to(dtype)


def _in_words(format: Format, quants: torch.Tensor) -> torch.Tensor:
    """View quants [rows, n] as [rows, blocks, stretches, words, quants of a word]."""
    word = 32 // format.bits
    return quants.reshape(quants.shape[0], -1, _STRETCHES, BLOCK // _STRETCHES // word, word)


def pack(format: Format, quants: torch.Tensor) -> torch.Tensor:
    """Return quants, uint8 [rows, blocks * BLOCK], as the bytes of the format."""
    ordered = _in_words(format, quants).transpose(2, 3).reshape(quants.shape)
    return ordered if format.bits == 8 else ordered[:, 0::2] | ordered[:, 1::2] << 4


def unpack(format: Format, packed: torch.Tensor) -> torch.Tensor:
    """Return the quants that :func:`pack` was given."""
    if format.bits == 4:
        packed = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    rows, blocks = packed.shape[0], packed.shape[1] // BLOCK
    word = 32 // format.bits
    return packed.view(rows, blocks, BLOCK // _STRETCHES // word, _STRETCHES, word).transpose(2, 3).reshape(rows, -1)
