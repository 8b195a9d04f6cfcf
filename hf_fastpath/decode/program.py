"""A list of op calls, written down once and made often."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from .. import ops

#: ops whose second argument is the matrix they read
_PRODUCTS = (ops.gemv.overload, ops.gemv_swiglu.overload, ops.qkv_rope_append.overload)
#: ops whose last argument is the matrix that the next call reads, if that is one of these
_BRING_NEXT = dict.fromkeys(_PRODUCTS[:2], _PRODUCTS) | {ops.packed_gemv.overload: (ops.packed_gemv_swiglu.overload,)}


class Register:
    """Stands for a value that only exists once a program runs."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


class Program:
    """A list of calls over numbered registers."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        #: function, arguments, where values go (a list, a place in it, a register), register of the result
        self._calls: list[tuple[Callable[..., Any], list[Any], list[tuple[list, int, int]], int]] = []
        self._read_last: list[list[int]] | None = None  # registers that no call behind a call reads

    def register(self, value: Any = None) -> Register:
        """A new register, holding ``value``."""
        self.values.append(value)
        return Register(len(self.values) - 1)

    def emit(self, op: Callable[..., Any], *arguments: Any) -> Register:
        """Note a call; its result is in the returned register once the program ran. Registers may lie in lists."""
        out = self.register()
        given = [list(a) if isinstance(a, list) else a for a in arguments]
        lists = [given, *(a for a in given if isinstance(a, list))]
        holes = [(a, place, r.index) for a in lists for place, r in enumerate(a) if type(r) is Register]
        self._calls.append((op, given, holes, out.index))
        return out

    def announce_weights(self) -> None:
        """Give every product in front of another one, as its last argument, the matrix which that reads."""
        for (op, arguments, *_), (following, its_arguments, *_) in pairwise(self._calls):
            if following in _BRING_NEXT.get(op, ()):
                arguments.append(its_arguments[1])

    def __len__(self) -> int:
        return len(self._calls)

    def op_names(self) -> list[str]:
        """Names of the calls in order."""
        return [getattr(op, "__name__", str(op)) for op, *_ in self._calls]

    def run(self) -> None:
        """Make every call."""
        values = self.values
        for op, arguments, holes, out in self._calls:
            for target, place, index in holes:
                target[place] = values[index]
            values[out] = op(*arguments)

    def run_once(self, given: Iterable[tuple[Register, Any]]) -> Any:
        """Make every call.

        A register is empty behind the last call that reads it, so that no more is alive than where the calls stand one
        below the other in a function.

        Args:
            given: registers, and what is in them at first.

        Returns:
            What the last call gives.
        """
        if self._read_last is None:
            last = {
                i: place for place, (*_, holes, out) in enumerate(self._calls) for i in (out, *(i for *_, i in holes))
            }
            self._read_last = [[] for _ in self._calls]
            for index, place in last.items():
                self._read_last[place].append(index)
            self._read_last[-1].clear()  # the result is there
        values = self.values
        for register, value in given:
            values[register.index] = value
        try:
            for (op, arguments, holes, out), done in zip(self._calls, self._read_last):
                for target, place, index in holes:
                    target[place] = values[index]
                values[out] = op(*arguments)
                for target, place, _ in holes:
                    target[place] = None
                for index in done:
                    values[index] = None
            return values[out]
        finally:  # what no call reads; behind an exception everything
            self.release()
            values[:] = [None] * len(values)

    def release(self) -> None:
        """Let go of what the calls were made with; the registers keep what they hold."""
        for _, _, holes, _ in self._calls:
            for target, place, _ in holes:
                target[place] = None
