"""How weights of a checkpoint are quantized, as its config says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..quantization.formats import FORMATS, Format, InputRounding
from .counterparts import affine_format, check_blocks, format_for


@dataclass(frozen=True)
class Scheme:
    """Weights of integers with a scale for each group.

    Attributes:
        bits: bits of a quant.
        group: number of weights in a row that share a scale; -1 for a whole row.
        has_zeros: whether groups have zero points.
        covers: whether a linear layer of this name and class name is quantized so.
    """

    bits: int
    group: int
    has_zeros: bool
    covers: Callable[[str, str], bool]

    def format(self, in_features: int) -> Format:
        """Return the format that holds such a weight.

        Raises:
            NoCounterpart: there is none.
        """
        group = in_features if self.group == -1 else self.group
        return format_for(self.bits, group, in_features, self.has_zeros, True, not self.has_zeros)


@dataclass(frozen=True)
class TableScheme:
    """Weights whose quants are places in a table, with a scale for each block, where rows follow each other.

    Attributes:
        name: name of the format with this table.
        block: number of weights that share a scale.
        covers: as of :class:`Scheme`.
    """

    name: str
    block: int
    covers: Callable[[str, str], bool]

    def format(self, in_features: int) -> Format:
        """Return the format that holds such a weight.

        Raises:
            NoCounterpart: there is none.
        """
        format = FORMATS[self.name]
        check_blocks(self.block, in_features, format)
        return format


@dataclass(frozen=True)
class ByteScheme:
    """Weights of bytes with scales of rows or of blocks.

    Attributes:
        name: name of the format that holds them.
        rounding: how the package's products round their input, or None.
        covers: as of :class:`Scheme`.
    """

    name: str
    rounding: InputRounding | None
    covers: Callable[[str, str], bool]

    def format(self, in_features: int) -> Format:
        """Return the format that holds such a weight."""
        return FORMATS[self.name]


@dataclass(frozen=True)
class AffineScheme:
    """Weights whose groups have a scale and another float.

    Attributes:
        kind, group: as of :class:`..linears.checkpoint_weights.AffineWeight`.
        covers: as of :class:`Scheme`.
    """

    kind: str
    group: int
    covers: Callable[[str, str], bool]

    def format(self, in_features: int) -> Format:
        """Return the format that holds such a weight.

        Raises:
            NoCounterpart: there is none.
        """
        return affine_format(self.kind, self.group, in_features)


AnyScheme = Scheme | TableScheme | ByteScheme | AffineScheme
