"""Every route of every kind of CPU computes what its op says, in a process that ``HF_FASTPATH_CPU`` limits to the kind.

A CPU's choice of a route depends on its features, so that each kind that this CPU has runs, and others are skipped.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import fresh_process
import pytest
import torch
from checks import assert_matches
from routes import LIMIT, program
from test_packed_gemv import packed
from test_routes import TUNINGS, Table, asks, feature_sets

from hf_fastpath import ops
from hf_fastpath.native import loader
from hf_fastpath.ops.gemv import MAX_ROWS
from hf_fastpath.packed_formats import FORMATS
from hf_fastpath.registry import Sample

#: value of ``HF_FASTPATH_CPU`` -> features that a CPU of the kind has
KINDS = {
    "baseline,tune=generic": (),
    "avx2,tune=generic": ("f16c", "avx2"),
    "avx2,tune=intel": ("f16c", "avx2"),
    "avx512,tune=generic": ("f16c", "avx2", "avx512"),
    "vnni,tune=intel": ("f16c", "avx2", "avx512", "vnni"),
    "vnni,bf16_dot,tune=zen4": ("f16c", "avx2", "avx512", "vnni", "bf16_dot"),
    "vnni,amx_bf16,tune=intel": ("f16c", "avx2", "avx512", "vnni", "amx_bf16"),
    "vnni,bf16_dot,amx_fp16,tune=intel": ("f16c", "avx2", "avx512", "vnni", "bf16_dot", "amx_bf16", "amx_fp16"),
}
#: product -> the op that asks for it; where x is float32, the kernels of gemv are those of floats, too
OPS = {"linear": ops.gemv, "gemm": ops.gemm, "packed_gemv": ops.packed_gemv, "packed_gemm": ops.packed_gemm}
#: sizes of a weight that are no multiples of anything, with more than one block of inputs
FEATURES, INPUTS = 37, 130


def _table() -> Table:
    return Table(loader.cpu_routes(), ctypes.CDLL(str(Path(loader.status()["cpu"].detail))))


def _calls(table: Table, has: frozenset[str], tuning: str) -> Iterator[tuple[int, str, str, str, int]]:
    """Yield (number of a route, product, weight, dtype, rows of x): for each product, weight and dtype the fewest rows
    that find the route, and the most that are up to 64 more."""
    for product, weight, dtype in asks():
        if product not in OPS:
            continue
        most = MAX_ROWS if product in ("linear", "packed_gemv") else None
        found = table.found(product, weight, dtype, has, tuning)[:most]
        for number in set(found):
            first = found.index(number) + 1
            last = max(rows for rows in range(first, first + 65) if found[rows - 1 : rows] == [number])
            yield from ((number, product, weight, dtype, rows) for rows in {first, last})


def _need_library() -> None:
    if not loader.ensure("cpu").native:
        pytest.skip("no library for the CPU")


def test_kinds_reach_every_route():
    """All rows that any CPU finds are reached, and the others are behind a route that may decline."""
    _need_library()
    table = _table()
    reached = {call[0] for kind, has in KINDS.items() for call in _calls(table, frozenset(has), kind.split("=")[1])}
    found = {call[0] for has in feature_sets() for tuning in TUNINGS for call in _calls(table, has, tuning)}
    assert reached == found
    others = {table.rows[number].name for number in set(range(len(table.rows))) - found}
    assert others <= {"packed_pieces_16"}, others


@pytest.mark.parametrize("kind", KINDS)
def test_routes_of_a_kind_match(kind):
    _need_library()
    missing = set(KINDS[kind]) - set(loader.cpu_choice().found)
    if missing:
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
    result = fresh_process.run(program(__file__), **{LIMIT: kind})
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout.split()[-1]) > len(FORMATS) * 2 * 3


def _sample(product: str, weight: str, dtype: torch.dtype, rows: int) -> Sample:
    x, values = torch.randn(rows, INPUTS, dtype=dtype), torch.randn(FEATURES, INPUTS) * INPUTS**-0.5
    if product.startswith("packed"):
        return Sample(x, *packed(FORMATS[weight], values), torch.randn(FEATURES, dtype=dtype))
    matrix = values.t().contiguous() if weight == "transposed" else values
    return Sample(x, matrix.to(dtype), torch.randn(FEATURES, dtype=dtype), transposed=weight == "transposed")


def _main() -> None:
    kind = os.environ[LIMIT]
    loader.ensure("cpu")
    choice, count = loader.cpu_choice(), 0
    assert set(choice.used) == set(KINDS[kind]) and choice.tuning == kind.split("=")[1], choice
    torch.manual_seed(1729)
    table = _table()
    with torch.no_grad():
        for number, product, weight, dtype, rows in _calls(table, frozenset(choice.used), choice.tuning):
            label = f"{kind}, {table.rows[number].name}, {weight}, {rows} rows:"
            assert_matches(OPS[product], _sample(product, weight, getattr(torch, dtype), rows), label)
            count += 1
    print(count)


if __name__ == "__main__":
    _main()
