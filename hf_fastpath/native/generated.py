"""Files of ``csrc`` that the build writes from ``packed_formats.py``: traits, and each format's kernels."""

from __future__ import annotations

import re
from pathlib import Path

from ..packed_formats import FORMATS, RECORDS, SCALE_BYTES, Format, QuantValues, ZeroPoints

_MARK = "// Written by the build (hf_fastpath/native/generated.py) from hf_fastpath/packed_formats.py."

#: where the kernels of experts are, which read every format that has kernels
_EXPERTS = "packed_experts/"
#: C++ file with one place for a format -> what the file has between its include and its end
_INSTANCES = {
    "packed_gemv/packed_gemv_{name}.cu": """#include "packed_gemv/packed_gemv_launch.cuh"

namespace hf_fastpath {

constexpr PackedFormat kMade = {enumerator};

template int64_t packed_format_workspace_bytes<kMade>(const GemvParams&, const PackedMatrix&);
template void launch_packed_format<kMade>(const GemvParams&, int, const PackedMatrix&,
                                          const RopeAppendParams*, void*, cudaStream_t);

}  // namespace hf_fastpath
""",
    f"{_EXPERTS}packed_experts_{{name}}.cu": """#include "packed_experts/packed_experts_kernel.cuh"

namespace hf_fastpath {

constexpr PackedFormat kMade = {enumerator};

template void launch_packed_experts_format<kMade>(const PackedExpertsProduct&, cudaStream_t);

}  // namespace hf_fastpath
""",
    "packed_gemm/packed_gemm_{name}.cu": """#include "packed_gemm/packed_gemm_launch.cuh"

namespace hf_fastpath {

constexpr PackedFormat kMade = {enumerator};

template void launch_packed_gemm_format<kMade>(const PackedGemmParams&, const PackedGemmPlan&, char*,
                                               cudaStream_t);

}  // namespace hf_fastpath
""",
}

_HEADER = """#pragma once

#include <cstdint>
#include <type_traits>

namespace hf_fastpath {

// What quants are, which quant is the weight 0, and the type of scales: QuantValues, ZeroPoints, SCALE_BYTES
// and RECORDS have them in Python. weights/packed_values.h says what values these stand for.
enum class PackedValues : int { %(values)s };
enum class PackedZeros : int { %(zeros)s };
enum class PackedScales : int {
%(scales)s
};

struct PackedTraits {
  const char* name;
  int bits;  // of a quant
  PackedValues values;
  int64_t group;  // weights of a row that share a scale; 0: the whole row
  PackedZeros zeros;
  int zero;  // the quant of kFixed
  PackedScales scales;
  int scale_bytes;    // of an element of the tensor that holds scales
  int record_bytes;   // of what a block has instead of scales, or 0
  bool has_kernels;   // of its own, beside those that read any format
  bool gpu_products;  // kernels of products on a GPU read it
  bool gpu_experts;   // those of experts do
  int steps;          // of kTable: 1 is so many steps
  float table[16];    // of kTable: the values
};

// The numbers are those of ops' schemas: hf_fastpath/choices.py has the names.
enum class PackedFormat : int {
%(enumerators)s
};
constexpr PackedFormat kLastPackedFormat = %(last)s;

// The format of number i is row i; tables have four values a line.
// clang-format off
inline constexpr PackedTraits kPackedTraits[] = {
%(rows)s
};
// clang-format on

// Calls f(the format as a constant), of a format that has kernels.
template <class F>
static inline auto with_format(PackedFormat format, F&& f) {
  switch (format) {
%(cases)s
    default:
      break;
  }
  __builtin_unreachable();
}

// The same of a format that kernels of experts on a GPU read.
template <class F>
static inline auto with_gpu_experts_format(PackedFormat format, F&& f) {
  switch (format) {
%(experts_cases)s
    default:
      break;
  }
  __builtin_unreachable();
}

// The same of a format that kernels of products on a GPU read.
template <class F>
static inline auto with_gpu_format(PackedFormat format, F&& f) {
  switch (format) {
%(gpu_cases)s
    default:
      break;
  }
  __builtin_unreachable();
}

}  // namespace hf_fastpath
"""


