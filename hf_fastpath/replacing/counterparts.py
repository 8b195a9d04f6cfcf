"""Another package's weight in one of our formats: the same values in the order of our kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch.nn import functional

from ..errors import NoCounterpart
from ..linears.checkpoint_weights import AffineWeight, BlockWeight, ByteWeight, IntWeight, QuantizedWeight, TableWeight
from ..quantization.formats import (
    FORMATS,
    AnyPackedWeight,
    Format,
    PackedWeight,
    ReorderedWeight,
    RoundedInputWeight,
    pack,
    padded,
    records_of,
    scale_bits,
    scale_dtype,
)
from ..quantization.ggml_blocks import packed_blocks

#: quants, scales and zeros as a format has them; zeros are None if it has none
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
#: weights that are repacked at a time
_PIECE = 1 << 20
#: scales that are not float16 are brought below 2 ** this by the multiplier
_LARGEST_SCALE = 7


def format_for(bits: int, group: int, in_features: int, has_zeros: bool, zeros_fit: bool, steps_fit: bool) -> Format:
    """Return the format that holds quants exactly.

    Args:
        bits, group: of the quants, as of :class:`..linears.checkpoints.IntWeight`.
        in_features: weights of a row.
        has_zeros: whether a zero point is not 0.
        zeros_fit: whether all zero points are numbers of four bits, or of as many as quants have if these are eight.
        steps_fit: whether all quants less their zero points are numbers of eight bits.

    Raises:
        NoCounterpart: there is no such format.
    """

    def groups_fit(format: Format) -> bool:
        return group >= in_features or group % format.group == 0

    if bits <= 4:
        fits = {"int4": zeros_fit, "int4_g32": not has_zeros, "int4_g32_zeros": zeros_fit}
    else:
        fits = {"int8": bits == 8 and steps_fit, "int8_g32_zeros": bits == 8 and zeros_fit}
    found = next((name for name, fits_so in fits.items() if fits_so and groups_fit(FORMATS[name])), None)
    if found is None:
        raise NoCounterpart("quantized_format")
    return FORMATS[found]


def affine_format(kind: str, group: int, in_features: int) -> Format:
    """Return the format of an :class:`AffineWeight`.

    Raises:
        NoCounterpart: no kernels read it, or groups are no whole ones of ours.
    """
    format = next(each for each in FORMATS.values() if each.scale_dtype == kind and each.bits == 4)
    if not format.has_kernels:
        raise NoCounterpart("quantized_format")
    if group < in_features and group % format.group:
        raise NoCounterpart("quantized_format")
    return format


def counterpart(weight: IntWeight | TableWeight | AffineWeight) -> Format:
    """Return the format that holds a weight's quants exactly.

    Raises:
        NoCounterpart: there is no such format.
    """
    if isinstance(weight, AffineWeight):
        return affine_format(weight.kind, weight.group, weight.quants.shape[1])
    if isinstance(weight, TableWeight):
        found = next((format for format in FORMATS.values() if format.table == weight.table), None)
        if found is None:
            raise NoCounterpart("quantized_format")
        check_blocks(weight.block, weight.quants.shape[1], found)
        return found
    steps_fit, most = weight.bits == 8, 8 if weight.bits <= 4 else 128
    if steps_fit:
        steps = weight.quants - _of_columns(weight.zeros, weight)
        steps_fit = -128 <= int(steps.min()) and int(steps.max()) <= 127  # -128 too, which only our quantizer avoids
    return format_for(
        weight.bits,
        weight.group,
        weight.quants.shape[1],
        bool(weight.zeros.any()),
        -most <= int(weight.zeros.min()) and int(weight.zeros.max()) < most,
        steps_fit,
    )


def _of_columns(values: torch.Tensor, weight: IntWeight) -> torch.Tensor:
    """Expand [rows, groups] to [rows, in_features]."""
    return values.repeat_interleave(weight.group, dim=1)[:, : weight.quants.shape[1]]


def _of_groups(values: torch.Tensor, weight: IntWeight, format: Format) -> torch.Tensor:
    """Convert [rows, groups of the weight] to [rows, groups of the format]."""
    starts = torch.arange(format.groups(weight.quants.shape[1]), device=values.device) * format.group
    return values[:, (starts // weight.group).clamp(max=values.shape[1] - 1)]


def check_blocks(block: int, in_features: int, format: Format) -> None:
    """Raise if blocks of a checkpoint, where rows follow each other, are no whole groups or go on in the next row.

    Where they go on, bitsandbytes' kernels disagree: those of a CPU with AVX-512 begin each row with a block, and its
    quantizer does not.

    Raises:
        NoCounterpart: with the reason code.
    """
    if block % format.group or in_features % block:
        raise NoCounterpart("quantized_blocks")


def _packed_table(weight: TableWeight, format: Format) -> Parts:
    rows, columns = weight.quants.shape
    scales = weight.scales.view(rows, -1).repeat_interleave(weight.block // format.group, dim=1)
    quants = functional.pad(weight.quants, (0, padded(columns) - columns), value=format.empty_quant)
    scales = functional.pad(scales, (0, format.groups(columns) - scales.shape[1]), value=float(format.scale_bytes == 1))
    return pack(format, quants), scale_bits(format, scales), None


def _counterparts(weights: list[QuantizedWeight]) -> list[Format]:
    """Return the format of each weight, of bytes one that holds the scales of all of them.

    Raises:
        NoCounterpart: there is none.
    """
    of_bytes = [each for each in weights if isinstance(each, ByteWeight)]
    if not of_bytes:
        return [counterpart(each) for each in weights if not isinstance(each, ByteWeight)]
    if len(of_bytes) < len(weights) or len({each.values.dtype for each in of_bytes}) > 1:
        return [format for each in weights for format in _counterparts([each])]
    if of_bytes[0].values.dtype == torch.int8:
        return [FORMATS["int8_row"]] * len(weights)
    multiplier = _multiplier(weights, is_held=False)
    is_held = all(each.scales.shape[1] == 1 and _are_halves(each.scales / multiplier) for each in of_bytes)
    return [FORMATS["fp8" if is_held else "fp8_g128"]] * len(weights)


def _are_halves(values: torch.Tensor) -> bool:
    return torch.equal(values.half().float(), values)


def _packed_bytes(weight: ByteWeight, format: Format, multiplier: float) -> Parts:
    rows, columns = weight.quants.shape
    if weight.values.dtype == torch.float8_e4m3fn and bool(((weight.quants & 0x7F) == 0x7F).any()):
        raise NoCounterpart("quantized_fp8")  # NaN, for which kernels have no room
    quants = functional.pad(weight.quants, (0, padded(columns) - columns), value=format.empty_quant)
    scales = weight.scales.float() / multiplier
    scales = scales.expand(rows, format.groups(columns)) if weight.scales.shape[1] == 1 else scales
    return pack(format, quants), scales.to(scale_dtype(format)).contiguous(), None


def _packed_affine(weight: AffineWeight, format: Format, multiplier: float) -> Parts:
    """Repack a weight whose scales and other numbers are float16, but for the multiplier.

    Raises:
        NoCounterpart: one of them is not.
    """
    columns = weight.quants.shape[1]
    others = weight.others.double() / (1.0 if weight.kind == "float_zeros" else multiplier)
    pairs = torch.stack((weight.scales.double() / multiplier, others), -1)
    if not torch.equal(pairs.half().double(), pairs):
        raise NoCounterpart("quantized_float32")
    starts = torch.arange(format.groups(columns), device=pairs.device) * format.group // weight.group
    pairs = pairs[:, starts.clamp(max=pairs.shape[1] - 1)].half()
    quants = functional.pad(weight.quants, (0, padded(columns) - columns), value=format.empty_quant)
    return pack(format, quants), records_of(format, pairs[:, :0], pairs), None


def _packed(weight: QuantizedWeight, format: Format, multiplier: float) -> Parts:
    if isinstance(weight, AffineWeight):
        return _packed_affine(weight, format, multiplier)
    if isinstance(weight, TableWeight):
        return _packed_table(weight, format)
    if isinstance(weight, ByteWeight):
        return _packed_bytes(weight, format, multiplier)
    zeros = _of_groups(weight.zeros, weight, format)
    if format.bits == 8 and not format.has_zeros:
        quants, rest = weight.quants - _of_columns(weight.zeros, weight), 0
    else:
        half = 1 << (format.bits - 1)
        zeros, quants, rest = zeros + half, weight.quants.view(torch.uint8) + half, int(format.zero)
    width = padded(weight.quants.shape[1])
    padding = (0, width - quants.shape[1])
    if format.has_zeros:  # padding has the zero point of its group
        whole = zeros.to(torch.uint8).repeat_interleave(format.group, dim=1)
        whole[:, : quants.shape[1]] = quants
        quants = whole
    else:
        quants = functional.pad(quants, padding, value=rest)
    scales = (_of_groups(weight.scales, weight, format).double() / multiplier).half()
    as_bytes = (quants.to(torch.int8) if quants.dtype == torch.int16 else quants).view(torch.uint8)
    of_groups = zeros.to(torch.uint8).contiguous() if format.has_zeros else None
    return pack(format, as_bytes), scales.contiguous(), of_groups


def _multiplier(weights: list[QuantizedWeight], is_held: bool) -> float:
    """Return the multiplier that brings scales which are not float16 into its range.

    Args:
        is_held: whether a format has scales of float32's range or the weights' are float16, which need none.

    Raises:
        NoCounterpart: a scale is not finite.
    """
    largest = max(float(weight.scales.abs().max()) for weight in weights)
    if not math.isfinite(largest):
        raise NoCounterpart("quantized_format")
    return 1.0 if is_held or not largest else 2.0 ** (math.frexp(largest)[1] - _LARGEST_SCALE)


def _shared_orders(weights: list[QuantizedWeight]) -> list[torch.Tensor | None]:
    """Return each weight's order of inputs as int32; those that are alike are one tensor."""
    made: list[torch.Tensor] = []

    def shared(order: torch.Tensor | None) -> torch.Tensor | None:
        if order is None:
            return None
        found = next((each for each in made if torch.equal(each, order)), None)
        if found is None:
            made.append(found := order.to(torch.int32))
        return found

    return [shared(each.order if isinstance(each, IntWeight | BlockWeight) else None) for each in weights]


