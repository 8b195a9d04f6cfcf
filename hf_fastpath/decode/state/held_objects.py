"""Which objects containers hold, and whether they still hold the same: a comparison of pointers, by native code."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from typing import Any

from torch import nn

from ...native import loader

#: as in same_objects.cpp: what is compared of a container
_ITEMS_OF_DICT, _LIST, _ATTRIBUTES, _CHOSEN_ITEMS = range(4)
_PYTHON = (
    *("PyDict_Size", "PyDict_GetItem", "PyDict_Next", "PyList_Size", "PyList_GetItem"),
    *("PyObject_GenericGetDict", "PyObject_Type", "Py_DecRef"),
)
#: stands where any object may be
_ANY = object()
#: ends names and values that were chosen
_END = object()


class HeldObjects:
    """Dicts, lists and modules with the objects that they hold now; dicts in the order of their keys.

    The containers and the objects stay alive with this.

    Attributes:
        containers: all of them.
    """

    def __init__(self) -> None:
        self.containers: list[Any] = []
        self._kinds, self._sizes, self._starts = array("B"), array("q"), array("q")
        self._before: list[Any] = []
        self._chosen: dict[int, tuple[str, ...]] = {}  # place of a container -> names

    def items_of(self, space: dict, but_for: Collection[str] = ()) -> None:
        """Know a dict by its keys and values; values of some names may be any."""
        self._add(_ITEMS_OF_DICT, space)
        for name, value in tuple(dict.items(space)):  # another thread may write to it meanwhile
            self._before += (name, _ANY if name in but_for else value)

    def chosen_items_of(self, space: dict, names: Iterable[str]) -> None:
        """Know a dict by its size and by the values of some names."""
        self._chosen[len(self.containers)] = names = tuple(names)
        self._add(_CHOSEN_ITEMS, space)
        self._before += _chosen(space, names)

    def entries_of(self, entries: list) -> None:
        """Know a list by its entries."""
        self._add(_LIST, entries)
        self._before += list.__iter__(entries)

    def attributes_of(self, module: nn.Module) -> None:
        """Know a module by its type and by the dict that holds its attributes, not by what this holds."""
        self._add(_ATTRIBUTES, module)
        self._before += _objects(module)

    def _add(self, kind: int, container: Any) -> None:
        self.containers.append(container)
        self._kinds.append(kind)
        self._sizes.append(_size(container))
        self._starts.append(len(self._before))

    def differing(self) -> Iterable[tuple[Any, list[Any], list[Any]]]:
        """Yield the containers that hold other objects than they held, with what they hold and with what they held: the
        keys and values of a dict in turn, without those that may be any; or how many these are, if that has changed."""
        place, count = -1, len(self.containers)
        while (place := self._first_changed(place + 1)) < count:
            container, now = self.containers[place], list(self._objects_of(place))
            end = self._starts[place + 1] if place + 1 < count else len(self._before)
            before = self._before[self._starts[place] : end]
            if (size := _size(container)) != self._sizes[place]:
                now, before = [size], [self._sizes[place]]
            else:
                kept = [number for number, each in enumerate(before) if each is not _ANY]
                now, before = [now[number] for number in kept], [before[number] for number in kept]
            yield container, now, before

    @functools.cached_property
    def _first_changed(self) -> Callable[[int], int]:
        """Return a function that gives the first container from a place on that holds other objects."""
        found = _native()
        if found is None:
            return self._first_changed_in_python
        function, python = found
        before = _addresses(self._before)
        arguments = [python, _addresses(self.containers)]
        arguments += [(kind * len(held)).from_buffer(held) for kind, held in self._numbers()]
        return functools.partial(function, *arguments, before, len(self.containers))

    def _numbers(self) -> list[tuple[Any, array]]:
        return [(ctypes.c_uint8, self._kinds), (ctypes.c_int64, self._sizes), (ctypes.c_int64, self._starts)]

    def _first_changed_in_python(self, begin: int) -> int:
        if begin == 0 and self._hold():
            return len(self.containers)
        for place in range(begin, len(self.containers)):
            container, start = self.containers[place], self._starts[place]
            if _size(container) != self._sizes[place]:
                return place
            if not all(map(_is_same, self._objects_of(place), self._before[start:])):
                return place
        return len(self.containers)

    def _hold(self) -> bool:
        """Whether all containers hold what they held; if not, they may all the same."""
        if list(map(_size, self.containers)) != self._sizes.tolist():
            return False
        now = chain.from_iterable(map(self._objects_of, range(len(self.containers))))
        return all(map(_is_same, now, self._before))

    def _objects_of(self, place: int) -> Iterable[Any]:
        """Return what a container holds now, as :attr:`_before` has what it held."""
        names, container = self._chosen.get(place), self.containers[place]
        return _objects(container) if names is None else _chosen(container, names)


def _chosen(space: dict, names: Iterable[str]) -> list[Any]:
    return [*chain.from_iterable((name, dict.get(space, name)) for name in names), _END]


def _is_same(now: Any, before: Any) -> bool:
    return now is before or before is _ANY


def _size(container: Any) -> int:
    if isinstance(container, nn.Module):
        return 2
    return dict.__len__(container) if isinstance(container, dict) else list.__len__(container)


def _objects(container: Any) -> Iterable[Any]:
    """Return a list's entries, a dict's keys and values in turn, or a module's dict of attributes and type."""
    if isinstance(container, nn.Module):
        return vars(container), type(container)
    if isinstance(container, dict):
        return chain.from_iterable(dict.items(container))
    return list.__iter__(container)


def _addresses(objects: list[Any]) -> ctypes.Array:
    """Return pointers to objects; null pointers for the marks."""
    return (ctypes.c_void_p * len(objects))(*(None if each is _ANY or each is _END else id(each) for each in objects))


def _native() -> tuple[Any, ctypes.Array] | None:
    """Return the native function, and what it needs of Python; None if no library is loaded that has it."""
    return next((_function_of(each.detail) for each in loader.status().values() if each.native), None)


@functools.cache
def _function_of(path: str) -> tuple[Any, ctypes.Array]:
    function = ctypes.PyDLL(path).hf_fastpath_first_changed
    function.restype = ctypes.c_int64
    function.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 2
    found = (ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in _PYTHON)
    return function, (ctypes.c_void_p * len(_PYTHON))(*found)
