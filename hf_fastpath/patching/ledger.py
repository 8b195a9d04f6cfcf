"""What ``patch()`` puts into modules, and what was there before."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from .. import compat
from ..replacing.quantizing import Replaced, places_of
from ..replacing.repacking import RemovedHooks


class _Absent:
    """Marks an attribute that a module's ``__dict__`` did not have."""

    def __copy__(self) -> _Absent:
        return self

    def __deepcopy__(self, memo: dict) -> _Absent:
        return self


_ABSENT = _Absent()
#: a module, the forward that its ``__dict__`` held before, or the mark of none, and ours
_Forward = tuple[nn.Module, Any, Any]
#: all forwards of ours, and those of them that are out
Out = tuple[list[_Forward], list[_Forward]]


class Ledger:
    """Everything that was put into one model's modules, in the order in which it was done, so that it can be undone.

    The ledger has no lock of its own: ``patch()`` and ``unpatch()`` write it while no other thread runs the model.

    Attributes:
        replaced: layers whose place quantized layers have taken.
        removed_hooks: hooks of a checkpoint's package, removed because none of that package's layers is left.
    """

    def __init__(self) -> None:
        #: (module, attribute, the value that the module's ``__dict__`` held before, or the mark of none)
        self._entries: list[tuple[nn.Module, str, Any]] = []
        self._forwards: list[_Forward] = []  # those of the entries that a forward can do without
        self._gates: list[nn.Module] = []  # modules whose forwards decide whether those inside step aside
        self.replaced: list[Replaced] = []
        self.removed_hooks: list[RemovedHooks] = []

    @property
    def first(self) -> nn.Module | None:
        """The module that got the first entry."""
        return self._entries[0][0] if self._entries else None

    def claim(self, module: nn.Module, name: str, value: Any) -> bool:
        """Do as :meth:`put`, or return False if ``module`` has something of that name: of two threads, one succeeds."""
        self._entries.append((module, name, _ABSENT))
        if vars(module).setdefault(name, value) is value:
            return True
        self._entries.pop()
        return False

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        """Put ``value`` over ``module``'s attribute and remember what was there."""
        previous = vars(module).get(name, _ABSENT)
        self._entries.append((module, name, previous))
        vars(module)[name] = value
        if name == "forward" and _is_ours(value):
            self._forwards.append((module, previous, value))

    def bind(self, module: nn.Module, name: str, function: Callable[..., Any], is_gate: bool = False) -> None:
        """Put a bound method in place, as :meth:`put`.

        Args:
            is_gate: it is a forward that decides whether the modules inside step aside.
        """
        self.put(module, name, MethodType(function, module))
        if is_gate:
            self._gates.append(module)

    @property
    def num_forwards(self) -> int:
        """How many modules have forwards of ours."""
        return sum(name in compat.FORWARD_ATTRIBUTES for _, name, _ in self._entries)

    def take_forwards_out(self, but_gates: bool = False) -> Out:
        """Let modules have the forwards that they had before; return what :meth:`put_forwards_back` takes.

        Args:
            but_gates: forwards that decide whether the modules inside step aside stay.
        """
        out = []
        for module, previous, ours in self._forwards:
            if but_gates and any(each is module for each in self._gates):
                continue
            contents = vars(module)
            held = contents.get("forward")
            if held is ours or _is_ours(held):  # a copy of the model has other bound methods
                _restore(contents, "forward", previous)
                out.append((module, previous, held))
        return self._forwards, out

    def put_forwards_back(self, given: Out) -> None:
        """Undo :meth:`take_forwards_out`, but for modules that were unpatched or have got other forwards since."""
        known, out = given
        if known is not self._forwards:
            return
        for module, previous, ours in out:
            contents = vars(module)
            if contents.get("forward", _ABSENT) is previous:
                contents["forward"] = ours

    def before(self, module: nn.Module) -> dict[str, Any]:
        """Return a copy of the module's ``__dict__`` as it was before anything was put into it."""
        contents = dict(vars(module))
        for each, name, previous in reversed(self._entries):
            if each is module:
                _restore(contents, name, previous)
        return contents

    def bring_layers_back(self, model: nn.Module | None) -> None:
        """Undo replacements of layers of ``model``, the last one first."""
        places = places_of(model) if self.replaced and model is not None else {}
        while self.replaced:
            each = self.replaced.pop()
            each.undo(places.get(id(each.packed), ()))
        while self.removed_hooks:
            self.removed_hooks.pop().undo()

    def undo(self) -> None:
        """Restore every attribute, the last one first, unless the user has set it to something else since."""
        self._forwards, self._gates = [], []
        while self._entries:
            module, name, previous = self._entries[-1]
            if _is_ours(vars(module).get(name)):
                _restore(vars(module), name, previous)
            elif name in compat.FORWARD_ATTRIBUTES:
                _unwrap_forward(module)
            self._entries.pop()


def _restore(contents: dict, name: str, previous: Any) -> None:
    if previous is _ABSENT:
        contents.pop(name, None)
    else:
        contents[name] = previous


def _is_ours(value: Any) -> bool:
    """Whether a value is a method of ours, or an object of one of our classes."""
    return compat.is_ours(getattr(value, "__func__", type(value)))


def _unwrap_forward(module: nn.Module) -> None:
    """Remove our forward from where an accelerate hook, added or removed since ``patch()``, has stored it."""
    for name in compat.FORWARD_ATTRIBUTES:
        if _is_ours(vars(module).get(name)):
            vars(module)[name] = MethodType(type(module).forward, module)
