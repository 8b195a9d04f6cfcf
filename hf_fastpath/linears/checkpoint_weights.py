"""Weights as other packages' layers hold them, each in the same few terms."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..quantization.formats import InputRounding
from ..quantization.ggml_blocks import BlockType


@dataclass(frozen=True)
class IntWeight:
    """A weight of integers: its values are ``scale * (quant - zero)``.

    Attributes:
        bits: bits of a quant.
        group: number of weights in a row that share a scale.
        quants: int8 [out_features, in_features], from ``-2 ** (bits - 1)`` up.
        scales: float [out_features, groups].
        zeros: int16 [out_features, groups], on the same scale as quants.
        order: int64 [in_features], the input that each column of quants is for; None if inputs are in order.
    """

    bits: int
    group: int
    quants: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    order: torch.Tensor | None = None


@dataclass(frozen=True)
class TableWeight:
    """A weight whose quants are places in a table: its values are ``scale * table[quant]`` in float32.

    Attributes:
        table: 16 values, each a float32.
        block: number of weights that share a scale, where rows follow each other.
        quants: uint8 [out_features, in_features], from 0 up.
        scales: float32 [blocks], the last of which may be shorter.
    """

    table: tuple[float, ...]
    block: int
    quants: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class ByteWeight:
    """A weight of bytes with scales in float32: its values are ``scale * value``, computed in float32.

    Attributes:
        values: float8_e4m3fn or int8 [out_features, in_features].
        scales: float32, [out_features, 1], or of float8 [out_features, groups] for groups of 128 neighbors each.
        rounding: how the package's products round their input, or None.
    """

    values: torch.Tensor
    scales: torch.Tensor
    rounding: InputRounding | None = None

    @property
    def quants(self) -> torch.Tensor:
        """The bytes, uint8."""
        return self.values.view(torch.uint8)


@dataclass(frozen=True)
class BlockWeight:
    """A weight as blocks of a GGUF file.

    Attributes:
        kind: the type of the blocks.
        blocks: uint8 [out_features, bytes of a row].
        order: int64 [in_features], the input that each column is for; None if inputs are in order.
    """

    kind: BlockType
    blocks: torch.Tensor
    order: torch.Tensor | None = None


@dataclass(frozen=True)
class AffineWeight:
    """A weight whose groups have a scale and another number, both floats.

    Attributes:
        kind: what the other number is, as ``packed_formats.RECORDS`` has it: "minimums", a weight is ``scale * quant +
            other``; "float_zeros", ``scale * (quant - other)``; "middles", ``scale * (quant - 8) + other``.
        group: number of weights in a row that share them.
        quants: uint8 [out_features, in_features], from 0 to 15.
        scales, others: float [out_features, groups].
    """

    kind: str
    group: int
    quants: torch.Tensor
    scales: torch.Tensor
    others: torch.Tensor


@dataclass(frozen=True)
class DequantizedWeight:
    """A weight that none of our formats holds, dequantized as its package does before its first call.

    Attributes:
        values: float [out_features, in_features].
    """

    values: torch.Tensor


#: a weight that our formats may hold
QuantizedWeight = IntWeight | TableWeight | ByteWeight | BlockWeight | AffineWeight
AnyWeight = QuantizedWeight | DequantizedWeight
