"""Routes of products on a GPU: each row is reached, and all are what predicates chose before.

No GPU is needed: the table is compiled with kernels that do nothing.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hf_fastpath.native import build, cuda, toolchain
from hf_fastpath.native.cuda import CudaRoute
from hf_fastpath.packed_formats import FORMATS

CSRC = Path(__file__).resolve().parent.parent / "csrc"
PRODUCTS = ("gemv", "packed_gemv", "packed_gemm")
WEIGHTS = ("plain", "transposed", *FORMATS)
DTYPES = ("float32", "float16", "bfloat16")
CODES = ("", "hopper", "wgmma")
#: what a library has for a GPU: code for 8.0 alone, for 9.0a, for what comes behind it
DEVICES = {"8.0": {""}, "9.0": {"", "hopper", "wgmma"}, "10.0": {"", "hopper"}}
ROWS = {"gemv": 70, "packed_gemv": 20, "packed_gemm": 4200}


@dataclass(frozen=True)
class Table:
    """The rows, and what they choose."""

    rows: list[CudaRoute]
    library: ctypes.CDLL
    facts: list[str]

    def found(self, product: str, weight: str, dtype: str, facts: set[str], codes: set[str]) -> list[str | None]:
        """Return the names of the rows that 1, 2, ... rows of x find, or None for none."""
        count = ROWS[product]
        numbers = (ctypes.c_int * count)()
        facts_bits = sum(1 << self.facts.index(each) for each in facts)
        code_bits = sum(1 << CODES.index(each) for each in codes)
        asked = PRODUCTS.index(product), 1 << WEIGHTS.index(weight), DTYPES.index(dtype)
        self.library.hf_fastpath_find_cuda_routes(*asked, facts_bits, code_bits, count, numbers)
        return [None if number < 0 else self.rows[number].name for number in numbers]


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Table:
    try:
        cxx = toolchain.find_toolchain("cpu").cxx
    except build.BuildError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("cuda_routes")
    (folder / "cuda_runtime.h").write_text("#pragma once\ntypedef struct CUstream_st* cudaStream_t;\n")
    source = (CSRC / "products/select_cuda.cu").read_text()
    stubs = "".join(
        f"void {name}(const GemvParams&{rope}, cudaStream_t) {{}}\n"
        for name in sorted(set(re.findall(r"\blaunch_gemv\w+", source)))
        for rope in (", const RopeAppendParams*", "")
    )
    stubs += "bool has_cuda_code(CudaCode) { return false; }\n"
    code = f'#include "products/select_cuda.cu"\nnamespace hf_fastpath {{\n{stubs}}}\n'
    (folder / "table.cpp").write_text(code)
    flags = ["-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror", f"-I{folder}", f"-I{CSRC}"]
    command = [*shlex.split(cxx), *flags, "-o", str(folder / "table.so"), str(folder / "table.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = re.findall(r'"(\w+)"', re.search(r"kFacts\[\] = \{(.*?)\};", source, re.DOTALL)[1])
    return Table(cuda.routes(folder / "table.so"), ctypes.CDLL(str(folder / "table.so")), facts)


def test_facts_have_the_names_of_their_constants(table):
    header = (CSRC / "common/routes_cuda.h").read_text()
    bits = {name: int(bit) for name, bit in re.findall(r"CallFacts k(\w+) = 1u << (\d+);", header)}
    assert {name.replace("_", ""): bit for bit, name in enumerate(table.facts)} == {
        name.lower(): bit for name, bit in bits.items()
    }


def test_rows_say_what_they_take(table):
    assert {product for row in table.rows for product in row.products} == set(PRODUCTS)
    for row in table.rows:
        assert set(row.weights) <= set(WEIGHTS) and row.dtypes and set(row.needs + row.lacks) <= set(table.facts)
        assert row.code in CODES and row.rows[0] >= 1 and (row.rows[1] is None or row.rows[0] <= row.rows[1])
    for row in table.rows:
        if row.products == ("gemv",):
            assert (CSRC / "gemv" / f"{row.name}.cu").is_file(), "a kernel's file has the name of its route"


# ---- the predicates before ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """What the predicates before knew of a call of gemv.

    Attributes:
        norm: kind of the norm in front.
        append: "" for none, else "plain" or "rotated".
        aligned: rows of x and of the weights are whole, aligned chunks.
        ring: so are the norm's and an append's.
        few_chunks: a row of x fits the registers of a block.
        columns: a norm in front fits kernels of [k, n] weights.
    """

    transposed: bool
    norm: str
    append: str
    aligned: bool
    ring: bool
    few_chunks: bool
    columns: bool

    @property
    def facts(self) -> set[str]:
        """Return what ``facts_of()`` of ``csrc/gemv/gemv.cu`` finds."""
        found = {name for name in ("aligned", "ring", "few_chunks") if getattr(self, name)}
        found |= {"norm"} if self.norm != "none" else set()
        found |= {"layer_norm"} if self.norm == "layer" else {"offset_norm"} if self.norm == "rms_offset" else set()
        return found | ({"append"} if self.append else set()) | ({"columns"} if self.fits_columns else set())

    @property
    def fits_columns(self) -> bool:
        if not self.transposed or self.append == "rotated":
            return False
        return self.norm == "none" or (self.norm != "rms_offset" and self.aligned and self.columns)

    def fits_ring(self, dtype: str, codes: set[str]) -> bool:
        return self.ring and (dtype != "float32" or "hopper" in codes)

    def chosen(self, dtype: str, rows: int, codes: set[str]) -> str | None:
        """Return what ``kVariants`` chose, variant by variant."""
        half, alone = dtype != "float32", self.norm == "none" and not self.append
        variants = (
            ("gemv_ring", False, 1, 1, False, self.fits_ring(dtype, codes) and self.few_chunks),
            (
                *("gemv_ring_rows", False, 2, 8, True),
                self.norm not in ("rms_offset", "layer") and self.fits_ring(dtype, codes),
            ),
            ("gemv_wgmma", False, 9, 64, True, alone and self.aligned and "wgmma" in codes),
            ("gemv_mma", False, 2, 16, True, alone and self.aligned),
            ("gemv_columns_mma", True, 1, 16, True, self.fits_columns and self.aligned),
            ("gemv_columns", True, 1, 16, False, self.fits_columns),
            ("gemv_rows", False, 1, 16, False, alone),
        )
        for name, transposed, least, most, half_only, fits in variants:
            if transposed == self.transposed and least <= rows <= most and (half or not half_only) and fits:
                return name
        return None


def calls() -> Iterator[Call]:
    flags = (False, True)
    norms, appends = ("none", "rms", "rms_offset", "layer"), ("", "plain", "rotated")
    for transposed, norm, append, *rest in itertools.product(flags, norms, appends, flags, flags, flags, flags):
        call = Call(transposed, norm, append, *rest)
        if call.aligned or not call.ring:  # what a ring takes is aligned
            yield call


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_routes_of_gemv_are_what_the_variants_before_chose(table, dtype, device):
    codes, compared = DEVICES[device], 0
    for call in calls():
        found = table.found("gemv", "transposed" if call.transposed else "plain", dtype, call.facts, codes)
        expected = [call.chosen(dtype, rows, codes) for rows in range(1, ROWS["gemv"] + 1)]
        assert found == expected, call
        compared += len(found)
    assert compared > 10_000 and dataclasses.fields(Call)


@pytest.mark.parametrize("weight", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_routes_of_packed_gemv_are_what_its_predicates_chose(table, weight, dtype):
    """A norm in front and an append are asked after one by one."""
    own = FORMATS[weight].has_gpu_products
    for codes, dense in itertools.product(DEVICES.values(), (False, True)):
        facts = {"dense"} if dense else set()
        takes = "packed_gemv" if own else "dequantized_gemv" if dense else None
        of_records = FORMATS[weight].record is not None
        for norm in ({"norm"}, {"norm", "offset_norm"}, {"norm", "layer_norm"}, set()):
            expected = None if own and "layer_norm" in norm else takes
            if of_records:  # the dequantizing route is not for them: the norm is a kernel of its own
                expected = None if norm else "packed_gemv_records"
            assert set(table.found("packed_gemv", weight, dtype, facts | norm, codes)) == {expected}
        for append in ({"append"}, {"append", "head_append"}):
            for rows, found in enumerate(table.found("packed_gemv", weight, dtype, facts | append, codes), 1):
                fits = own and "head_append" not in append and (dtype != "float32" or rows <= 4)
                assert found == ("packed_gemv" if fits else None)


@pytest.mark.parametrize("weight", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_routes_of_packed_gemm_are_what_its_predicate_chose(table, weight, dtype):
    for codes, indexed in itertools.product(DEVICES.values(), (False, True)):
        for rows, found in enumerate(
            table.found("packed_gemm", weight, dtype, {"indexed"} if indexed else set(), codes), 1
        ):
            fits = (
                dtype != "float32" and rows < 4096 and indexed and "wgmma" in codes and FORMATS[weight].has_gpu_products
            )
            assert found == ("packed_gemm" if fits else "dequantized_gemm")


def test_every_row_is_reached(table):
    """But for those of formats without kernels, where there are none."""
    reached = set()
    for row in table.rows:
        for weight, dtype, codes in itertools.product(row.weights, row.dtypes, DEVICES.values()):
            (product,) = row.products
            first = table.found(product, weight, dtype, set(row.needs), codes)[row.rows[0] - 1]
            reached |= {row.name} if first == row.name else set()
    without = {row.name for row in table.rows if not row.weights}
    assert reached | without == {row.name for row in table.rows}
    assert without == (set() if any(not each.has_gpu_products for each in FORMATS.values()) else {"dequantized_gemv"})
