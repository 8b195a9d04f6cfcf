"""Bytes of the C library's heap that the process holds, exactly: memory that native code does not free stays there."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import pytest


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _info() -> _Mallinfo:
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("the C library has no mallinfo2 (glibc from 2.33 on has)")
    library.mallinfo2.restype = _Mallinfo
    gc.collect()
    return library.mallinfo2()


def held_bytes() -> int:
    """Return the bytes in use in all arenas, and in blocks mapped by themselves, after Python has collected garbage."""
    info = _info()
    return info.uordblks + info.hblkhd


def mapped_blocks() -> int:
    """Return how many blocks are mapped by themselves, outside of the heap."""
    return _info().hblks


def growth(call: Callable[[], object], times: int, windows: int = 3) -> int:
    """Return the least growth of the heap over ``times`` calls, of several such windows in a row after a warm-up.

    Every window shows what a call leaks; memory that is kept once, for later calls, does not come again and again.
    """
    held = []
    gc.collect()
    gc.freeze()  # what other tests have left is no garbage of these calls, and takes most of a collection's time
    for _ in range(windows + 1):
        for _ in range(times):
            call()
        held.append(held_bytes())
    return min(after - before for before, after in zip(held, held[1:]))
