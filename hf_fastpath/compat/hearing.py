"""Hear which Python code runs: that of a forward, and none of what the process runs by the way.

Python 3.12 tells of each code once (``sys.monitoring``), which costs nothing behind that. Older ones tell of each call
(``sys.setprofile``), also of those inside of PyTorch, during which hearing has to be paused.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_LOGGING = logging.__file__
#: what is called with the frame that runs code for the first time, "call" and None, as by ``sys.setprofile``
Hear = Callable[[types.FrameType, str, Any], None]
#: numbers of tools that Python gives no name to
_NUMBERS = (3, 4)


@contextmanager
def hearing(hear: Hear) -> Iterator[None]:
    """Call ``hear`` for code that this thread runs in a ``with`` block, at least once for each; meanwhile the garbage
    collector, whose callbacks anybody may have registered, does not run."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with _monitoring(hear) as is_heard:
            if is_heard:
                yield
                return
            before = sys.getprofile()
            sys.setprofile(hear)
            try:
                yield
            finally:
                _profile_again(before)
    finally:
        if collects:
            gc.enable()


# ---- sys.monitoring -------------------------------------------------------------------------------------------------


class _Listeners(threading.local):
    """Who hears this thread."""

    def __init__(self) -> None:
        self.by: list[Hear] = []


_heard = _Listeners()
_lock = threading.Lock()
_number: int | None = None  # of our tool, while anybody hears a thread
_hearing = 0


@contextmanager
def _monitoring(hear: Hear) -> Iterator[bool]:
    """Hear this thread in a ``with`` block; yields whether this Python can, and has a number for a tool left."""
    if not _begin():
        yield False
        return
    _heard.by.append(hear)
    try:
        yield True
    finally:
        _heard.by.remove(hear)
        _end()


def _begin() -> bool:
    global _hearing, _number
    if sys.version_info < (3, 12):
        return False
    monitoring = sys.monitoring
    with _lock:
        if _number is None:
            _number = next((each for each in _NUMBERS if monitoring.get_tool(each) is None), None)
            if _number is None:
                return False
            monitoring.use_tool_id(_number, "hf_fastpath")
            monitoring.register_callback(_number, monitoring.events.PY_START, _begins)
            monitoring.set_events(_number, monitoring.events.PY_START)
        monitoring.restart_events()  # of code that was heard before
        _hearing += 1
    return True


def _end() -> None:
    global _hearing, _number
    if sys.version_info < (3, 12):
        return
    with _lock:
        _hearing -= 1
        if _hearing == 0 and _number is not None:
            sys.monitoring.set_events(_number, sys.monitoring.events.NO_EVENTS)
            sys.monitoring.register_callback(_number, sys.monitoring.events.PY_START, None)
            sys.monitoring.free_tool_id(_number)
            _number = None


def _begins(code: types.CodeType, offset: int) -> Any:
    """Python calls it when code begins to run, of any thread; the result ends this for the code."""
    if not _heard.by:
        return None
    frame = sys._getframe(1)
    for hear in _heard.by:
        hear(frame, "call", None)
    return sys.monitoring.DISABLE if sys.version_info >= (3, 12) else None


# ---- sys.setprofile -------------------------------------------------------------------------------------------------


@contextmanager
def unheard() -> Iterator[None]:
    """Pause what hears every call of this thread, the user's profiler among these, in a ``with`` block: inside of
    PyTorch's code it would take as long as all else. What hears code once goes on."""
    if _heard.by or (before := sys.getprofile()) is None:
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        _profile_again(before)


def _profile_again(profiler: Any) -> None:
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
