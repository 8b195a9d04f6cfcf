"""A list of op calls, written down once and made often."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from .named_calls import Call, Register, Step, bound, by_name
from .passes import passed

#: function, arguments, where values go (a list, a place in it, a register), register of the result
_Bound = tuple[Callable[..., Any], list[Any], list[tuple[list, int, int]], int]


class Program:
    """A list of calls over numbered registers; it knows no op.

    Attributes:
        values: of the registers.
        calls: in order; those that were run are not changed any more.
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.calls: list[Call] = []
        self._passed = 0  # of them, those behind passed()
        self._bound: list[_Bound] | None = None
        self._read_last: list[list[int]] | None = None  # registers that no call behind a call reads

    def register(self, value: Any = None) -> Register:
        """A new register, holding ``value``."""
        self.values.append(value)
        return Register(len(self.values) - 1)

    def emit(self, op: Callable[..., Any], /, *positional: Any, **named: Any) -> Register:
        """Note a call; its result is in the returned register once the program ran. Registers may lie in lists and in
        values."""
        call = Call(op, by_name(op, positional, named), self.register())
        self.calls.append(call)
        return call.out

    def optimize(self, step: Step) -> None:
        """Put the calls that were noted since the last time through the passes."""
        noted = self.calls[self._passed :]
        self.calls[self._passed :] = passed(noted, self.register, step)
        self._passed = len(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def op_names(self) -> list[str]:
        """Names of the calls in order."""
        return [call.name for call in self.calls]

    def _bind(self) -> list[_Bound]:
        made = []
        for call in self.calls:
            op, ordered = bound(call.op, call.arguments)
            given = [list(a) if isinstance(a, list) else a for a in ordered]
            lists = [given, *(a for a in given if isinstance(a, list))]
            holes = [(a, place, r.index) for a in lists for place, r in enumerate(a) if type(r) is Register]
            made.append((op, given, holes, call.out.index))
        self._bound = made
        return made

    def run(self) -> None:
        """Make every call."""
        values = self.values
        for op, arguments, holes, out in self._bound or self._bind():
            for target, place, index in holes:
                target[place] = values[index]
            values[out] = op(*arguments)

    def run_once(self, given: Iterable[tuple[Any, Any]]) -> Any:
        """Make every call.

        A register is empty behind the last call that reads it, so that no more is alive than where the calls stand one
        below the other in a function.

        Args:
            given: registers, and what is in them at first; or values with registers in them, and such with tensors.

        Returns:
            What the last call gives.
        """
        calls = self._bound or self._bind()
        if self._read_last is None:
            last = {i: place for place, (*_, holes, out) in enumerate(calls) for i in (out, *(i for *_, i in holes))}
            self._read_last = [[] for _ in calls]
            for index, place in last.items():
                self._read_last[place].append(index)
            self._read_last[-1].clear()  # the result is there
        values = self.values
        for register, value in given:
            self.put(register, value)
        try:
            for (op, arguments, holes, out), done in zip(calls, self._read_last):
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

    def put(self, register: Any, value: Any) -> None:
        """Fill a register; or those of a value, with what is in another such value, or with None."""
        if isinstance(register, Register):
            self.values[register.index] = value
        elif is_dataclass(register):
            for field in fields(register):
                self.put(getattr(register, field.name), None if value is None else getattr(value, field.name))

    def release(self) -> None:
        """Let go of what the calls were made with; the registers keep what they hold."""
        for _, _, holes, _ in self._bound or ():
            for target, place, _ in holes:
                target[place] = None