_NEW_LINE = "\n         "
#: of a double that is a float32
_FLOAT_ZEROS = re.compile(r"\.?0*p")


def _camel(name: str) -> str:
    return "k" + "".join(part.capitalize() for part in name.split("_"))


def _enumerator(format: Format) -> str:
    return f"PackedFormat::{_camel(format.name)}"


def _row(format: Format) -> str:
    values, zeros = f"PackedValues::{_camel(format.values.value)}", f"PackedZeros::{_camel(format.zeros.value)}"
    scales, lines = f"PackedScales::{_camel(format.scale_dtype)}", []
    for at in range(0, len(format.table), 4):
        lines.append(", ".join(f"{_FLOAT_ZEROS.sub('p', each.hex())}f" for each in format.table[at : at + 4]))
    table = f",{_NEW_LINE}".join(lines)
    kernels = [str(each).lower() for each in (format.has_kernels, format.has_gpu_products, format.has_gpu_experts)]
    name, bytes = f'"{format.name}"', (format.scale_bytes, format.record.nbytes if format.record else 0)
    traits = (name, format.bits, values, format.group, zeros, format.zero, scales, *bytes, *kernels)
    return f"    {{{', '.join(map(str, traits))}, {format.steps}, {{{table and _NEW_LINE + table}}}}},"


def _case(format: Format) -> str:
    name = _enumerator(format)
    return f"    case {name}:\n      return f(std::integral_constant<PackedFormat, {name}>{{}});"


def files() -> dict[str, str]:
    """Return the generated files: path in ``csrc`` -> text."""
    formats = list(FORMATS.values())
    own = [format for format in formats if format.has_kernels]
    header = _HEADER % {
        "enumerators": "\n".join(f"  {_camel(each.name)} = {number}," for number, each in enumerate(formats)),
        "last": _enumerator(formats[-1]),
        "rows": "\n".join(map(_row, formats)),
        "cases": "\n".join(map(_case, own)),
        "gpu_cases": "\n".join(_case(format) for format in own if format.has_gpu_products),
        "experts_cases": "\n".join(_case(format) for format in own if format.has_gpu_experts),
        "values": ", ".join(_camel(each.value) for each in QuantValues),
        "zeros": ", ".join(_camel(each.value) for each in ZeroPoints),
        "scales": ",\n".join(f"  {_camel(each)}" for each in (*SCALE_BYTES, *RECORDS)),
    }
    made = {"weights/formats.generated.h": f"{_MARK}\n{header}"}
    for place, text in _INSTANCES.items():
        for format in own:
            has_it = format.has_gpu_experts if place.startswith(_EXPERTS) else format.has_gpu_products
            if not has_it:
                continue
            named = text.replace("{enumerator}", _enumerator(format))
            made[place.format(name=format.name)] = f"{_MARK}\n{named}"
    return made


def outdated(csrc: Path) -> list[Path]:
    """Return the generated files of ``csrc`` that are not as :func:`files` has them, and those that it has no more."""
    made = files()
    wrong = [csrc / name for name in made if (csrc / name).parent.is_dir() and _text(csrc / name) != made[name]]
    there = (path for place in {Path(name).parent for name in made} for path in (csrc / place).glob("*"))
    return wrong + [path for path in there if _text(path).startswith(_MARK) and str(path.relative_to(csrc)) not in made]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def update(csrc: Path) -> None:
    """Write the generated files of ``csrc`` that are outdated, and remove those of formats that are no more.

    Raises:
        OSError: a file is outdated and cannot be written.
    """
    made = files()
    for path in outdated(csrc):
        name = path.relative_to(csrc).as_posix()
        if name in made:
            path.write_text(made[name])
        else:
            path.unlink()
