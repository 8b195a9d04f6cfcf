"""Whether Python values that a walk has met are as they were, in a fraction of a millisecond."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from .. import compat
from .python_state import BOOKKEEPING, OF_FUNCTIONS, SIZES_ALONE, Walk, items_of

#: classes of PyTorch's that only hold others
_NEVER_CALLED = frozenset({nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict})
#: what modules hold of each other and of tensors, and their hooks
_HELD, _HOOKS = ("_parameters", "_buffers", "_modules"), ("_forward_hooks", "_forward_pre_hooks")
#: attributes that change and do not matter
_NOTES = compat.FORWARD_NOTES | {compat.GENERATION_DEFAULTS}


class Watch:
    """Whether what a walk has met is as it was: True is certain, False is not.

    Values are compared by ``==``, which looks at identities first and takes a tenth of the time that Python code would
    take. Of tensors that are not identical ``==`` raises an error, which is a change. Identities are compared of
    numbers, as 0 is equal to 0.0 and to -0.0, and of tensors of one element.

    Args:
        walk: just made.
        facts: gives further values, which are compared.
        restless: attributes that change and do not matter, each as the id of its module and its name.
    """

    def __init__(
        self, walk: Walk, facts: Callable[[], Any] = lambda: None, restless: Collection[tuple[int, str]] = frozenset()
    ):
        self._walk, self._more_facts = walk, facts
        spaces = list(map(vars, walk.modules))
        by_name = {
            *(place for place, _ in restless),
            *(id(each) for each, space in zip(walk.modules, spaces) if _is_by_name(space)),
        }
        called = [place for place, each in enumerate(walk.modules) if type(each) not in _NEVER_CALLED]
        self._called = [walk.modules[place] for place in called]
        self._types = list(map(type, self._called))
        whole = [place for place in called if _more_than_sizes(walk.modules[place])]
        whole = [place for place in whole if id(walk.modules[place]) not in by_name]
        sized = [spaces[place] for place in sorted({*called}.difference(whole))]
        held = [space[name] for space in spaces for name in _HELD]
        held += [spaces[place][name] for place in called for name in _HOOKS]
        containers = [*held, *walk.dicts, *walk.rows]
        self._empty = [each for each in containers if not each]
        self._full = [*filter(None, containers), *(spaces[place] for place in whole)]
        self._before = list(map(_copied, self._full))
        self._ordered = [each for each in (*(space["_modules"] for space in spaces), *walk.dicts) if len(each) > 1]
        self._keys = list(chain.from_iterable(self._ordered))
        self._exact = [each for each in containers if any(map(_is_lax, _values(each)))]
        self._sized = [*sized, *walk.namespaces]
        self._sizes = list(map(len, self._sized))
        self._getters = []
        for names, space, module in walk.named:
            names = [name for name in names if (id(module), name) not in restless]
            if module is not None and id(module) not in by_name:
                names = [name for name in names if _is_lax(space[name])]
            if names:  # of one name a getter would give no tuple
                self._getters.append((itemgetter(*names, names[0]), space))
        self._tensors = list(walk.tensors.values())
        self._is_local = all(map(_is_ordinary, self._tensors))
        self._are_without_data = any(map(is_fake, self._tensors))
        self._elements_before = list(self._elements())
        self._facts = self._facts_now()

    def holds(self) -> bool:
        """Whether everything is as it was."""
        if any(self._empty):
            return False
        try:
            return (
                all(map(is_, self._elements(), self._elements_before))  # first, as ``==`` of a DTensor asks other ranks
                and self._full == self._before
                and list(chain.from_iterable(self._ordered)) == self._keys
                and list(map(len, self._sized)) == self._sizes
                and list(map(type, self._called)) == self._types
                and all(now == before for now, before in self._walk.many)
                and all(read() == before for read, before in self._walk.numbers)
                and self._facts_now() == self._facts
            )
        except Exception:  # something is gone, or was replaced by what cannot be compared
            return False

    def _elements(self) -> Iterator[Any]:
        walk = self._walk
        return chain(
            chain.from_iterable([getter(space) for getter, space in self._getters]),
            chain.from_iterable(map(_values, self._exact)),
            chain.from_iterable([space.values() for space in walk.namespaces]),
            [cell.cell_contents for cell in walk.cells] if walk.cells else (),
            chain.from_iterable(map(OF_FUNCTIONS, walk.functions)),
            chain.from_iterable([read() for read in walk.readers]),
        )

    def _facts_now(self) -> tuple:
        """Return where tensors are and of which type."""
        tensors = self._tensors if self._is_local else list(map(compat.local_tensor, self._tensors))
        if self._are_without_data:
            return ()
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        return addresses, list(map(torch.Tensor.stride, tensors)), [each.dtype for each in tensors], self._more_facts()


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return compat.local_tensor(tensor) is tensor


def _is_number(value: Any) -> bool:
    """Whether a value is a tensor of which ``==`` may come to a result without an error, or does more than compare."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.numel() <= 1 or type(value) not in (torch.Tensor, nn.Parameter)


def _is_lax(value: Any) -> bool:
    """Whether ``==`` may take another value for this one."""
    return type(value) in (int, float, complex) or _is_number(value)


def _more_than_sizes(module: nn.Module) -> bool:
    """Whether a module has attributes that its forward may read."""
    sizes = SIZES_ALONE.get(type(module))
    return sizes is None or not vars(module).keys() <= sizes | BOOKKEEPING


def _is_by_name(space: dict[str, Any]) -> bool:
    """Whether attributes of a module are looked at one by one: others change, or are tensors of one element."""
    return not _NOTES.isdisjoint(space) or any(map(_is_number, space.values()))


def _values(container: Any) -> Any:
    return dict.values(container) if isinstance(container, dict) else container


def _copied(container: Any) -> Any:
    """Return a shallow copy that ``==`` compares with the container."""
    if isinstance(container, dict):
        return dict(items_of(container))
    return list.copy(container) if isinstance(container, list) else container.copy()
