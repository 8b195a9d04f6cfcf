"""Blocks of GGUF files as quantized weights, and back: the same bits in the order of our kernels.

A row of a file's matrix consists of blocks, each with its scales and quants. Source: ggml-common.h of llama.cpp, and
the ``quants`` module of the package ``gguf``, whose ``dequantize()`` gives the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from ..packed_formats import BLOCK, FORMATS, Format, padded
from .formats import PackedWeight, pack, records_of, scale_dtype, unpack

#: the values of IQ4_NL's quants
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Parts:
    """What blocks hold.

    Attributes:
        quants: uint8 [rows, blocks, weights of a block]; signed ones as bytes in two's complement.
        of_block: float16 [rows, blocks, factors]: scale, or scale and minimum.
        of_groups: uint8 [rows, scales or scales and minimums, blocks, groups of a block], or None.
    """

    quants: torch.Tensor
    of_block: torch.Tensor
    of_groups: torch.Tensor | None = None


@dataclass(frozen=True)
class BlockType:
    """A type of blocks.

    Attributes:
        name: the name that llama.cpp has for it.
        number: its number in files.
        weights, nbytes: of a block.
        format: name of the format that holds its values.
        read: makes parts of blocks, uint8 [rows, blocks, nbytes].
        write: does the reverse.
    """

    name: str
    number: int
    weights: int
    nbytes: int
    format: str
    read: Callable[[torch.Tensor], Parts]
    write: Callable[[Parts], torch.Tensor]

    def row_bytes(self, in_features: int) -> int:
        """Return the bytes of a row."""
        return in_features // self.weights * self.nbytes


def _halves(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """Return so many float16 at the beginning of ``blocks``."""
    return blocks[..., : 2 * count].contiguous().view(torch.float16)


def _bytes(halves: torch.Tensor) -> torch.Tensor:
    return halves.contiguous().view(torch.uint8)


def _low_then_high(bytes: torch.Tensor) -> torch.Tensor:
    """Return the low halves of bytes, then the high ones."""
    return torch.cat((bytes & 15, bytes >> 4), -1)


def _joined(quants: torch.Tensor) -> torch.Tensor:
    """Undo :func:`_low_then_high`."""
    low, high = quants.chunk(2, -1)
    return low | high << 4


def _nibbles(factors: int) -> tuple[Callable[[torch.Tensor], Parts], Callable[[Parts], torch.Tensor]]:
    """Return how blocks of four bits are read and written: 16 bytes behind so many float16."""

    def read(blocks: torch.Tensor) -> Parts:
        return Parts(_low_then_high(blocks[..., 2 * factors :]), _halves(blocks, factors))

    def write(parts: Parts) -> torch.Tensor:
        return torch.cat((_bytes(parts.of_block), _joined(parts.quants)), -1)

    return read, write


def _read_iq4_nl(blocks: torch.Tensor) -> Parts:
    values = torch.tensor(_IQ4_NL, dtype=torch.int8, device=blocks.device).view(torch.uint8)
    return Parts(values[_low_then_high(blocks[..., 2:]).int()], _halves(blocks, 1))


def _write_iq4_nl(parts: Parts) -> torch.Tensor:
    places = torch.zeros(256, dtype=torch.uint8, device=parts.quants.device)
    for place, value in enumerate(_IQ4_NL):
        places[value % 256] = place
    return torch.cat((_bytes(parts.of_block), _joined(places[parts.quants.int()])), -1)


def _read_q8_0(blocks: torch.Tensor) -> Parts:
    return Parts(blocks[..., 2:], _halves(blocks, 1))


def _write_q8_0(parts: Parts) -> torch.Tensor:
    return torch.cat((_bytes(parts.of_block), parts.quants), -1)


def _read_k_groups(bytes: torch.Tensor) -> torch.Tensor:
    """Return scales and minimums of six bits each, uint8 [rows, 2, blocks, 8], of 12 bytes a block."""
    first, second, third = bytes.split(4, -1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return torch.stack((scales, minimums), 1)


def _write_k_groups(groups: torch.Tensor) -> torch.Tensor:
    (low, high), (low_minimum, high_minimum) = (each.split(4, -1) for each in groups.unbind(1))
    third = high & 15 | high_minimum << 4
    return torch.cat((low | high >> 4 << 6, low_minimum | high_minimum >> 4 << 6, third), -1)


def _read_q4_k(blocks: torch.Tensor) -> Parts:
    quants = _low_then_high(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2)
    return Parts(quants, _halves(blocks, 2), _read_k_groups(blocks[..., 4:16]))


def _write_q4_k(parts: Parts) -> torch.Tensor:
    assert parts.of_groups is not None
    quants = _joined(parts.quants.unflatten(-1, (4, 64))).flatten(-2)
    return torch.cat((_bytes(parts.of_block), _write_k_groups(parts.of_groups), quants), -1)


def _bits_up(count: int, step: int, like: torch.Tensor) -> torch.Tensor:
    """Return 0, step, 2 * step, ... as [count, 1]."""
    return torch.arange(0, count * step, step, dtype=torch.uint8, device=like.device)[:, None]


def _read_q5_k(blocks: torch.Tensor) -> Parts:
    low = _low_then_high(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    fifth = blocks[..., None, 16:48] >> _bits_up(8, 1, blocks) & 1
    return Parts((low | fifth << 4).flatten(-2), _halves(blocks, 2), _read_k_groups(blocks[..., 4:16]))


def _write_q5_k(parts: Parts) -> torch.Tensor:
    assert parts.of_groups is not None
    by_group = parts.quants.unflatten(-1, (8, 32))
    fifth = (by_group >> 4 << _bits_up(8, 1, by_group)).sum(-2, dtype=torch.uint8)
    quants = _joined((parts.quants & 15).unflatten(-1, (4, 64))).flatten(-2)
    return torch.cat((_bytes(parts.of_block), _write_k_groups(parts.of_groups), fifth, quants), -1)


def _read_q6_k(blocks: torch.Tensor) -> Parts:
    low = _low_then_high(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> _bits_up(4, 2, blocks) & 3
    return Parts((low | high << 4).flatten(-3) - 32, _halves(blocks[..., 208:], 1), blocks[..., 192:208][:, None])


def _write_q6_k(parts: Parts) -> torch.Tensor:
    assert parts.of_groups is not None
    by_half = (parts.quants + 32).unflatten(-1, (2, 4, 32))
    high = (by_half >> 4 << _bits_up(4, 2, by_half)).sum(-2, dtype=torch.uint8)
    low = _joined((by_half & 15).flatten(-2))
    return torch.cat((low.flatten(-2), high.flatten(-2), parts.of_groups[:, 0], _bytes(parts.of_block)), -1)


#: types of blocks by their number in files
BLOCK_TYPES = {
    each.number: each
    for each in (
        BlockType("Q4_0", 2, 32, 18, "int4_g32", *_nibbles(1)),
        BlockType("Q4_1", 3, 32, 20, "int4_g32_min", *_nibbles(2)),
        BlockType("Q8_0", 8, 32, 34, "int8_g32", _read_q8_0, _write_q8_0),
        BlockType("Q4_K", 12, 256, 144, "int4_g32_k", _read_q4_k, _write_q4_k),
        BlockType("Q5_K", 13, 256, 176, "int8_g32_k", _read_q5_k, _write_q5_k),
        BlockType("Q6_K", 14, 256, 210, "int8_g16_k", _read_q6_k, _write_q6_k),
        BlockType("IQ4_NL", 20, 32, 18, "int8_g32", _read_iq4_nl, _write_iq4_nl),
    )
}


#: number of weights worked on at a time: each has a byte, in a few copies
_PIECE = 1 << 19


def packed_blocks(matrices: Sequence[tuple[BlockType, torch.Tensor]]) -> list[PackedWeight]:
    """Return the weights that a file's blocks are.

    Args:
        matrices: type and blocks, uint8 [rows, bytes of a row], of matrices of one input, whose types have one format.

    Returns:
        Weights that lie behind each other in memory.
    """
    kind, first = matrices[0]
    format, columns = FORMATS[kind.format], first.shape[1] // kind.nbytes * kind.weights
    rows = [len(blocks) for _, blocks in matrices]
    widths = padded(columns) * format.bits // 8, format.scale_columns(columns)
    quants = torch.empty(sum(rows), widths[0], dtype=torch.uint8, device=first.device)
    scales = torch.empty(sum(rows), widths[1], dtype=scale_dtype(format), device=first.device)
    made = PackedWeight(format, columns, quants, scales, None, 1.0).split(rows)
    step = max(1, _PIECE // columns)
    for (kind, blocks), weight in zip(matrices, made):
        pieces = (each.split(step) for each in (blocks, weight.quants, weight.scales))
        for some, to_quants, to_scales in zip(*pieces):
            parts = kind.read(some.view(len(some), -1, kind.nbytes))
            whole = functional.pad(
                parts.quants.reshape(len(some), columns), (0, padded(columns) - columns), value=format.empty_quant
            )
            to_quants.copy_(pack(format, whole))
            to_scales.copy_(_scales(format, parts, columns))
    return made


def _scales(format: Format, parts: Parts, columns: int) -> torch.Tensor:
    rows = len(parts.quants)
    if format.record is None:
        scales = parts.of_block[..., 0]
        return functional.pad(scales, (0, format.groups(columns) - scales.shape[1])).contiguous()
    if parts.of_groups is None:
        more = format.groups(columns) - parts.of_block.shape[1]
        pairs = functional.pad(parts.of_block, (0, 0, 0, more))
        return records_of(format, pairs[:, :0], pairs)
    halves = parts.of_block.repeat_interleave(2, 1)  # a block of a file is two of ours
    return records_of(format, halves, parts.of_groups.reshape(rows, parts.of_groups.shape[1], -1))


def blocks_of(kind: BlockType, weight: PackedWeight) -> torch.Tensor:
    """Return the blocks that :func:`packed_blocks` was given, uint8 [rows, bytes of a row]."""
    step = max(1, _PIECE // weight.in_features)
    pieces = zip(weight.quants.split(step), weight.scales.split(step))
    blocks = weight.quants.new_empty(weight.out_features, kind.row_bytes(weight.in_features))
    for to, (quants, scales) in zip(blocks.split(step), pieces):
        to.copy_(_blocks_of(kind, replace(weight, quants=quants, scales=scales)))
    return blocks


def _blocks_of(kind: BlockType, weight: PackedWeight) -> torch.Tensor:
    rows, columns, format = weight.out_features, weight.in_features, weight.format
    count = columns // kind.weights
    quants = unpack(format, weight.quants)[:, :columns].view(rows, count, kind.weights)
    of_groups = None
    if format.record is None:
        of_block = weight.scales[:, :count, None]
    elif format.scale_dtype == "minimums":
        of_block = weight.scales.view(torch.float16).view(rows, -1, 2)[:, :count]
    else:
        records = weight.scales.view(rows, -1, format.record.nbytes)
        of_block = records[:, ::2, :4].contiguous().view(torch.float16)
        bytes = records[..., 4:].unflatten(-1, (2, -1))
        if format.scale_dtype == "k_scales":  # even groups lie in front of odd ones
            of_block, of_groups = of_block[..., :1], bytes.transpose(-1, -2).reshape(rows, 1, count, -1)
        else:
            of_groups = bytes.transpose(1, 2).reshape(rows, 2, count, -1)
    return kind.write(Parts(quants, of_block, of_groups)).reshape(rows, -1)


assert all(each.weights in (BLOCK // 4, 2 * BLOCK) for each in BLOCK_TYPES.values()), "parts of our blocks, or two"
