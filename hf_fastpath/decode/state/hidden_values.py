"""What values hold elsewhere than in attributes: in memory of types of C, by the thread that asks, or by a reference
that does not keep what it leads to."""

from __future__ import annotations

import contextvars
import functools
import threading
import types
import weakref
from contextlib import suppress
from typing import Any

_WEAK = weakref.WeakValueDictionary, weakref.WeakKeyDictionary
_PROXIES = weakref.ProxyType, weakref.CallableProxyType
#: what stands for other objects, which may differ by thread and context
_REFERENCES = frozenset({contextvars.ContextVar, threading.local, weakref.ref, *_WEAK, *_PROXIES})
#: types of C whose text says all that they hold
_TEXTS = (int, float, complex, str, bytes)
#: types of C that hold nothing but attributes, or nothing that is computed with
_OPEN = object, types.SimpleNamespace, functools._lru_cache_wrapper


def is_reference(value: Any) -> bool:
    """Whether :func:`behind` says what a value stands for; a kind of reference that makes objects is none."""
    return isinstance(value, threading.local) or type(value) in _REFERENCES


def behind(value: Any) -> list[Any]:
    """Return what a context variable, a thread's namespace, a weak reference or a container of such stands for here
    and now."""
    if isinstance(value, contextvars.ContextVar):
        with suppress(LookupError):
            return [value.get()]
        return []
    if isinstance(value, threading.local):
        space = vars(value)
        return [*space, *space.values()]
    if isinstance(value, _WEAK):
        return [*value.keys(), *value.values()]
    if type(value) in _PROXIES:
        with suppress(ReferenceError):
            return [value.__init__.__self__]
        return []
    return [value()]


def text_of(value: Any) -> str | None:
    """Return what a value of a subclass of a number, text or bytes is beside its attributes; None for other values."""
    return next((each.__repr__(value) for each in _TEXTS if isinstance(value, each)), None)


def hides(value: Any) -> bool:
    """Whether a value has memory of a type of C beside attributes, of which nothing is known."""
    return next(filter(_is_of_c, type(value).__mro__)) not in _OPEN


def _is_of_c(cls: type) -> bool:
    """Whether a class is none that a ``class`` statement has made: it makes its objects itself."""
    return isinstance(vars(cls).get("__new__"), types.BuiltinFunctionType)


def slots_of(cls: type) -> list[str]:
    """Return the names of the attributes for which a class, but for those that it inherits from, has slots."""
    names = vars(cls).get("__slots__", ())
    names = [names] if isinstance(names, str) else names
    owner = cls.__name__.lstrip("_")
    names = [f"_{owner}{name}" if name.startswith("__") and not name.endswith("__") else name for name in names]
    return [name for name in names if not name.startswith("__")]


def read_slots(value: Any, names: tuple[str, ...]) -> list[Any]:
    """Return what slots hold, None if nothing."""
    return [getattr(value, name, None) for name in names]
