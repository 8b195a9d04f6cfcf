"""Formats of quantized weights: the one description that the quantizer, the kernels, the tests and the docs read.

The build writes ``csrc/weights/formats.generated.h`` and the files that instantiate kernels from this module
(``native/generated.py``), so that the module imports no torch.

A row of a weight is cut into groups. The weights of a group share one scale, and a zero point if the format has zero
points: ``weight = multiplier * scale * (quant - zero)``, or ``multiplier * scale * table[quant]``. Quants, scales and
zeros are separate tensors, so that a kernel reads each of them as one unbroken stream:

* quants, uint8 [rows, blocks * BLOCK * bits / 8]: rows are padded to whole blocks of 128 weights. A block consists of
  32-bit little-endian words of four or eight neighboring weights each, the first weight in the lowest bits. A block has
  four sub-blocks of 32 weights, whose words take turns: word ``4 w + s`` is the ``w``-th word of sub-block ``s``. So 16
  bytes hold one word of each sub-block, and a lane that reads every fourth word reads one sub-block.
* scales, float16 or float32, or of tables a byte that is a power of two (e8m0), [rows, groups], and zeros, uint8 [rows,
  groups]; the padding of a block is quants of value zero. Or scales are records, uint8 [rows, blocks * bytes of a
  record], where groups have a minimum, ``weight = multiplier * (scale * quant + minimum)``, or where a block has a
  factor for the scales of its groups: :class:`Record` has how they lie. Padding may then have any value.
* multiplier, a power of two for the whole matrix: it keeps the scales in float16's normal range.

What a row of :data:`FORMATS` says is all that Python, the portable kernels and the docs know of a format. Kernels for
vector instructions and GPUs read some formats as they lie (``has_kernels``); weights of others are read one by one on a
CPU, and are dequantized in front of a product on a GPU.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

#: weights that are ordered together; rows are padded to whole blocks
BLOCK = 128
#: sub-blocks of a block, whose words take turns
SUB_BLOCKS = 4
#: steps that 1 may be in a table: with 14 bits of x, sums over the 16 products of an int32 stay below 2^31
MOST_STEPS = 1 << 13


#: type of scales -> bytes of a scale; ``scale_value()`` of ``csrc/weights/packed_values.h`` reads them
SCALE_BYTES = {"float16": 2, "float32": 4, "e8m0": 1}
#: groups that a block is cut into evenly; 0: a whole row
_GROUPS = (0, BLOCK // SUB_BLOCKS, 2 * BLOCK // SUB_BLOCKS, BLOCK)


@dataclass(frozen=True)
class Record:
    """What a block has instead of scales, one record behind the other: ``PackedScales`` of ``formats.generated.h``.

    Attributes:
        group: number of weights that share a scale.
        nbytes: bytes of a record, whole words of 32 bits.
        has_minimums: whether groups have a minimum.
    """

    group: int
    nbytes: int
    has_minimums: bool


#: type of scales -> their record. llama.cpp's blocks hold the same numbers in another order; those of its blocks of 256
#: weights are here twice, once for each 128:
#:   minimums: scale and minimum of each group, float16
#:   float_zeros: scale and zero point of each group, float16: minimum = -scale * zero point, exact in float32
#:   middles: scale of each group and what the quant 8 stands for, float16: minimum = middle - 8 * scale
#:   k_minimums: float16 d and dmin; a byte for each group, then another: scale = d * byte, minimum = -dmin * byte
#:   k_scales: float16 d, two bytes of zero; a signed byte for each group, those of even numbers first: scale = d * byte
RECORDS = {
    "minimums": Record(BLOCK // SUB_BLOCKS, 4 * SUB_BLOCKS, True),
    "float_zeros": Record(BLOCK // SUB_BLOCKS, 4 * SUB_BLOCKS, True),
    "middles": Record(BLOCK // SUB_BLOCKS, 4 * SUB_BLOCKS, True),
    "k_minimums": Record(BLOCK // SUB_BLOCKS, 4 + 2 * SUB_BLOCKS, True),
    "k_scales": Record(BLOCK // SUB_BLOCKS // 2, 4 + 2 * SUB_BLOCKS, False),
}


class QuantValues(enum.Enum):
    """What quants are: ``quant_value()`` of ``csrc/weights/packed_values.h`` has the same, ``_KINDS`` for Python."""

    #: of 8 bits signed; from 0 up if they are of 4 bits, or groups have zero points of their own
    INTEGERS = "integers"
    #: float8_e4m3fn
    FLOATS = "floats"
    #: places in a table of 16 values
    TABLE = "table"


class ZeroPoints(enum.Enum):
    """Which quant is the weight 0: ``PackedZeros`` of ``csrc/weights/packed_format.h``."""

    #: the quant 0
    NONE = "none"
    #: the same quant in all groups
    FIXED = "fixed"
    #: a quant that each group has for itself
    OF_GROUP = "of_group"


#: values of NormalFloat4, each a float32: QLoRA (arXiv 2305.14314), appendix E
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
#: values of bitsandbytes' FP4, a sign and twelfths: ``bitsandbytes.functional.get_4bit_type``
_FP4 = tuple(struct.unpack("f", struct.pack("f", each / 12))[0] for each in (0, 0.0625, 8, 12, 4, 6, 2, 3))
FP4 = (*_FP4, *(0.0 - each for each in _FP4))
#: values of float4_e2m1fn: OCP Microscaling Formats (MX) 1.0, 5.3.3
E2M1 = tuple(sign * each for sign in (1.0, -1.0) for each in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


@dataclass(frozen=True)
class Format:
    """How weights of few bits are stored.

    Attributes:
        name: the name that ``patch(weights=)`` takes.
        bits: bits of a quant, 4 or 8.
        group: number of weights that share a scale; 0 for a whole row.
        lowest, highest: range of a quant, less its zero if that is fixed; of floats and tables the largest magnitude.
        values: what quants are.
        zeros: which quant is the weight 0.
        zero: that quant, if it is fixed.
        direction: what neighbors in a group are: "inputs" of an output.
        scale_dtype: type of a scale: "float16"; "float32" where values are a table, or a package's scales have no fewer
            bits; of a table "e8m0", a byte whose scale is ``2 ** (byte - 127)``; or a name out of :data:`RECORDS`.
        table: the values, each a float32; empty if values are none.
        steps: of a table: 1 is so many steps. Kernels that multiply integers round values to whole steps.
        order: how quants lie: "sub-blocks", see the module's docstring.
        has_kernels: whether kernels for vector instructions and GPUs read such weights; else the portable kernel does
            on a CPU, and on a GPU weights are dequantized in front of each product. That is right and slow.
        gpu_products: whether kernels of products on a GPU read such weights; else they are dequantized in front of a
            product. True goes with ``has_kernels``.
        gpu_experts: the same of kernels of experts on a GPU.

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
    table: tuple[float, ...] = ()
    steps: int = 0
    order: str = "sub-blocks"
    has_kernels: bool = True
    gpu_products: bool = True
    gpu_experts: bool = True

    def __post_init__(self) -> None:
        rules = self._rules_of_kernels() if self.has_kernels else self._rules_of_all()
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise ValueError(f"hf_fastpath: format {self.name!r}: {'; '.join(broken)}: write kernels for it first")

    def _rules_of_all(self) -> dict[str, bool]:
        """Return what holds for any format: rule that a fault breaks -> whether it holds."""
        groups, is_nibble, is_table = _GROUPS, self.bits == 4, self.is_table
        if self.record is not None:
            groups = (self.record.group,)
        return {
            f"bits is {self.bits}, expected 4 or 8": self.bits in (4, 8),
            f"group is {self.group}, expected {' or '.join(map(str, groups))} weights": self.group in groups,
            f"the table has {len(self.table)} values, expected {16 * is_table}": len(self.table) == 16 * is_table,
            "a table is of four bits": is_nibble or not is_table,
            "float8_e4m3fn is of eight bits": not is_nibble or not self.is_float,
            "zero points are of integers": self.zeros is ZeroPoints.NONE or self.values is QuantValues.INTEGERS,
            "a zero of all groups is of four bits": is_nibble or self.zeros is not ZeroPoints.FIXED,
            "values of a table are float32, one of them 0": not is_table or _is_table(self.table),
            f"zero is {self.zero} and not fixed": self.zero == 0 or self.zeros is ZeroPoints.FIXED,
            f"direction is {self.direction}, expected inputs": self.direction == "inputs",
            f"scale_dtype is {self.scale_dtype}, expected {' or '.join((*SCALE_BYTES, *RECORDS))}": self.scale_dtype
            in (*SCALE_BYTES, *RECORDS),
            "quants of records are whole numbers from their own range": self.record is None
            or (self.values, self.zeros) == (QuantValues.INTEGERS, ZeroPoints.NONE),
            f"order is {self.order}, expected sub-blocks": self.order == "sub-blocks",
        }

    def _rules_of_kernels(self) -> dict[str, bool]:
        """Return what kernels take for granted; ``Traits`` of ``packed_format.h`` says which ones they are."""
        is_table, has_powers = self.values is QuantValues.TABLE, self.scale_dtype == "e8m0"
        groups = (2 * BLOCK // SUB_BLOCKS,) if is_table else (0, BLOCK // SUB_BLOCKS, BLOCK)
        of_floats, most = self.is_float and self.group == BLOCK, MOST_STEPS / max(self.steps, 1)
        scales = ("float16", "float32") if self.group == 0 else ("float32",) if is_table or of_floats else ("float16",)
        if is_table and has_powers and not self.gpu_products:
            groups, scales = (BLOCK // SUB_BLOCKS,), ("e8m0",)
        if self.record is not None:
            groups, scales = (self.record.group,), tuple(RECORDS)
        return {
            f"bits is {self.bits}, expected 4 or 8": self.bits in (4, 8),
            f"group is {self.group}, expected {' or '.join(map(str, groups))} weights": self.group in groups,
            f"the table has {len(self.table)} values, expected {16 * is_table}": len(self.table) == 16 * is_table,
            f"steps is {self.steps}, expected up to {MOST_STEPS} of a table": 0 <= self.steps <= MOST_STEPS * is_table,
            f"values of a table are up to {MOST_STEPS} steps": not is_table
            or max(map(abs, self.table), default=0) <= most,
            "a table is of four bits, without zeros": not is_table or (self.bits, self.zeros) == (4, ZeroPoints.NONE),
            "values of a table are float32, one of them 0": not is_table or _is_table(self.table),
            f"zero is {self.zero} and not fixed": self.zero == 0 or self.zeros is ZeroPoints.FIXED,
            "bytes with zeros of groups have groups of 32 weights": self.bits == 4
            or not self.has_zeros
            or self.group == 32,
            f"direction is {self.direction}, expected inputs": self.direction == "inputs",
            f"scale_dtype is {self.scale_dtype}, expected {' or '.join(scales)}": self.scale_dtype in scales,
            f"order is {self.order}, expected sub-blocks": self.order == "sub-blocks",
            "kernels of a GPU read no records": self.record is None or not (self.gpu_products or self.gpu_experts),
            "bytes have no such records": self.scale_dtype != "minimums" or self.bits == 4,
            "four bits have no such records": self.scale_dtype != "k_scales" or self.bits == 8,
            "quants of records are whole numbers from their own range": self.record is None
            or (self.values, self.zeros) == (QuantValues.INTEGERS, ZeroPoints.NONE),
        }

    @property
    def number(self) -> int:
        """The number that ops have for the format: ``choices.PackedFormat`` names them."""
        return list(FORMATS).index(self.name)

    @property
    def codebook(self) -> tuple[float, ...]:
        """The value of each quant in units of the scale, without its group's zero point; some may be NaN."""
        return _KINDS[self.values].codebook(self)

    @property
    def kind(self) -> str:
        """What quants are, in words."""
        return _KINDS[self.values].words(self)

    @property
    def finite_bytes(self) -> int:
        """Bytes below this number hold quants whose values are finite."""
        return next((byte for byte, value in enumerate(self.codebook) if not math.isfinite(value)), 256)

    @property
    def is_float(self) -> bool:
        """Whether quants are float8_e4m3fn instead of integers."""
        return self.values is QuantValues.FLOATS

    @property
    def is_table(self) -> bool:
        """Whether quants are places in :attr:`table`."""
        return self.values is QuantValues.TABLE

    @property
    def has_gpu_products(self) -> bool:
        """Whether kernels of products on a GPU read such weights."""
        return self.has_kernels and self.gpu_products

    @property
    def has_gpu_experts(self) -> bool:
        """Whether kernels of experts on a GPU read such weights."""
        return self.has_kernels and self.gpu_experts

    @property
    def record(self) -> Record | None:
        """What blocks have instead of scales, or None."""
        return RECORDS.get(self.scale_dtype)

    @property
    def has_minimums(self) -> bool:
        """Whether a minimum is added to the weights of a group."""
        return self.record is not None and self.record.has_minimums

    @property
    def scale_bytes(self) -> int:
        """Bytes of an element of the tensor that holds scales."""
        return 1 if self.record is not None else SCALE_BYTES[self.scale_dtype]

    @property
    def empty_quant(self) -> int:
        """The quant of padding, whose weight is 0; where groups have zeros, it is theirs."""
        return 0 if self.has_zeros or self.has_minimums else self.codebook.index(0.0)

    @property
    def has_zeros(self) -> bool:
        """Whether groups have zero points of their own; else :attr:`zero` holds for all groups."""
        return self.zeros is ZeroPoints.OF_GROUP

    def groups(self, in_features: int) -> int:
        """Return the number of groups of a row."""
        return 1 if self.group == 0 else padded(in_features) // self.group

    def scale_columns(self, in_features: int) -> int:
        """Return the number of elements that the tensor of scales has for a row."""
        return self.groups(in_features) if self.record is None else padded(in_features) // BLOCK * self.record.nbytes

    def nbytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of a matrix that a product reads."""
        groups = self.scale_columns(in_features) * self.scale_bytes + self.groups(in_features) * self.has_zeros
        return out_features * (padded(in_features) * self.bits // 8 + groups)


def _is_table(values: tuple[float, ...]) -> bool:
    """Whether kernels can look up these values."""
    are_floats = all(struct.unpack("f", struct.pack("f", each))[0] == each for each in values)
    return are_floats and 0.0 in values


def _integers(format: Format) -> tuple[float, ...]:
    if format.bits == 4 or format.has_zeros:
        return tuple(float(quant - format.zero) for quant in range(1 << format.bits))
    return tuple(float((quant ^ 128) - 128) for quant in range(256))


def _e4m3(quant: int) -> float:
    """Return the value of a float8_e4m3fn: sign, exponent of four bits with bias 7, three bits behind the point."""
    exponent, places = quant >> 3 & 15, quant & 7
    if quant & 127 == 127:
        return math.nan
    return math.copysign(math.ldexp(places + 8 * (exponent > 0), max(exponent, 1) - 10), -1.0 if quant & 128 else 1.0)


def _range(format: Format) -> str:
    more = ", a zero point for each scale" * format.has_zeros + ", a minimum for each scale" * format.has_minimums
    return f"{format.lowest} to {format.highest}{more}"


class _Kind(NamedTuple):
    """What Python knows of quants."""

    codebook: Callable[[Format], tuple[float, ...]]
    words: Callable[[Format], str]


_KINDS = {
    QuantValues.INTEGERS: _Kind(_integers, _range),
    QuantValues.FLOATS: _Kind(lambda format: tuple(map(_e4m3, range(256))), lambda format: "float8_e4m3fn"),
    QuantValues.TABLE: _Kind(lambda format: format.table, lambda format: "places in a table of 16 values"),
}


def padded(in_features: int) -> int:
    """Return the number of weights of a row with its padding."""
    return -(-in_features // BLOCK) * BLOCK


def _of_records(name: str, bits: int, group: int, lowest: int, highest: int, records: str) -> Format:
    """Return a format that kernels of a CPU read."""
    return Format(name, bits, group, lowest, highest, scale_dtype=records, gpu_products=False, gpu_experts=False)


#: every format, by name; the place of one is its number for ops, so that new ones come behind all others
FORMATS = {
    format.name: format
    for format in (
        Format("int8", 8, 128, -127, 127),
        Format("fp8", 8, 0, -448, 448, values=QuantValues.FLOATS),
        Format("int4", 4, 128, 0, 15, zeros=ZeroPoints.OF_GROUP),
        Format("int4_g32", 4, 32, -8, 7, zeros=ZeroPoints.FIXED, zero=8),
        # of all steps, values are nearest to whole ones and to float16: docs/lab/packed_gemv_cpu.md
        Format("nf4", 4, 64, -1, 1, QuantValues.TABLE, scale_dtype="float32", table=NF4, steps=6872),
        Format("fp4", 4, 64, -1, 1, QuantValues.TABLE, scale_dtype="float32", table=FP4, steps=192 * 32),
        Format("int4_g32_zeros", 4, 32, 0, 15, zeros=ZeroPoints.OF_GROUP),
        Format("int8_g32_zeros", 8, 32, 0, 255, zeros=ZeroPoints.OF_GROUP),
        Format("fp8_g128", 8, 128, -448, 448, values=QuantValues.FLOATS, scale_dtype="float32"),
        Format("int8_row", 8, 0, -127, 127, scale_dtype="float32"),
        Format("mxfp4", 4, 32, -6, 6, QuantValues.TABLE, scale_dtype="e8m0", table=E2M1, steps=2, gpu_products=False),
        # those of llama.cpp's files: Q8_0, Q4_1, Q4_K, Q5_K and Q6_K, the last two with bytes for 5 and 6 bits
        Format("int8_g32", 8, 32, -127, 127),
        _of_records("int4_g32_min", 4, 32, 0, 15, "minimums"),
        _of_records("int4_g32_k", 4, 32, 0, 15, "k_minimums"),
        _of_records("int8_g32_k", 8, 32, 0, 31, "k_minimums"),
        _of_records("int8_g16_k", 8, 16, -32, 31, "k_scales"),
        # those of HQQ, and of PyTorch's own product of four bits
        _of_records("int4_g32_float_zeros", 4, 32, 0, 15, "float_zeros"),
        _of_records("int4_g32_middles", 4, 32, 0, 15, "middles"),
    )
}
