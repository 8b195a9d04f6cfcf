"""What a model's code keeps of a recording in places that were there before: globals, classes, containers, caches of
functions. It is taken out again, as other models and stock code would find tensors without data there."""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..decode.state.python_state import Walk
from .numbers_of_lengths import known

_LENGTHS = torch.SymInt, torch.SymFloat, torch.SymBool
#: what a recording makes, and nobody else
_OF_RECORDING = FakeTensor, *_LENGTHS
_CACHED = functools._lru_cache_wrapper
#: containers inside of each other, in a cache of a function
_DEEPEST = 6
_ABSENT = object()


class FirstUses:
    """What there is before code runs that may fill it.

    Args:
        modules: those that run.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self._spaces: dict[int, tuple[str, Any, dict[str, Any]]] = {}
        self._containers: list[tuple[Any, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._seen = 0, 0, 0
        for cls in {base for module in modules for base in type(module).__mro__ if base not in nn.Module.__mro__}:
            self.note(f"{cls.__module__}.{cls.__qualname__}", cls, vars(cls))

    def note(self, where: str, owner: Any, space: Mapping[str, Any]) -> None:
        """Note what a namespace holds, if nobody has noted it yet.

        Args:
            owner: the namespace, or the class that has it.
        """
        if id(owner) not in self._spaces:
            self._spaces[id(owner)] = where, owner, dict(space)

    def follow(self, walk: Walk) -> None:
        """Note the containers and cells that a walk has met since the last time."""
        rows, dicts, cells = self._seen
        for container in (*walk.rows[rows:], *walk.dicts[dicts:]):
            self._containers.append((container, container.copy() if hasattr(container, "copy") else list(container)))
        self._cells += [(cell, cell.cell_contents) for cell in walk.cells[cells:]]
        self._seen = len(walk.rows), len(walk.dicts), len(walk.cells)

    def undo(self) -> list[tuple[str, Any]]:
        """Put everything back as it was where something of a recording is.

        Returns:
            What was found, but in caches of functions, which may compute their results again: where, and the value.
        """
        found: list[tuple[str, Any]] = []
        for where, owner, before in list(self._spaces.values()):
            space = vars(owner) if isinstance(owner, type) else owner
            for name, value in list(space.items()):
                if isinstance(value, _CACHED):
                    _clear(value)
                elif _is_of_recording(value):
                    found.append((f"{where}.{name}", value))
                    _put(owner, name, before.get(name, _ABSENT))
                elif type(value) in (list, dict, set, deque) and before.get(name, _ABSENT) is not value:
                    if any(map(_is_of_recording, _values(value))):  # a container that is new as a whole
                        found += [(f"{where}.{name}", each) for each in _values(value) if _is_of_recording(each)]
                        _put(owner, name, before.get(name, _ABSENT))
        for container, copied in self._containers:
            for value in list(_values(container)):
                if isinstance(value, _CACHED):
                    _clear(value)
            theirs = [each for each in _inside(container) if _is_of_recording(each)]
            if theirs:
                found += [("a container that the code reads", each) for each in theirs]
                _restore(container, copied)
        for cell, before in self._cells:
            if _is_of_recording(cell.cell_contents):
                found.append(("a function's closure", cell.cell_contents))
                cell.cell_contents = before
        return found


def forget_lengths(modules: Iterable[nn.Module]) -> None:
    """Put plain numbers in the place of lengths that modules keep."""
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, _LENGTHS):
                number = known(value)
                vars(module)[name] = number if isinstance(number, bool) else type(number).__mro__[-2](number)


def _is_of_recording(value: Any) -> bool:
    return isinstance(value, _OF_RECORDING)


def _values(container: Any) -> Collection[Any]:
    return container.values() if isinstance(container, dict) else container


def _inside(container: Any) -> Iterator[Any]:
    """Yield what a container holds, and what tuples in it hold."""
    for value in _values(container):
        yield from value if isinstance(value, tuple) else (value,)


def _put(owner: Any, name: str, value: Any) -> None:
    is_class = isinstance(owner, type)
    if value is _ABSENT:
        delattr(owner, name) if is_class else owner.pop(name, None)
    elif is_class:
        setattr(owner, name, value)
    else:
        owner[name] = value


def _restore(container: Any, copied: Any) -> None:
    if isinstance(container, list):
        container[:] = copied
        return
    container.clear()
    fill: Callable[[Any], None] = container.extend if isinstance(container, deque) else container.update
    fill(copied)


def _clear(function: Any) -> None:
    """Empty the cache of a function that holds something of a recording.

    Objects are looked at by their types, all of one depth at once: a cache may hold thousands of words.
    """
    level, seen = [function], {id(vars(function))}
    for _ in range(_DEEPEST + 1):
        held = gc.get_referents(*level)
        kinds = set(map(type, held))
        if any(issubclass(kind, _OF_RECORDING) for kind in kinds):
            function.cache_clear()
            return
        inside = {kind for kind in kinds if issubclass(kind, (dict, list, tuple)) or kind.__name__ == "_lru_list_elem"}
        level = list({id(each): each for each in held if type(each) in inside and id(each) not in seen}.values())
        seen.update(map(id, level))
        if not level:
            return
