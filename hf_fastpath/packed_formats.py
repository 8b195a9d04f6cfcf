"""Formats of quantized weights: the one description that the quantizer, the kernels, the tests and the docs read.

The build writes ``csrc/weights/formats.generated.h`` and the files that instantiate kernels from this module
(``native/generated.py``), so that the module imports no torch.

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

import enum
from dataclasses import dataclass

from .choices import PackedFormat

#: weights that are ordered together; rows are padded to whole blocks
BLOCK = 128
#: stretches of a block, whose words take turns
STRETCHES = 4


class QuantValues(enum.Enum):
    """What quants are: ``PackedValues`` of ``csrc/weights/packed_format.h``."""

    #: of 8 bits signed, of 4 bits from 0 to 15
    INTEGERS = "integers"
    #: float8_e4m3fn
    FLOATS = "floats"
    #: places in a table of values
    TABLE = "table"


class ZeroPoints(enum.Enum):
    """Which quant is the weight 0: ``PackedZeros`` of ``csrc/weights/packed_format.h``."""

    #: the quant 0
    NONE = "none"
    #: the same quant in all groups
    FIXED = "fixed"
    #: a quant that each group has for itself
    OF_GROUP = "of_group"


@dataclass(frozen=True)
class Format:
    """How weights of few bits are stored.

    Attributes:
        name: the name that ``patch(weights=)`` takes.
        bits: bits of a quant, 4 or 8.
        group: number of weights that share a scale; 0 for a whole row.
        lowest, highest: range of a quant, less its zero if that is fixed; of floats the largest magnitude.
        values: what quants are.
        zeros: which quant is the weight 0.
        zero: that quant, if it is fixed.
        direction: what neighbors in a group are: "inputs" of an output.
        scale_dtype: type of a scale.
        order: how quants lie: "stretches", see the module's docstring.

    Raises:
        ValueError: no kernel knows such a format.
    """

    name: str
    bits: int
    group: int
    lowest: int
    highest: int
    values: QuantValues = QuantValues.INTEGERS
    zeros: ZeroPoints = ZeroPoints.NONE
    zero: int = 0
    direction: str = "inputs"
    scale_dtype: str = "float16"
    order: str = "stretches"

    def __post_init__(self) -> None:
        rules = {
            f"bits is {self.bits}, expected 4 or 8": self.bits in (4, 8),
            f"group is {self.group}, expected 0 or 32 to {BLOCK} weights": self.group in (0, BLOCK // STRETCHES, BLOCK),
            "values are a table, and no kernel reads one": self.values is not QuantValues.TABLE,
            f"zero is {self.zero} and not fixed": self.zero == 0 or self.zeros is ZeroPoints.FIXED,
            f"direction is {self.direction}, expected inputs": self.direction == "inputs",
            f"scale_dtype is {self.scale_dtype}, expected float16": self.scale_dtype == "float16",
            f"order is {self.order}, expected stretches": self.order == "stretches",
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise ValueError(f"hf_fastpath: format {self.name!r}: {'; '.join(broken)}: write kernels for it first")

    @property
    def packed_format(self) -> PackedFormat:
        """The name that ops have for the format."""
        return PackedFormat[self.name.upper()]

    @property
    def is_float(self) -> bool:
        """Whether quants are float8_e4m3fn instead of integers."""
        return self.values is QuantValues.FLOATS

    @property
    def has_zeros(self) -> bool:
        """Whether groups have zero points of their own; else :attr:`zero` holds for all groups."""
        return self.zeros is ZeroPoints.OF_GROUP

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


#: every format, by name
FORMATS = {
    format.name: format
    for format in (
        Format("int8", 8, 128, -127, 127),
        Format("fp8", 8, 0, -448, 448, values=QuantValues.FLOATS),
        Format("int4", 4, 128, 0, 15, zeros=ZeroPoints.OF_GROUP),
        Format("int4_g32", 4, 32, -8, 7, zeros=ZeroPoints.FIXED, zero=8),
    )
}
