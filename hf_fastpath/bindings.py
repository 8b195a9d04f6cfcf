"""What ``patch()`` puts into the ``__dict__`` of modules, and what was there before; copies and pickles of them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from . import compat
from .forwards import KEY, STATE_KEY, ModulePatch
from .patch_state import PatchState, state_of


class _Absent:
    """Marks an attribute that a module's ``__dict__`` did not have."""

    def __copy__(self) -> _Absent:
        return self

    def __deepcopy__(self, memo: dict) -> _Absent:
        return self


_ABSENT = _Absent()


def bind_value(state: PatchState, module: nn.Module, name: str, value: Any) -> None:
    """Put ``value`` over ``module``'s attribute and remember what was there."""
    state.bindings.append((module, name, vars(module).get(name, _ABSENT)))
    vars(module)[name] = value


def claim(state: PatchState, model: nn.Module) -> bool:
    """Put ``state`` onto a model, as :func:`bind_value` does; False if the model has another one: of two threads, one
    succeeds."""
    state.bindings.append((model, STATE_KEY, _ABSENT))
    if vars(model).setdefault(STATE_KEY, state) is state:
        return True
    state.bindings.pop()
    return False


def bind(state: PatchState, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Put a bound method over ``module``'s attribute and remember what was there."""
    bind_value(state, module, name, MethodType(function, module))


def bind_forward(state: PatchState, forward: Callable[..., Any], part: Any) -> None:
    """Bind a forward of :mod:`.forwards` to the part's module."""
    module = part.module
    names = tuple(inspect.signature(type(module).forward).parameters)[2:]
    bind_value(state, module, KEY, ModulePatch(state, part, names))
    bind(state, module, compat.forward_attribute(module), forward)
    bind_copying(state, module)


def bind_copying(state: PatchState, module: nn.Module) -> None:
    """Pickles come out stock, deep copies stay patched; both look these methods up on the instance."""
    bind(state, module, "__getstate__", _getstate)
    bind(state, module, "__deepcopy__", _deepcopy)


def _getstate(self: nn.Module) -> dict:
    """The module's ``__dict__`` as it was before ``patch()``, for pickle and ``copy.copy``."""
    contents = dict(vars(self))
    state = state_of(self) or contents[KEY].state
    for module, name, previous in reversed(state.bindings):
        if module is self:
            _restore(contents, name, previous)
    return contents


def _restore(contents: dict, name: str, previous: Any) -> None:
    if previous is _ABSENT:
        contents.pop(name, None)
    else:
        contents[name] = previous


def _deepcopy(self: nn.Module, memo: dict) -> nn.Module:
    """A copy of a patched model is patched; a copy of one of its modules alone is stock."""
    state = state_of(self)
    made = self.__class__.__new__(self.__class__)
    memo[id(self)] = made
    contents = vars(self)
    if state is not None:
        memo[id(state)] = PatchState(state.options)  # the modules' patches, copied next, lead here
    elif id(contents[KEY].state) not in memo:
        contents = _getstate(self)
    vars(made).update(copy.deepcopy(contents, memo))
    if state is not None:
        state.copy_into(memo[id(state)], memo)
    return made


def undo_bindings(state: PatchState) -> None:
    """Put back what was bound, the last first, unless the user has put something else there since."""
    while state.bindings:
        module, name, previous = state.bindings[-1]
        if _is_ours(vars(module).get(name)):
            _restore(vars(module), name, previous)
        elif name in compat.FORWARD_ATTRIBUTES:
            _unwrap_forward(module)
        state.bindings.pop()


def _is_ours(value: Any) -> bool:
    function = getattr(value, "__func__", None)
    return isinstance(value, (ModulePatch, PatchState)) or compat.is_ours(function)


def _unwrap_forward(module: nn.Module) -> None:
    """Take our forward from where an accelerate hook that came or went since ``patch()`` has put it."""
    for name in compat.FORWARD_ATTRIBUTES:
        if _is_ours(vars(module).get(name)):
            vars(module)[name] = MethodType(type(module).forward, module)
