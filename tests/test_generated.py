"""What the build writes of the formats of quantized weights: it is up to date, and C++ says the same as Python."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hf_fastpath import packed_formats
from hf_fastpath.choices import PackedFormat
from hf_fastpath.native import build, generated, toolchain
from hf_fastpath.packed_formats import FORMATS, NF4, Format, QuantValues, ZeroPoints

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
HEADER = "weights/formats.generated.h"
#: the table whose numbers of rows were measured for a format by its name
ROUTES = "products/select_cpu.cpp"
WITH_KERNELS = [name for name, format in FORMATS.items() if format.has_kernels]
WITH_GPU_PRODUCTS = [name for name, format in FORMATS.items() if format.has_gpu_products]


def test_generated_files_are_up_to_date():
    assert generated.outdated(CSRC) == [], "python hf_fastpath/native/build.py cpu writes them"
    assert set(generated.files()) == {
        HEADER,
        *(f"{op}/{op}_{name}.cu" for op in ("packed_gemv", "packed_gemm") for name in WITH_GPU_PRODUCTS),
        *(f"packed_experts/packed_experts_{name}.cu" for name in WITH_KERNELS if FORMATS[name].has_gpu_experts),
    }


def test_numbers_are_those_of_ops():
    assert {each.name: each.number for each in FORMATS.values()} == {each.label: int(each) for each in PackedFormat}


def test_update_writes_what_differs_and_removes_what_is_no_more(tmp_path, monkeypatch):
    for name in generated.files():
        (tmp_path / name).parent.mkdir(exist_ok=True)
    others = tmp_path / "packed_gemv" / "packed_gemv_launch.cuh"
    others.write_text("// of a person\n")
    generated.update(tmp_path)
    assert generated.outdated(tmp_path) == [] and len(list(tmp_path.glob("*/*"))) == len(generated.files()) + 1
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")}
    (tmp_path / HEADER).write_text("// changed\n")
    monkeypatch.setattr(generated, "FORMATS", {name: each for name, each in FORMATS.items() if name != "int4_g32"})
    generated.update(tmp_path)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*")}
    assert left == {*generated.files(), "packed_gemv/packed_gemv_launch.cuh"}
    assert "kInt4G32 " not in (tmp_path / HEADER).read_text() and others.read_text() == "// of a person\n"
    unchanged = tmp_path / "packed_gemm" / "packed_gemm_fp8.cu"
    assert unchanged.stat().st_mtime_ns == times[unchanged]


def test_hash_of_the_sources_has_the_generated_files(monkeypatch):
    before = build.sources_hash("cpu")
    monkeypatch.setattr(generated, "FORMATS", {name: each for name, each in FORMATS.items() if name != "int4_g32"})
    assert build.sources_hash("cpu") != before


def test_no_file_asks_for_the_name_of_a_format():
    """Kernels ask for traits, so that a further format does not fall into a branch that was written for another."""
    named = re.compile(r"PackedFormat::k[A-Z]\w*")
    found = {
        path.relative_to(CSRC).as_posix()
        for path in CSRC.glob("*/*.*")
        if path.suffix != ".csv" and named.search(path.read_text())
    }
    assert found - set(generated.files()) == {ROUTES}
    compared = re.compile(r"[=!]= PackedFormat::|PackedFormat::\w+ [=!]=|case PackedFormat::")
    assert not compared.search((CSRC / ROUTES).read_text())


@pytest.mark.parametrize(
    ("changes", "text"),
    (
        ({"bits": 3}, "bits is 3"),
        ({"group": 64}, "group is 64, expected 0 or 32 or 128 weights"),
        ({"values": QuantValues.TABLE}, "the table has 0 values, expected 16"),
        ({"table": NF4}, "the table has 16 values, expected 0"),
        ({"steps": 1}, "steps is 1, expected up to 8192 of a table"),
        ({"zero": 8, "zeros": ZeroPoints.NONE}, "zero is 8 and not fixed"),
        ({"direction": "outputs"}, "direction is outputs"),
        ({"scale_dtype": "e8m0"}, "scale_dtype is e8m0"),
        ({"order": "rows"}, "order is rows"),
        ({"group": 96, "has_kernels": False}, "group is 96, expected 0 or 32 or 64 or 128 weights"),
        ({"scale_dtype": "e5m2", "has_kernels": False}, "scale_dtype is e5m2, expected float16 or float32 or e8m0 or "),
        ({"values": QuantValues.FLOATS, "has_kernels": False}, "float8_e4m3fn is of eight bits"),
        ({"values": QuantValues.TABLE, "has_kernels": False}, "the table has 0 values, expected 16"),
        ({"bits": 8, "highest": 255}, "bytes with zeros of groups have groups of 32"),
    ),
)
def test_a_format_without_kernels_is_refused(changes, text):
    with pytest.raises(ValueError, match=f"format 'new': .*{text}.*: write kernels"):
        dataclasses.replace(FORMATS["int4"], name="new", **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    (
        ({"group": 128}, "group is 128, expected 64 weights"),
        ({"scale_dtype": "float16"}, "scale_dtype is float16, expected float32"),
        ({"steps": 16384}, "steps is 16384, expected up to 8192"),
        ({"zeros": ZeroPoints.OF_GROUP}, "a table is of four bits, without zeros"),
        ({"table": NF4[:-1]}, "the table has 15 values"),
        ({"table": (*NF4[:-1], 1.5)}, "values of a table are up to 8192 steps"),
        ({"table": (*NF4[:-1], 0.1)}, "values of a table are float32, one of them 0"),
        ({"table": (-1.0,) * 16}, "values of a table are float32, one of them 0"),
        ({"scale_dtype": "e8m0"}, "scale_dtype is e8m0, expected float32"),
    ),
)
def test_a_table_without_kernels_is_refused(changes, text):
    with pytest.raises(ValueError, match=f"format 'new': .*{text}.*: write kernels"):
        dataclasses.replace(FORMATS["nf4"], name="new", **changes)


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    (
        ("int4_g32_k", {"gpu_products": True}, "kernels of a GPU read no records"),
        ("int4_g32_k", {"gpu_experts": True}, "kernels of a GPU read no records"),
        ("int4_g32_min", {"bits": 8}, "bytes have no such records"),
        ("int8_g16_k", {"bits": 4}, "four bits have no such records"),
        ("int8_g16_k", {"group": 32}, "group is 32, expected 16 weights"),
        ("int4_g32_min", {"zeros": ZeroPoints.FIXED, "zero": 8}, "quants of records are whole numbers"),
    ),
)
def test_records_without_kernels_are_refused(name, changes, text):
    with pytest.raises(ValueError, match=f"format 'new': .*{text}.*: write kernels"):
        dataclasses.replace(FORMATS[name], name="new", **changes)


def test_the_recipe_imports_no_torch():
    script = "import runpy, sys; sys.argv = ['build.py', '--help']\n"
    script += f"try: runpy.run_path({str(ROOT / 'hf_fastpath/native/build.py')!r}, run_name='__main__')\n"
    script += (
        "except SystemExit: pass\nprint('torch' in sys.modules, 'hf_fastpath_recipe.packed_formats' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "False True", result.stderr


# ---- C++ ---------------------------------------------------------------------------------------------------

PRINT = """
#include <cstdio>
#include "weights/packed_format.h"
using namespace hf_fastpath;
template <PackedFormat kFormat>
void print() {
  using T = Traits<kFormat>;
  std::printf("[\\"%s\\", %d, %d, %d, %d, %d, %d, %d, [", traits_of(kFormat).name, int(kFormat), T::kBits, T::kIsFloat,
              T::kHasZeros, T::kZero, T::kScalesSums, T::kEachSubBlock);
  for (float value : traits_of(kFormat).table) std::printf("%.9g, ", value);
  std::printf("%d, %d, %d], [", T::kHasTable, T::kScaleBytes, traits_of(kFormat).steps);
  for (int64_t blocks = 1; blocks < 4; ++blocks) std::printf("%d, ", int(groups_of(kFormat, blocks)));
  std::printf("0], [");
  for (int64_t i = 0; i < 12; ++i) std::printf("%d, ", int(group_of(kFormat, i / 4, i % 4)));
  std::printf("0]]\\n");
}
int main() {
  for (int i = 0; i <= int(kLastPackedFormat); ++i) {
    if (!has_kernels(PackedFormat(i))) continue;
    with_format(PackedFormat(i), [](auto format) { print<decltype(format)::value>(); });
  }
}
"""


def compiled(folder: Path, csrc: Path, code: str = PRINT) -> subprocess.CompletedProcess:
    try:
        cxx = toolchain.find_toolchain("cpu").cxx
    except build.BuildError as error:
        pytest.skip(str(error))
    (folder / "print.cpp").write_text(code)
    flags = [
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        f"-I{csrc}",
        "-o",
        str(folder / "print"),
    ]
    return subprocess.run([*shlex.split(cxx), *flags, str(folder / "print.cpp")], capture_output=True, text=True)


def test_traits_are_those_of_the_formats(tmp_path):
    result = compiled(tmp_path, CSRC)
    assert result.returncode == 0, result.stderr
    said = subprocess.run([str(tmp_path / "print")], capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in said.splitlines()]
    assert [row[0] for row in rows] == WITH_KERNELS
    for name, number, bits, is_float, has_zeros, zero, of_row, each_sub_block, table, groups, places in rows:
        format = FORMATS[name]
        assert (number, bits, is_float) == (format.number, format.bits, format.is_float)
        assert (has_zeros, zero) == (format.has_zeros, format.zero)
        assert (of_row, each_sub_block) == (format.group == 0, format.group in (16, 32))
        assert [float(np.float32(value)) for value in table[:16]] == list(format.table or [0] * 16)
        assert table[16:] == [format.is_table, format.scale_bytes, format.steps]
        assert groups[:-1] == [format.scale_columns(128 * blocks) for blocks in (1, 2, 3)]
        of_weight = [0 if format.group == 0 else weight // max(format.group, 32) for weight in range(0, 3 * 128, 32)]
        assert places[:-1] == of_weight


@pytest.mark.parametrize(
    ("format", "said"),
    (
        (Format("fp4", 4, 32, -6, 6, values=QuantValues.FLOATS), "floats are e4m3"),
        (Format("uint8", 8, 32, -128, 127, zeros=ZeroPoints.FIXED, zero=128), "bytes are signed"),
        (Format("int4_g128", 4, 128, -8, 7, zeros=ZeroPoints.FIXED, zero=8), "groups of 128 of 4 bits have zeros"),
        (Format("int4_g32_none", 4, 32, 0, 15), "groups of 32 of 4 bits have zeros"),
    ),
    ids=lambda value: getattr(value, "name", None),
)
def test_a_further_format_does_not_fall_into_branches_of_others(tmp_path, monkeypatch, format, said):
    """A format that Python admits and that no kernel was written for does not compile."""
    (tmp_path / "weights").mkdir()
    shutil.copy(CSRC / "weights" / "packed_format.h", tmp_path / "weights")
    monkeypatch.setattr(generated, "FORMATS", packed_formats.FORMATS | {format.name: format})
    generated.update(tmp_path)
    result = compiled(tmp_path, tmp_path)
    assert result.returncode != 0 and said in result.stderr, result.stderr[-2000:]


LOOK_UP = """
#include <cstdio>
#include <cstdint>
#define __device__
#define __forceinline__ inline
static uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t places) {
  const uint64_t all = uint64_t(high) << 32 | low;
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) bytes |= uint32_t(all >> (places >> 4 * i & 7) * 8 & 255) << 8 * i;
  return bytes;
}
#include "weights/packed_table.cuh"
using namespace hf_fastpath;
template <PackedFormat kFormat>
void print() {
  if constexpr (has_table(kFormat)) {
    for (uint32_t rotated = 0; rotated < 16; ++rotated) {  // each quant at each place of a word
      uint32_t word = 0, pairs[2][4];
      for (uint32_t i = 0; i < 8; ++i) word |= (rotated + i) % 16 << 4 * i;
      table_pairs<kFormat, 0>(word, pairs[0]);
      table_pairs<kFormat, 1>(word, pairs[1]);
      for (uint32_t i = 0; i < 8; ++i)
        for (int term = 0; term < 2; ++term) std::printf("%u ", pairs[term][i / 2] >> i % 2 * 16 & 0xffff);
      std::printf("\\n");
    }
  }
}
int main() {
  for (int i = 0; i <= int(kLastPackedFormat); ++i) {
    if (!has_kernels(PackedFormat(i))) continue;
    with_format(PackedFormat(i), [](auto format) { print<decltype(format)::value>(); });
  }
}
"""


def test_kernels_look_up_the_values_of_tables(tmp_path):
    """A GPU's permutations of bytes are done here: both float16 of a value together are all of it but 2^-22."""
    result = compiled(tmp_path, CSRC, LOOK_UP)
    assert result.returncode == 0, result.stderr
    said = subprocess.run([str(tmp_path / "print")], capture_output=True, text=True, check=True).stdout
    lines = iter(said.splitlines())
    for format in (FORMATS[name] for name in WITH_KERNELS if FORMATS[name].is_table):
        for rotated in range(16):
            bits = np.array(next(lines).split(), dtype=np.uint16).view(np.float16).astype(np.float64).reshape(8, 2)
            values = np.array([format.table[(rotated + i) % 16] * format.steps for i in range(8)])
            assert np.all(np.abs(bits[:, 0] - values) <= 2**-11 * np.abs(values))
            assert np.all(np.abs(bits.sum(1) - values) <= 2**-22 * np.abs(values))


def test_a_further_table_needs_no_more_than_its_row(tmp_path, monkeypatch):
    """Values are data: neither traits nor lookups know a table by its name."""
    values = tuple(float(np.float32(each)) for each in np.linspace(-1, 1, 15))
    further = dataclasses.replace(FORMATS["nf4"], name="even", table=(*values, 0.5), steps=7 * 1024)
    (tmp_path / "weights").mkdir()
    for name in ("packed_format.h", "packed_table.cuh"):
        shutil.copy(CSRC / "weights" / name, tmp_path / "weights")
    monkeypatch.setattr(generated, "FORMATS", packed_formats.FORMATS | {"even": further})
    generated.update(tmp_path)
    for code in (PRINT, LOOK_UP):
        assert (result := compiled(tmp_path, tmp_path, code)).returncode == 0, result.stderr
    found = subprocess.run([str(tmp_path / "print")], capture_output=True, text=True, check=True).stdout.splitlines()
    bits = np.array(found[-16].split(), dtype=np.uint16).view(np.float16).astype(np.float64).reshape(8, 2)
    np.testing.assert_allclose(bits.sum(1), np.array(values[:8]) * further.steps, rtol=2**-22)
