"""Hear which Python code runs: that of a forward, and none of what the process runs by the way."""

from __future__ import annotations

import gc
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_LOGGING = logging.__file__


@contextmanager
def hearing(hear: Callable[[types.FrameType, str, Any], None]) -> Iterator[None]:
    """Call ``hear`` for each call of this thread in a ``with`` block, as ``sys.setprofile`` does; meanwhile the garbage
    collector, whose callbacks anybody may have registered, does not run."""
    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(hear)
    try:
        yield
    finally:
        hear_again(before)
        if collects:
            gc.enable()


def hear_again(profiler: Any) -> None:
    """Let a profiler of this thread go on: a function, or cProfile's object, which is no function."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    elif callable(enable := getattr(profiler, "enable", None)):
        sys.setprofile(None)
        enable()


def is_logging(frame: types.FrameType) -> bool:
    """Whether a frame runs within a call of Python's ``logging``: in a handler, a filter or a formatter, which are the
    process's."""
    caller = frame.f_back
    while caller is not None:
        if caller.f_code.co_filename == _LOGGING:
            return True
        caller = caller.f_back
    return False
