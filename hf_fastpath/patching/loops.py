"""Wrappers of ours around methods of ``GenerationMixin``, in place while a patched model is alive."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ..compat import GenerationMixin
from ..forks import after_fork

Loop = Callable[..., Any]
_users: weakref.WeakSet = weakref.WeakSet()
#: method of GenerationMixin -> our wrapper around it
_wrappers: dict[str, Callable[..., Any]] = {}
#: methods that GenerationMixin has of a base class
_inherited: set[str] = set()
#: guards the users and the wrappers; models may be patched in several threads
_lock = threading.RLock()


@after_fork
def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


def install_loops(user: Any, loops: dict[str, Loop]) -> None:
    """Route methods of ``GenerationMixin`` through ``loop(original, model, ...)`` while ``user`` is alive.

    transformers looks these methods up on the class, so an instance cannot override them. A wrapper keeps the
    signature, which ``generate()`` inspects. The wrapper is removed with its last user, unless another wrapper lies
    around it: then it stays and passes every call through.

    Args:
        user: the object that keeps the wrappers in place while it lives.
        loops: name of a method -> the loop that replaces it; every call gives the same names.
    """
    with _lock:
        if user not in _users:
            _users.add(user)
            weakref.finalize(user, _remove_if_unused)
        for name, loop in loops.items():
            layer = getattr(GenerationMixin, name)
            while layer is not None and layer is not _wrappers.get(name):
                layer = getattr(layer, "__wrapped__", None)
            if layer is None:
                if name not in vars(GenerationMixin):
                    _inherited.add(name)
                _wrappers[name] = _wrapped(getattr(GenerationMixin, name), loop)
                setattr(GenerationMixin, name, _wrappers[name])


def _wrapped(original: Callable[..., Any], loop: Loop) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self, *args, **kwargs):
        return loop(original, self, *args, **kwargs)

    return method


def uninstall_loops(user: Any) -> None:
    """Note that ``user`` no longer needs the wrappers."""
    _users.discard(user)
    _remove_if_unused()


def _remove_if_unused() -> None:
    with _lock:
        if any(True for _ in _users):  # len() may still count the user that is dying
            return
        for name, wrapper in list(_wrappers.items()):
            if getattr(GenerationMixin, name) is wrapper:
                if name in _inherited:
                    delattr(GenerationMixin, name)
                else:
                    setattr(GenerationMixin, name, wrapper.__wrapped__)
                del _wrappers[name]
