"""Quantized weights as tensors: how the formats of ``hf_fastpath/packed_formats.py`` are packed and read again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from ..choices import InputQuants, PackedFormat
from ..packed_formats import BLOCK, FORMATS, SUB_BLOCKS, Format, padded

__all__ = ["BLOCK", "FORMATS", "Format", "InputRounding", "PackedWeight", "PreparedInputWeight"]
__all__ += ["ReorderedWeight", "RoundedInputWeight"]
__all__ += ["factors", "is_multiplier", "pack", "padded", "records_of", "scale_bits", "scale_dtype", "scale_values"]
__all__ += ["unpack"]

#: bits of 2^-127, the scale of a byte that is 0; behind the sign, bits of other powers are the byte alone
_LEAST_POWER = 0x00400000


def scale_dtype(format: Format) -> torch.dtype:
    """Return the type of the tensor that holds a format's scales."""
    return torch.uint8 if format.scale_bytes == 1 else getattr(torch, format.scale_dtype)


def scale_values(format: Format, scales: torch.Tensor) -> torch.Tensor:
    """Return scales in float32, which holds all of them."""
    if format.scale_dtype != "e8m0":
        return scales.float()
    return (scales.int() << 23).clamp_(min=_LEAST_POWER).view(torch.float32)


class _Pair(NamedTuple):
    """What the second number of a pair is, beside its scale."""

    minimum: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    other: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _zero_of(scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    return -minimum / torch.where(scale == 0, torch.ones_like(scale), scale)


#: records that are pairs of float16
_PAIRS = {
    "minimums": _Pair(lambda scale, minimum: minimum, lambda scale, minimum: minimum),
    "float_zeros": _Pair(lambda scale, zero: -scale * zero, _zero_of),
    "middles": _Pair(lambda scale, middle: middle - 8 * scale, lambda scale, minimum: minimum + 8 * scale),
}


def factors(format: Format, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the scales of groups and their minimums or None, in float32, which holds all of them.

    Args:
        scales: as a weight of the format has them.

    Returns:
        Two of [rows, groups].
    """
    record = format.record
    if record is None:
        return scale_values(format, scales), None
    rows = len(scales)
    records = scales.reshape(rows, -1, record.nbytes)
    if format.scale_dtype in _PAIRS:
        at_even_address = records.clone(memory_format=torch.contiguous_format)
        pairs = at_even_address.view(torch.float16).float().view(rows, -1, 2)
        return pairs[..., 0], _PAIRS[format.scale_dtype].minimum(pairs[..., 0], pairs[..., 1])
    of_block, of_groups = records[..., :4].contiguous().view(torch.float16).float(), records[..., 4:]
    if format.scale_dtype == "k_scales":
        by_number = of_groups.view(torch.int8).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return (of_block[..., :1] * by_number.float()).flatten(1), None
    low, high = of_groups.float().chunk(2, dim=-1)
    return (of_block[..., :1] * low).flatten(1), -(of_block[..., 1:] * high).flatten(1)


def records_of(format: Format, of_block: torch.Tensor, of_groups: torch.Tensor) -> torch.Tensor:
    """Return records as a weight holds them, which :func:`factors` reads.

    Args:
        of_block: float16 [rows, blocks, 1 or 2], factors of a block; [rows, blocks, 0] where groups have pairs.
        of_groups: float16 [rows, groups, 2], pairs; else uint8 [rows, 1 or 2, groups], of which two are scales and
            minimums.

    Returns:
        uint8 [rows, bytes of a row].
    """
    rows = len(of_groups)
    if format.scale_dtype in _PAIRS:
        return of_groups.contiguous().view(torch.uint8).view(rows, -1)
    blocks = of_block.shape[1]
    if format.scale_dtype == "k_scales":  # even groups in front of odd ones
        of_groups = of_groups.view(rows, blocks, -1, 2).transpose(-1, -2).reshape(rows, blocks, -1)
        of_block = torch.cat((of_block, torch.zeros_like(of_block)), -1)
    else:
        of_groups = of_groups.view(rows, 2, blocks, -1).transpose(1, 2).reshape(rows, blocks, -1)
    return torch.cat((of_block.contiguous().view(torch.uint8), of_groups), -1).view(rows, -1)


def scale_bits(format: Format, scales: torch.Tensor, minimums: torch.Tensor | None = None) -> torch.Tensor:
    """Return scales of float32 as the format holds them, rounded to nearest.

    Args:
        scales: any shape; where the format has records, [rows, groups].
        minimums: likewise, of a format that has minimums; None for 0. They are not positive in "k_minimums".
    """
    if format.record is not None:
        return _rounded_records(format, scales, torch.zeros_like(scales) if minimums is None else minimums)
    if format.scale_dtype != "e8m0":
        return scales.to(scale_dtype(format))
    mantissa, exponent = torch.frexp(scales.abs())  # from 0.5 up to 1
    power = exponent - (mantissa < math.sqrt(0.5)).to(exponent.dtype)
    return (power + 127).clamp_(0, 254).to(torch.uint8)


def _rounded_records(format: Format, scales: torch.Tensor, minimums: torch.Tensor) -> torch.Tensor:
    """Return records of scales and minimums, with powers of two as factors of a block."""
    if format.scale_dtype in _PAIRS:
        halves = scales.half()
        others = _PAIRS[format.scale_dtype].other(halves.float(), minimums)
        return records_of(format, scales[:, :0, None], torch.stack((halves, others.half()), -1))
    bits = 7 if format.scale_dtype == "k_scales" else 8
    bytes, of_block = [], []
    for values in (scales,) if bits == 7 else (scales, -minimums):
        by_block = values.float().view(len(values), -1, BLOCK // format.group)
        largest = by_block.abs().amax(-1, keepdim=True)
        factor = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1].clamp(-14 + bits, 15 + bits) - bits)
        numbers = (by_block / factor).round_().clamp_(-127 if bits == 7 else 0, (1 << bits) - 1)
        of_block.append(factor.half())
        bytes.append(numbers.flatten(1).to(torch.int16).to(torch.uint8))
    return records_of(format, torch.cat(of_block, -1), torch.stack(bytes, 1))


def is_multiplier(value: Any) -> bool:
    """Whether a matrix may have this multiplier: a float and a power of two, within float32, which kernels take."""
    return type(value) is float and 0 < value <= 2.0**127 and math.frexp(value)[0] == 0.5


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight; ``hf_fastpath/packed_formats.py`` describes its tensors.

    Attributes:
        format: its format.
        in_features: weights of a row, without padding.
        quants: uint8 [out_features, bytes of a row].
        scales: float16, float32, or uint8 that are powers of two, as the format says, [out_features, groups]; or uint8
            [out_features, bytes of records].
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
        "format": "number",
    }

    @property
    def number(self) -> PackedFormat:
        """The format as ops take it."""
        return PackedFormat(self.format.number)

    @property
    def out_features(self) -> int:
        return self.quants.shape[0]

    @property
    def device(self) -> torch.device:
        return self.quants.device

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float, PackedFormat]:
        """The weight as ops take it, in the order of :attr:`PARTS`."""
        return self.quants, self.scales, self.zeros, self.multiplier, self.number

    @classmethod
    def of_parts(
        cls,
        in_features: int,
        quants: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        multiplier: float,
        format: PackedFormat,
    ) -> PackedWeight:
        """Return the weight of which an op is given :attr:`parts`."""
        return cls(FORMATS[PackedFormat(format).label], in_features, quants, scales, zeros, multiplier)

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
        """Return the weights, [out_features, in_features], rounded to ``dtype``.

        float32 holds them exactly where scales are float16; a product with a scale in float32 is rounded.
        """
        quants = unpack(self.format, self.quants)
        scales, minimums = factors(self.format, self.scales)
        rows, scales = self.out_features, scales[..., None]
        codebook = _on_device(self.format.codebook, scales)
        values = codebook.index_select(0, quants.int().flatten()).view(rows, scales.shape[1], -1)
        if self.zeros is not None:
            values -= self.zeros.float()[..., None]
        if minimums is None:
            values *= scales * self.multiplier
        else:
            values = (values * scales + minimums[..., None]) * self.multiplier
        return values.view(rows, -1)[:, : self.in_features].to(dtype)


def _on_device(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return numbers as a tensor of another one's type; to a GPU none are copied, as a graph may hold the call."""
    if like.device.type == "cpu":
        return like.new_tensor(values)
    return torch.stack([like.new_full((), value) for value in values])


@dataclass(frozen=True)
class PreparedInputWeight:
    """A quantized weight whose input is changed in front of the product.

    Attributes:
        weight: the weight.
    """

    weight: PackedWeight

    @property
    def in_features(self) -> int:
        return self.weight.in_features

    @property
    def out_features(self) -> int:
        return self.weight.out_features

    @property
    def device(self) -> torch.device:
        return self.weight.device


@dataclass(frozen=True)
class ReorderedWeight(PreparedInputWeight):
    """A quantized weight whose inputs lie in another order, so that those of a group are neighbors.

    Attributes:
        weight: the weight; its column ``i`` is for the input ``order[i]``.
        order: int32 [in_features], a permutation. Weights of one input share the tensor if they have one order.
    """

    order: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.weight.tensors, self.order]

    def rows(self, first: int, count: int) -> ReorderedWeight:
        """Return a weight of so many output features, as views."""
        return ReorderedWeight(self.weight.rows(first, count), self.order)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights, [out_features, in_features], in the order of the inputs."""
        return self.weight.dequantize(dtype)[:, self.order.argsort()]


@dataclass(frozen=True)
class InputRounding:
    """How a product rounds its input before it multiplies, as ``ops.fake_quantize`` does it.

    Attributes:
        quants, limit: arguments of that op.
    """

    quants: InputQuants
    limit: float = 0.0

    @property
    def mixes_rows(self) -> bool:
        """Whether an input of one row has a say in other rows."""
        return self.quants is InputQuants.INT8_OUTLIERS and self.limit > 0


@dataclass(frozen=True)
class RoundedInputWeight(PreparedInputWeight):
    """A quantized weight of a package whose products round their input, too.

    Attributes:
        weight: the weight.
        rounding: how its input is rounded.
    """

    rounding: InputRounding

    @property
    def format(self) -> Format:
        return self.weight.format

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self.weight.tensors

    def rows(self, first: int, count: int) -> RoundedInputWeight:
        """Return a weight of so many output features, as views."""
        return RoundedInputWeight(self.weight.rows(first, count), self.rounding)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weights, [out_features, in_features]."""
        return self.weight.dequantize(dtype)


#: what a layer's quantized weight is
AnyPackedWeight = PackedWeight | ReorderedWeight | RoundedInputWeight


def _in_words(format: Format, quants: torch.Tensor) -> torch.Tensor:
    """View quants [rows, n] as [rows, blocks, sub-blocks, words, quants of a word]."""
    word = 32 // format.bits
    return quants.reshape(quants.shape[0], -1, SUB_BLOCKS, BLOCK // SUB_BLOCKS // word, word)


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
    return packed.view(rows, blocks, BLOCK // SUB_BLOCKS // word, SUB_BLOCKS, word).transpose(2, 3).reshape(rows, -1)