def repacked(weights: list[QuantizedWeight]) -> list[AnyPackedWeight]:
    """Repack weights of the same input.

    Returns:
        Weights that lie behind each other in memory if one format holds all of them, and that share one order of inputs
        if theirs are alike.

    Raises:
        NoCounterpart: no format holds one of the weights.
    """
    orders = _shared_orders(weights)
    made: list[AnyPackedWeight] = []
    for weight, order, given in zip(_repacked(weights), orders, weights):
        rounding = given.rounding if isinstance(given, ByteWeight) else None
        if rounding is not None:
            made.append(RoundedInputWeight(weight, rounding))
        else:
            made.append(weight if order is None else ReorderedWeight(weight, order))
    return made


def _repacked(weights: list[QuantizedWeight]) -> list[PackedWeight]:
    """Repack weights in the order in which their inputs are.

    Raises:
        NoCounterpart: no format holds one of the weights.
    """
    of_blocks = [each for each in weights if isinstance(each, BlockWeight)]
    if of_blocks:
        return _repacked_blocks(of_blocks)
    formats = _counterparts(weights)
    if len(set(formats)) > 1:
        return [each for weight in weights for each in _repacked([weight])]
    format, in_features = formats[0], weights[0].quants.shape[1]
    are_half = format.scale_dtype == "float16" and all(each.scales.dtype == torch.float16 for each in weights)
    takes_any = format.scale_dtype != "float16" and format.record is None
    multiplier = _multiplier(weights, are_half or takes_any)
    rows = [len(weight.quants) for weight in weights]
    pieces = (piece for weight in weights for piece in _pieces(weight))
    parts = _one_behind_another(sum(rows), (_packed(piece, format, multiplier) for piece in pieces))
    return PackedWeight(format, in_features, *parts, multiplier).split(rows)


