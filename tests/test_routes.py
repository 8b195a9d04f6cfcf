"""Routes of products on the CPU: each ask has one, each row is reached, and all are what predicates chose before."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hf_fastpath.native import loader
from hf_fastpath.native.cpu import CpuRoute
from hf_fastpath.packed_formats import FORMATS

ROWS = 2048
#: numbers of rows that are compared: all up to where choices change, then some
COMPARED = sorted({*range(1, 129), *range(129, ROWS, 61), 511, 512, 513, ROWS})
DTYPES = ("float32", "float16", "bfloat16")
PRODUCTS = ("linear_of_floats", "linear", "gemm", "packed_gemv", "packed_gemm")
WEIGHTS = ("plain", "transposed", *FORMATS)
#: formats of floats
FLOATS = [name for name, format in FORMATS.items() if format.is_float]
BYTES = [name for name, format in FORMATS.items() if format.bits == 8]
#: product -> weights that it is asked of
ASKED = {
    **dict.fromkeys(("linear_of_floats", "linear"), ("plain",)),
    "gemm": ("plain", "transposed"),
    **dict.fromkeys(("packed_gemv", "packed_gemm"), tuple(FORMATS)),
}
#: those that no kernel was written for
PORTABLE = [name for name, format in FORMATS.items() if not format.has_kernels]
#: rows that are asked of
MOST_ROWS = {"packed_gemv": 32}
#: number of a feature's bit, as csrc/common/cpu_features.h has it
BITS = {name: bit for bit, name in enumerate("f16c avx2 avx512 vnni bf16_dot amx_int8 amx_bf16 amx_fp16".split())}
TUNINGS = ("generic", "intel", "zen4")


def feature_sets() -> Iterator[frozenset[str]]:
    """Yield what a CPU may have of the features that choices depend on."""
    yield from (frozenset(), frozenset({"f16c"}), frozenset({"f16c", "avx2"}))
    amx = ((), ("amx_bf16",), ("amx_int8", "amx_bf16"), ("amx_bf16", "amx_fp16"))
    for vnni, dot, tiles in itertools.product(((), ("vnni",)), ((), ("bf16_dot",)), amx):
        yield frozenset({"f16c", "avx2", "avx512", *vnni, *dot, *tiles})


CPUS = [(has, tuning) for has in feature_sets() for tuning in TUNINGS]


@dataclass(frozen=True)
class Table:
    """The rows, and what they choose."""

    rows: list[CpuRoute]
    library: ctypes.CDLL

    def found(
        self, product: str, weight: str, dtype: str, has: frozenset[str], tuning: str, behind: int = -1
    ) -> list[int]:
        """Return the numbers of the rows that 1, 2, ... rows of x find."""
        count = MOST_ROWS.get(product, ROWS)
        numbers = (ctypes.c_int * count)()
        bits = sum(1 << BITS[name] for name in has)
        asked = PRODUCTS.index(product), 1 << WEIGHTS.index(weight), DTYPES.index(dtype), bits, tuning.encode()
        assert self.library.hf_fastpath_find_routes(*asked, behind + 1, count, numbers) == 0
        return list(numbers)


@pytest.fixture(scope="module")
def table() -> Table:
    if not loader.ensure("cpu").native:
        pytest.skip("no library for the CPU")
    return Table(loader.cpu_routes(), ctypes.CDLL(str(Path(loader.status()["cpu"].detail))))


def asks() -> list[tuple[str, str, str]]:
    return [(product, weight, dtype) for product in PRODUCTS for weight in ASKED[product] for dtype in DTYPES]


def test_every_ask_has_a_route_and_every_row_is_reached(table):
    reached = set()
    for ask, (has, tuning) in itertools.product(asks(), CPUS):
        waiting = [-1]
        seen: set[int] = set()
        while waiting:
            numbers = set(table.found(*ask, has, tuning, behind=waiting.pop()))
            assert seen or -1 not in numbers, (ask, has, tuning)
            # a row behind another one is only reached if that one may decline
            waiting += [each for each in numbers - seen - {-1} if may_decline(table.rows[each])]
            seen |= numbers
            reached |= numbers - {-1}
    assert reached == set(range(len(table.rows))), "rows that nothing reaches"


def may_decline(route: CpuRoute) -> bool:
    return route.name in ("amx", "packed_tiles")


def test_what_declines_has_a_route_behind_it(table):
    for ask, (has, tuning) in itertools.product(asks(), CPUS):
        for number in set(table.found(*ask, has, tuning)):
            if may_decline(table.rows[number]):
                first, most = table.rows[number].rows
                behind = table.found(*ask, has, tuning, behind=number)[first - 1 : most]
                assert -1 not in behind, (ask, has, tuning, table.rows[number])


# ---- the predicates before ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Before:
    """What chose before there was a table, function by function."""

    has: frozenset[str]
    tuning: str

    @property
    def avx2(self) -> bool:
        return {"f16c", "avx2"} <= self.has

    @property
    def avx512(self) -> bool:
        return "avx512" in self.has

    @property
    def amx(self) -> bool:
        return "amx_bf16" in self.has

    @property
    def bf16_products(self) -> bool:
        return "bf16_dot" in self.has and self.tuning == "zen4"

    def amx_products(self, dtype: str) -> bool:
        return self.amx and "bf16_dot" in self.has and dtype != "float32"

    def x_layout(self, dtype: str, rows: int) -> str:
        if dtype != "float32" and rows >= 5 and self.amx:
            return "amx"
        return "bf16" if dtype == "bfloat16" and self.bf16_products else "floats"

    def linear(self, dtype: str, rows: int) -> str:
        named = {"amx": "linear_amx", "bf16": "linear_avx512_bf16", "floats": self.linear_of_floats(dtype, rows)}
        return named[self.x_layout(dtype, rows)]

    def linear_of_floats(self, dtype: str, rows: int) -> str:
        return "linear_avx512" if self.avx512 else "linear_avx2" if self.avx2 else "linear_portable"

    def takes_pairs(self, weight: str, dtype: str, rows: int) -> bool:
        if dtype != "bfloat16" or not self.bf16_products or weight == "transposed":
            return False
        if weight == "plain":
            return 16 < rows <= 32
        return (4 if weight in (*FLOATS, "int4") else 6) <= rows <= 512

    def takes_gemv(self, weight: str, dtype: str, rows: int) -> bool:
        if not self.avx2 or weight == "transposed":
            return False
        return rows <= (64 if self.x_layout(dtype, rows) == "amx" else 32)

    def torch_is_faster(self, dtype: str) -> bool:
        if dtype == "float32":
            return not self.avx2 or self.tuning == "intel"
        return "amx_fp16" in self.has if dtype == "float16" else self.amx or self.bf16_products

    def gemm(self, weight: str, dtype: str, rows: int) -> Iterator[str]:
        if rows > 64 and self.amx_products(dtype):
            yield "amx"
        if self.takes_pairs(weight, dtype, rows):
            yield "pairs"
        elif self.takes_gemv(weight, dtype, rows):
            yield "gemv"
        elif self.torch_is_faster(dtype):
            yield "torch"
        elif self.avx2:
            yield "blocked_avx512" if self.avx512 else "blocked_avx2"
        else:
            yield "widened"

    def takes_floats(self, weight: str, dtype: str, rows: int) -> bool:
        if not self.avx2:
            return False
        if dtype == "float32" and weight not in FLOATS:
            return True
        return not self.avx512 and weight in BYTES and rows > (2 if weight in FLOATS else 4)

    def faster_in_tiles(self, weight: str, dtype: str, rows: int) -> bool:
        if not self.amx_products(dtype):
            return False
        if weight in FLOATS:
            return rows >= 4
        if weight == "int4":
            return rows >= (5 if dtype == "bfloat16" else 8)
        return rows >= (6 if dtype == "bfloat16" else 12)

    def packed_gemv(self, weight: str, dtype: str, rows: int) -> Iterator[str]:
        if self.takes_pairs(weight, dtype, rows):
            yield "pairs"
            return
        if self.faster_in_tiles(weight, dtype, rows):
            yield "packed_tiles"
        isa = "vnni" if "vnni" in self.has else "avx512" if self.avx512 else "avx2"
        if not self.avx2:
            yield "packed_portable"
        elif self.takes_floats(weight, dtype, rows):
            yield "packed_floats_avx2"
        else:
            yield f"packed_{'fp8' if weight in FLOATS else 'steps'}_{isa}"

    def most_packed_gemv_rows(self, weight: str, dtype: str) -> int:
        if dtype != "float32" and self.amx:
            return 16
        if not self.avx512:
            return 96 if dtype != "float32" else 48 if weight in BYTES else 32
        if weight in FLOATS:
            return 48
        if dtype == "float32":
            return 16
        return 256 if weight in BYTES else 96

    def packed_gemm(self, weight: str, dtype: str, rows: int) -> Iterator[str]:
        tiled = 16 < rows <= 64 and self.amx_products(dtype)
        if tiled:
            yield "packed_tiles"
        by_packed_gemv = self.avx2 and rows <= self.most_packed_gemv_rows(weight, dtype)
        if tiled or (by_packed_gemv and not self.takes_pairs(weight, dtype, rows)):
            yield f"packed_pieces_{32 if self.takes_floats(weight, dtype, rows) else 16}"
            return
        yield from self.gemm(weight, dtype, rows)

    def chosen(self, product: str, weight: str, dtype: str, rows: int) -> tuple[str, ...]:
        """Return what was tried, one after the other."""
        if product.startswith("linear"):
            return (getattr(self, product)(dtype, rows),)
        return tuple(getattr(self, product)(weight, dtype, rows))


def same(now: str, before: str, rows: int) -> bool:
    """Whether two names are of the same route; up to 16 rows are one piece, whatever the most of a piece."""
    return now == before or rows <= 16 and now.startswith("packed_pieces") and before.startswith("packed_pieces")


@pytest.mark.parametrize("weight", PORTABLE)
def test_formats_without_kernels_are_dequantized(table, weight):
    for dtype, (has, tuning) in itertools.product(DTYPES, CPUS):
        assert {table.rows[each].name for each in table.found("packed_gemv", weight, dtype, has, tuning)} == {
            "packed_portable"
        }
        many = {table.rows[each].name for each in table.found("packed_gemm", weight, dtype, has, tuning)}
        assert many <= {"gemv", "torch", "blocked_avx512", "blocked_avx2", "widened"}


@pytest.mark.parametrize(("product", "weight", "dtype"), [ask for ask in asks() if ask[1] not in PORTABLE])
def test_routes_are_what_the_predicates_before_chose(table, product, weight, dtype):
    compared = 0
    for has, tuning in CPUS:
        before = Before(has, tuning)
        first = table.found(product, weight, dtype, has, tuning)
        for rows in COMPARED:
            if rows > len(first):
                break
            number = first[rows - 1]
            expected = before.chosen(product, weight, dtype, rows)
            names = [table.rows[number].name]
            while may_decline(table.rows[number]):
                number = later(table, (product, weight, dtype, has, tuning), number)[rows - 1]
                names.append(table.rows[number].name)
            fits = len(names) == len(expected) and all(same(*pair, rows) for pair in zip(names, expected))
            assert fits, f"{rows} rows, {sorted(has)}, {tuning}: {names}, expected {expected}"
            compared += 1
    assert compared == len(CPUS) * sum(rows <= MOST_ROWS.get(product, ROWS) for rows in COMPARED)


_LATER: dict[tuple, list[int]] = {}


def later(table: Table, ask: tuple, number: int) -> list[int]:
    if (*ask, number) not in _LATER:
        _LATER[(*ask, number)] = table.found(*ask, behind=number)
    return _LATER[(*ask, number)]
