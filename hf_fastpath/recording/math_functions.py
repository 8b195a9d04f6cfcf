"""Functions of ``math`` that keep the formula of a length, while a step is recorded."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: functions that would look at the number behind a length
_FUNCTIONS = ("sqrt", "log2", "log10", "log")


class _Replaced:
    """Functions of ``math`` while steps are recorded, in any number of threads: the last puts back what was there."""

    lock = threading.Lock()
    count = 0
    before: dict[str, Callable[..., float]] = {}


@contextmanager
def functions_of_lengths() -> Iterator[None]:
    """Let functions of ``math`` keep the formula of a length, for the length of a ``with`` block."""
    with _Replaced.lock:
        _Replaced.count += 1
        if _Replaced.count == 1:
            _Replaced.before = {name: getattr(math, name) for name in _FUNCTIONS}
            for name, function in _Replaced.before.items():
                setattr(math, name, functools.partial(_kept_formula, name, function))
    try:
        yield
    finally:
        with _Replaced.lock:
            _Replaced.count -= 1
            if not _Replaced.count:
                for name, function in _Replaced.before.items():
                    setattr(math, name, function)


def _kept_formula(name: str, function: Callable[..., float], *given: Any) -> Any:
    if not any(isinstance(each, (torch.SymInt, torch.SymFloat)) for each in given):
        return function(*given)
    if name == "sqrt":
        return torch.sym_sqrt(given[0])
    of_two = _log2(given[0])
    if name == "log2":
        return of_two
    return of_two / (_log2(10) if name == "log10" else _log2(*given[1:]) if len(given) > 1 else math.log2(math.e))


def _log2(value: Any) -> Any:
    is_length = isinstance(value, (torch.SymInt, torch.SymFloat))
    return torch._sym_log2(value) if is_length else math.log2(value)  # type: ignore[attr-defined]