def _one_behind_another(rows: int, pieces: Iterable[Parts]) -> Parts:
    """Put pieces of a weight of so many rows into one piece of memory."""
    made: list[torch.Tensor | None] = []
    begin = end = 0
    for piece in pieces:
        made = made or [None if each is None else each.new_empty(rows, *each.shape[1:]) for each in piece]
        begin, end = end, end + len(piece[0])
        for whole, part in zip(made, piece):
            if whole is not None:
                whole[begin:end] = part
    quants, scales, zeros = made
    assert quants is not None and scales is not None, "a weight has rows"
    return quants, scales, zeros


def _pieces(weight: QuantizedWeight) -> Iterator[QuantizedWeight]:
    """Yield a weight in pieces of some rows, so that what is made on the way takes little memory."""
    rows, columns = weight.quants.shape
    count = max(1, _PIECE // columns)
    by_row = {name: getattr(weight, name) for name in ("scales", "zeros", "others") if hasattr(weight, name)}
    quants = "values" if isinstance(weight, ByteWeight) else "quants"
    by_row[quants] = getattr(weight, quants)
    for begin in range(0, rows, count):
        cut = {name: each.reshape(rows, -1)[begin : begin + count] for name, each in by_row.items()}
        yield replace(weight, **cut)


def _repacked_blocks(weights: list[BlockWeight]) -> list[PackedWeight]:
    """Repack blocks; those of one format lie behind each other in memory."""
    names = dict.fromkeys(each.kind.format for each in weights)
    done = {
        name: iter(packed_blocks([(each.kind, each.blocks) for each in weights if each.kind.format == name]))
        for name in names
    }
    return [next(done[each.kind.format]) for each in weights]
