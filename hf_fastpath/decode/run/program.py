"""A list of op calls that is recorded once and run often."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ...reasons import Cause
from ..calls.named_calls import Call, Register, Step, bound, by_name
from .native_calls import Bound, NativeCalls, runs_of
from .passes import passed


class Program:
    """A list of calls over numbered registers. The program itself knows no op.

    Args:
        values: of registers that the program shares with others; None for registers of its own.

    Attributes:
        values: values of the registers.
        calls: the calls in order; calls that have run are not changed any more.
    """

    def __init__(self, values: list[Any] | None = None) -> None:
        self.values: list[Any] = [] if values is None else values
        self.calls: list[Call] = []
        self._passed = 0  # number of calls that the passes have seen
        self._in_native_code = False
        self._outside: set[int] = set()  # registers that are read behind the calls
        self._bound: list[Bound] | None = None
        self._runs: list[NativeCalls] = []
        self._read_last: list[list[int]] | None = None  # of each call: registers that no later call reads

    def register(self, value: Any = None) -> Register:
        """Make a new register that holds ``value``."""
        self.values.append(value)
        return Register(len(self.values) - 1)

    def emit(self, op: Callable[..., Any], /, *positional: Any, **named: Any) -> Register:
        """Record a call. Registers may lie in lists and in values.

        Returns:
            The register that holds the result once the program has run.
        """
        call = Call(op, by_name(op, positional, named), self.register())
        self.calls.append(call)
        return call.out

    def keep(self, register: Register) -> Register:
        """Note that a register is read behind the calls, and return it."""
        self._outside.add(register.index)
        return register

    def move_to(self, device: torch.device) -> None:
        """Note that the calls to come run on ``device``; a program of one device need not know."""

    def shared(self, tensor: torch.Tensor, is_constant: bool = False) -> Any:
        """Return what calls on all devices are given for a tensor on the first one.

        Args:
            is_constant: the tensor only changes before :meth:`renew`.
        """
        return tensor

    def copied_here(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the next call reads of a model's tensor that is on another device: a copy, as of :meth:`renew`.

        A program of one device need not copy.
        """
        return tensor

    def renew(self) -> None:
        """Note that constant shared tensors have changed."""

    @property
    def notes(self) -> Sequence[Cause]:
        """What bounds the speed of the calls, or keeps them from being captured."""
        return ()

    def optimize(self, step: Step, what: str = "step") -> None:
        """Apply the passes to the calls that were recorded since the last time.

        Args:
            step: the circumstances of the calls.
            what: the calls are of, in names of files.
        """
        noted = self.calls[self._passed :]
        listing = passed(noted, self.register, step, f"{what}-of-{step.rows}-rows")
        self.calls[self._passed :] = listing.calls
        self._passed, self._in_native_code = len(self.calls), listing.in_native_code

    @property
    def native_runs(self) -> list[NativeCalls]:
        """The calls that the native library makes in a row, in order; known once the program has run."""
        return self._runs

    def __len__(self) -> int:
        return len(self.calls)

    def op_names(self) -> list[str]:
        """Return the names of the calls in order."""
        return [call.name for call in self.calls]

    def _bind(self) -> list[Bound]:
        made = []
        for call in self.calls:
            op, ordered = bound(call.op, call.arguments)
            given = [list(a) if isinstance(a, list) else a for a in ordered]
            lists = [given, *(a for a in given if isinstance(a, list))]
            holes = [(a, place, r.index) for a in lists for place, r in enumerate(a) if type(r) is Register]
            made.append((op, given, holes, call.out.index))
        kept = {*self._outside, *(call.out.index for call in self.calls[-1:])}
        self._runs = runs_of(made, kept) if self._in_native_code else []
        self._bound = made
        return made

    def run(self) -> None:
        """Make every call."""
        values = self.values
        calls = self._bound or self._bind()
        place = 0
        for run in self._runs:
            if run.device != "cpu":
                break  # a graph is captured of the calls, and memory is kept apart for all results
            self._make(calls[place : run.begin], values)
            if not run.run(values):
                self._make(calls[run.begin : run.end], values)
            place = run.end
        self._make(calls[place:], values)

    @staticmethod
    def _make(calls: Iterable[Bound], values: list[Any]) -> None:
        for op, arguments, holes, out in calls:
            for target, place, index in holes:
                target[place] = values[index]
            values[out] = op(*arguments)

    def run_each(self) -> Iterator[tuple[Call, Callable[..., Any], list[Any], Any]]:
        """Make every call as :meth:`run` does, for who looks at each.

        Yields:
            Behind each call: the call, the function that it was, its arguments in the function's order, and its result.
        """
        values = self.values
        for call, (op, arguments, holes, out) in zip(self.calls, self._bound or self._bind()):
            for target, place, index in holes:
                target[place] = values[index]
            values[out] = op(*arguments)
            yield call, op, arguments, values[out]

    def run_clocked(self) -> list[int]:
        """Make every call as :meth:`run` does; return a clock's nanoseconds at the begin and behind each call."""
        values, clock = self.values, time.perf_counter_ns
        calls = self._bound or self._bind()
        times = [clock()]

        def make(begin: int, end: int) -> None:
            for each in calls[begin:end]:
                self._make((each,), values)
                times.append(clock())

        place = 0
        for run in self._runs:
            make(place, run.begin)
            within = torch.zeros(run.end - run.begin + 1, dtype=torch.int64)
            if run.run(values, within):
                times += within[1:].tolist()
            else:
                make(run.begin, run.end)
            place = run.end
        make(place, len(calls))
        return times

    def run_once(self, given: Iterable[tuple[Any, Any]]) -> Any:
        """Make every call.

        A register is emptied after the last call that reads it, so that no more memory is in use than if the calls
        stood one below the other in a function.

        Args:
            given: pairs of a register and its value at first, or of a value with registers in it and one with tensors.

        Returns:
            The result of the last call.
        """
        calls = self._bound or self._bind()
        if self._read_last is None:
            last = {i: place for place, (*_, holes, out) in enumerate(calls) for i in (out, *(i for *_, i in holes))}
            self._read_last = [[] for _ in calls]
            for index, place in last.items():
                self._read_last[place].append(index)
            self._read_last[-1].clear()  # the result stays
        values = self.values
        for register, value in given:
            self.put(register, value)
        try:
            place = 0
            for run in self._runs:
                self._make_once(place, run.begin)
                read_last = {*itertools.chain.from_iterable(self._read_last[run.begin : run.end])}
                if not run.run(values, emptied=read_last):
                    self._make_once(run.begin, run.end)
                place = run.end
            self._make_once(place, len(calls))
            return values[calls[-1][-1]]
        finally:  # empties the registers that no call reads, and after an exception all of them
            self.release()
            values[:] = [None] * len(values)

    def _make_once(self, begin: int, end: int) -> None:
        """Make calls whose registers are emptied."""
        values, done = self.values, self._read_last or []
        for (op, arguments, holes, out), read_last in zip((self._bound or [])[begin:end], done[begin:end]):
            for target, place, index in holes:
                target[place] = values[index]
            values[out] = op(*arguments)
            for target, place, _ in holes:
                target[place] = None
            for index in read_last:
                values[index] = None

    def put(self, register: Any, value: Any) -> None:
        """Fill a register; or fill the registers in a value with what another such value holds, or with None."""
        if isinstance(register, Register):
            self.values[register.index] = value
        elif is_dataclass(register):
            for field in fields(register):
                self.put(getattr(register, field.name), None if value is None else getattr(value, field.name))

    def captured(self, capture: Callable[[Callable[[], None], torch.device], Any], device: torch.device) -> Any:
        """Capture the calls, which have run before, by ``graph.capture``; return what replays them."""
        return capture(self.run, device)

    def release(self) -> None:
        """Let go of the arguments of the calls; the registers keep their values."""
        for _, _, holes, _ in self._bound or ():
            for target, place, _ in holes:
                target[place] = None
        for run in self._runs:
            run.release()
