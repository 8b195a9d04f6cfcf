"""Whether Python values that a walk has met are as they were, in a fraction of a millisecond."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from ... import compat
from .held_objects import HeldObjects
from .python_state import BOOKKEEPING, OF_FUNCTIONS, Walk, is_left_out

#: what modules hold of each other and of tensors, and their hooks
_HELD = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
#: classes of PyTorch's of which there are many -> the attributes that are read of them
_READ: dict[type, frozenset[str]] = {
    **dict.fromkeys((nn.ModuleList, nn.ModuleDict), frozenset({"_modules"})),
    nn.ParameterList: frozenset({"_parameters", "_size"}),
    nn.ParameterDict: frozenset({"_parameters", "_keys"}),
    nn.Identity: frozenset({*_HELD[3:], "training"}),
    nn.Linear: frozenset({"_parameters", *_HELD[3:], "training"}),
}

#: attributes of these; a module that has more (a forward of its own, say) is compared as a whole
_USUAL = BOOKKEEPING | {"training", "in_features", "out_features", "_size", "_keys"}

#: behind all elements, of which there may be more later
_END = object()


class Watch:
    """Whether what a walk has met is as it was: True is certain, False is not.

    Objects are compared by identity; where another object is in an object's place, by what a walk through both finds.

    Args:
        walk: just made.
        facts: gives further values, which are compared.
        restless: attributes that change and do not matter, each as the id of its module and its name.
    """

    def __init__(
        self, walk: Walk, facts: Callable[[], Any] = lambda: None, restless: Collection[tuple[int, str]] = frozenset()
    ):
        self._walk, self._more_facts = walk, facts
        self._spaces = list(map(vars, walk.owners))
        self._held = HeldObjects()
        for module in walk.modules:
            self._hold_module(module, {name for place, name in restless if place == id(module)})
        for container in (*walk.dicts, *walk.rows):
            if isinstance(container, dict):
                self._held.items_of(container)
            elif isinstance(container, list):
                self._held.entries_of(container)
        self._sets = [(each, list(each)) for each in walk.rows if isinstance(each, (set, deque))]
        self._types = list(map(type, walk.owners))
        ordered = (each for each in self._held.containers if isinstance(each, OrderedDict) and len(each) > 1)
        self._ordered = [(each, list(OrderedDict.keys(each))) for each in ordered]
        self._sizes = list(map(len, walk.namespaces))
        # of one name a getter would give no tuple
        self._getters = [(itemgetter(*names, names[0]), space) for names, space, module in walk.named if module is None]
        self._tensors = list(walk.tensors.values())
        self._is_local = all(map(_is_ordinary, self._tensors))
        self._are_without_data = any(map(is_fake, self._tensors))
        self._elements_before = list(self._elements())
        is_known = self._is_local and not self._are_without_data
        self._layouts_hold = compat.layouts_hold(self._tensors) if is_known else None
        self._layouts, self._facts = self._layouts_now(), self._facts_now()

    def _hold_module(self, module: nn.Module, restless: Collection[str]) -> None:
        space = vars(module)
        self._held.attributes_of(module)
        read = _READ.get(type(module))
        if read is not None and read <= space.keys() <= _USUAL:
            for name in read:
                if isinstance(space[name], dict):
                    self._held.items_of(space[name])
            self._held.chosen_items_of(space, read)
            return
        for name in _HELD:
            self._held.items_of(space[name])
        changing = (name for name in list(space) if name in compat.FORWARD_NOTES or is_left_out(name))
        self._held.items_of(space, {*changing, *restless} - BOOKKEEPING)

    def holds(self) -> bool:
        """Whether everything is as it was."""
        walk = self._walk
        try:
            return (
                all(_are_alike(*found) for found in self._held.differing())
                and all(map(is_, map(vars, walk.owners), self._spaces))
                and list(map(len, walk.namespaces)) == self._sizes
                and all(map(is_, self._elements(), self._elements_before))
                and list(map(type, walk.owners)) == self._types
                and all(len(now) == len(before) and all(map(is_, now, before)) for now, before in self._sets)
                and all(list(OrderedDict.keys(now)) == before for now, before in self._ordered)
                and all(now == before for now, before in walk.many)
                and all(read() == before for read, before in walk.numbers)
                and self._facts_now() == self._facts
                and ((self._layouts_hold is not None and self._layouts_hold()) or self._layouts_now() == self._layouts)
            )
        except Exception:  # something is gone, or was replaced by what cannot be compared
            return False

    def _elements(self) -> Iterator[Any]:
        walk = self._walk
        return chain(
            chain.from_iterable([getter(space) for getter, space in self._getters]),
            chain.from_iterable([space.values() for space in walk.namespaces]),
            [cell.cell_contents for cell in walk.cells] if walk.cells else (),
            chain.from_iterable(map(OF_FUNCTIONS, walk.functions)),
            chain.from_iterable([read() for read in walk.readers]),
            (_END,),
        )

    def _locals(self) -> list[torch.Tensor]:
        return self._tensors if self._is_local else list(map(compat.local_tensor, self._tensors))

    def _facts_now(self) -> tuple:
        """Return where tensors are."""
        if self._are_without_data:
            return ()
        return list(map(torch.Tensor.data_ptr, self._locals())), self._more_facts()

    def _layouts_now(self) -> tuple:
        """Return of which types tensors are, and how their elements lie."""
        if self._are_without_data:
            return ()
        tensors = self._locals()
        return (
            [each.dtype for each in tensors],
            [each.shape for each in tensors],
            list(map(torch.Tensor.stride, tensors)),
        )


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return compat.local_tensor(tensor) is tensor


def _are_alike(container: Any, now: list[Any], before: list[Any]) -> bool:
    """Whether a container holds values that are what those that it held are, each in its place."""
    if len(now) != len(before):
        return False
    pairs = ((new, old) for new, old in zip(now, before) if new is not old)
    return all(_are_same_names(new, old) or Walk().frozen(new) == Walk().frozen(old) for new, old in pairs)


def _are_same_names(new: Any, old: Any) -> bool:
    """Whether both are lists of the same strings."""
    return type(new) is list and type(old) is list and new == old and all(type(each) is str for each in chain(new, old))
