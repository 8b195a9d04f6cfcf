"""Functions of a library that make lists of calls, for ``decode/run/native_calls.py``."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

_ERROR_BYTES = 1000


@functools.cache
def functions_of(path: str) -> Any:
    """Return the library at a path, with the types of the functions that take lists by their numbers."""
    functions = ctypes.CDLL(path)
    functions.hf_fastpath_make_calls.restype = ctypes.c_int64
    functions.hf_fastpath_make_calls.argtypes = [
        *(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64),
        *(ctypes.c_char_p, ctypes.c_int64),
    ]
    functions.hf_fastpath_is_callable.restype = ctypes.c_bool
    functions.hf_fastpath_is_callable.argtypes = [ctypes.c_char_p]
    for each in (functions.hf_fastpath_release_calls, functions.hf_fastpath_drop_calls):
        each.restype, each.argtypes = None, [ctypes.c_int64]
    return functions


def make(path: str, names: Sequence[str], code: Sequence[int], reals: Sequence[float]) -> int:
    """Let the library at a path read the description of a list of calls; return the list's number.

    Args:
        names: of the ops.
        code: the description in numbers, as ``csrc/run_calls/run_calls_glue.h`` has it.
        reals: the floats that the numbers speak of.

    Raises:
        RuntimeError: the library refuses the description; the message says where.
    """
    numbers = (ctypes.c_int64 * len(code))(*code)
    floats = (ctypes.c_double * len(reals))(*reals)
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    given = "\n".join(names).encode(), numbers, len(code), floats, len(reals), error, _ERROR_BYTES
    number = functions_of(path).hf_fastpath_make_calls(*given)
    if not number:
        raise RuntimeError(error.value.decode(errors="replace"))
    return int(number)
