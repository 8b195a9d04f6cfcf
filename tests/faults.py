"""Faults at chosen places of the package: an exception is raised at the n-th line that runs in some of its files."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import hf_fastpath

PACKAGE = Path(hf_fastpath.__file__).parent
#: what holds keys and values
_CACHE = tuple(f"cache/{name}.py" for name in ("fastpath_cache", "buffers", "layer", "paged_layer", "pages"))
#: what makes the steps of a plan
_STEPS = (
    *("decode/sources/steps.py", "decode/calls/named_calls.py"),
    *("decode/lower/which_op.py", "decode/lower/many_rows.py"),
    *("patching/forwards.py", "patching/module_patch.py", "patching/over_cache.py"),
)
#: files that a forward over a FastpathCache passes
FORWARD = (*_CACHE, *_STEPS, "cache/edits.py", "patching/own_forward.py", "decode/loops/own_loop.py")
#: files that ``generate()`` passes
GENERATE = (
    *(*_CACHE, *_STEPS, "patching/generation.py", "patching/state.py"),
    *(f"decode/loops/{name}.py" for name in ("generate_calls", "eligibility", "sample", "prompt")),
    *("decode/plans/decode_plan.py", "decode/plans/plan_cache.py", "decode/state/snapshot.py"),
    *("decode/run/program.py", "decode/run/passes.py", "decode/run/one_call.py", "decode/run/native_calls.py"),
    "decode/calls/pass_table.py",
)
#: files that ``patch()`` and ``unpatch()`` pass; but patching/loops.py, where finalizers of other models run
PATCH = (
    *("patching/api.py", "patching/analyse.py", "patching/apply.py", "patching/copies.py", "patching/coverage.py"),
    *("patching/ledger.py", "patching/plan.py", "patching/reporting.py", "patching/state.py"),
    *("architecture.py", "decode/model/structure.py", "decode/model/parts.py"),
)


class Fault:
    """Counts the lines that run in ``files`` of the package, and raises ``error`` instead of line ``at``.

    The line of a ``with`` is no such place: it runs again when the block is left, and Python takes no interrupt there
    before a lock is released.

    Args:
        files: paths relative to the package.
        at: number of the line, from 0; None only counts lines.
        error: the exception that is raised.
    """

    def __init__(self, files: tuple[str, ...], at: int | None = None, error: type[BaseException] = KeyboardInterrupt):
        if missing := [file for file in files if not (PACKAGE / file).is_file()]:
            raise ValueError(f"no such files in the package: {', '.join(missing)}")
        self.files = {str(PACKAGE / file) for file in files}
        self.at, self.error, self.lines, self.where = at, error, 0, ""

    def __enter__(self) -> Fault:
        self.before = sys.gettrace()
        sys.settrace(self._enter_call)
        return self

    def __exit__(self, *exception: Any) -> None:
        sys.settrace(self.before)

    def _enter_call(self, frame: FrameType, event: str, argument: Any) -> Callable | None:
        return self._line if frame.f_code.co_filename in self.files else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Callable | None:
        if event == "line" and not self._is_with(frame):
            self.lines += 1
            if self.at is not None and self.lines > self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise self.error(f"at {self.where}")
        return self._line

    @staticmethod
    def _is_with(frame: FrameType) -> bool:
        return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def places(count: int, most: int) -> list[int]:
    """Return at most ``most`` of ``count`` lines, evenly spread, with the first and the last."""
    most = min(most, count)
    return sorted({round(index * (count - 1) / max(1, most - 1)) for index in range(most)})
