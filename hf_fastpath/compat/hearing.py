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
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .imported import is_elsewhere

_LOGGING = logging.__file__
_OWN = __package__.partition(".")[0] + "."
#: methods that ``dataclasses`` writes, and the beginning of the modules that ``collections.namedtuple`` makes
_WRITTEN = frozenset(f"__{name}__" for name in "init eq repr hash lt le gt ge setattr delattr".split())
_TUPLES = "namedtuple_"
#: what is called with the frame that runs code for the first time, "call" and None, as by ``sys.setprofile``
Hear = Callable[[types.FrameType, str, Any], None]
#: numbers of tools that Python gives no name to
_NUMBERS = (3, 4)


@contextmanager
def uncollected() -> Iterator[None]:
    """Let the garbage collector wait for the length of a ``with`` block, or of a function so decorated: it goes through
    all that was imported."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def hearing(hear: Hear) -> Iterator[None]:
    """Call ``hear`` for code that this thread runs in a ``with`` block, at least once for each; meanwhile the garbage
    collector, whose callbacks anybody may have registered, does not run."""
    with uncollected(), _monitoring(hear) as is_heard:
        if is_heard:
            yield
            return
        before = sys.getprofile()
        sys.setprofile(hear)
        try:
            yield
        finally:
            _profile_again(before)


# ---- sys.monitoring -------------------------------------------------------------------------------------------------


class _Listeners(threading.local):
    """Who hears this thread."""

    def __init__(self) -> None:
        self.by: list[Hear] = []


class _Listening:
    """What a block that hears holds while it runs."""


_heard = _Listeners()
_lock = threading.Lock()
_number: int | None = None  # of our tool, while anybody hears a thread
#: of all threads; weakly, so that a block whose end an interrupt has skipped is not waited for
_listening: weakref.WeakSet[_Listening] = weakref.WeakSet()


@contextmanager
def _monitoring(hear: Hear) -> Iterator[bool]:
    """Hear this thread in a ``with`` block; yields whether this Python can, and has a number for a tool left."""
    listening, by = _Listening(), _heard.by
    try:
        if is_heard := _begin(listening):
            by.append(hear)
        yield is_heard
    finally:
        if hear in by:
            by.remove(hear)
        _end(listening)


def _begin(listening: _Listening) -> bool:
    global _number
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
        _listening.add(listening)
        monitoring.restart_events()  # of code that was heard before
    return True


def _end(listening: _Listening) -> None:
    if sys.version_info < (3, 12):
        return
    with _lock:
        _listening.discard(listening)
        if not _listening:
            _end_all()


def _end_all() -> None:
    global _number
    if sys.version_info >= (3, 12) and _number is not None:
        sys.monitoring.set_events(_number, sys.monitoring.events.NO_EVENTS)
        sys.monitoring.register_callback(_number, sys.monitoring.events.PY_START, None)
        sys.monitoring.free_tool_id(_number)
        _number = None


def _begins(
    code: types.CodeType,
    offset: int,
    heard: _Listeners = _heard,  # at the end of the process, the module's names are None
    listening: weakref.WeakSet[_Listening] = _listening,
    lock: threading.Lock = _lock,
) -> Any:
    """Python calls it when code begins to run, of any thread; the result ends this for the code."""
    if not heard.by:
        if not listening and _end_all is not None and lock.acquire(blocking=False):
            try:  # an interrupt has skipped the end of the last block
                _end_all()
            finally:
                lock.release()
        return None
    frame = sys._getframe(1)
    for hear in heard.by:
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


# ---- whose code it is -----------------------------------------------------------------------------------------------


def module_of(frame: types.FrameType) -> tuple[str, str] | None:
    """Return the module whose code begins to run, and the file with this code, "" if the module's classes have it
    written; None for code of PyTorch, Python and this package."""
    code, caller = frame.f_code, frame.f_back
    name, file = str(frame.f_globals.get("__name__")), code.co_filename
    if not is_elsewhere(file) or name.startswith(_OWN):
        return None
    if not file.startswith("<"):
        return name, file
    if name.startswith(_TUPLES) or caller is None or not is_elsewhere(caller.f_code.co_filename):
        return None
    return name, "" if code.co_name in _WRITTEN else file
