"""What a step does with one state: the calls that read and write it, and what these calls take from elsewhere."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...decode.calls.named_calls import Call, Register
from .. import marks
from ..recorded_step import Recording, is_mutable, read_by

_aten = torch.ops.aten

#: marks that a region may hold; every other mark is a border of the region
_INSIDE = (marks.activated, marks.matmul)
#: calls that take shape and dtype of a tensor alone
_LIKE = (_aten.zeros_like.default, _aten.ones_like.default, _aten.empty_like.default, _aten.full_like.default)
#: results that are tried as what a region gives
_MOST_RESULTS = 80


@dataclass
class Region:
    """The calls between some inputs and one result, which read and write a state.

    Attributes:
        state: register of the state.
        calls: in order.
        inputs: registers that the calls take, in the order in which these are read; views of what other calls gave.
        parameters: tensors of the model that the calls take.
        blanks: registers whose shape and dtype alone the calls take.
        result: register that calls outside read.
    """

    state: Register
    calls: list[Call]
    inputs: list[Register]
    parameters: list[torch.Tensor]
    blanks: list[Register]
    result: Register


class Memory:
    """Which registers of a list share memory, and which calls write to it.

    Attributes:
        writers: number of a memory -> calls that write to it.
    """

    def __init__(self, recording: Recording):
        self._of: dict[int, int] = {}  # register -> the first that has its memory
        self.writers: dict[int, list[Call]] = {}
        for call in recording.calls:
            read = read_by(call)
            if read and (_is_view(call) or _writes(call)):
                self._of[call.out.index] = self.of(read[0])
            if read and _writes(call):
                self.writers.setdefault(self.of(read[0]), []).append(call)

    def of(self, register: Register) -> int:
        """Return the number of a register's memory."""
        return self._of.get(register.index, register.index)


class Borders:
    """Which calls of a list belong to a state. The list must not change while an instance is used."""

    def __init__(self, recording: Recording):
        self._recording = recording
        self._places = {id(call): place for place, call in enumerate(recording.calls)}
        self._producers = recording.producers()
        memory = Memory(recording)
        self._group, self._writers = memory.of, memory.writers
        self._read = {id(call): read_by(call) for call in recording.calls}
        self._are_borders: dict[int, bool] = {}  # id of a call -> see _is_border
        self._readers: dict[int, list[Call]] = {}
        self._group_readers: dict[int, list[Call]] = {}
        for call in recording.calls:
            for register in self._read[id(call)]:
                self._readers.setdefault(register.index, []).append(call)
                self._group_readers.setdefault(self._group(register), []).append(call)
        self._states = {register.index for found in recording.states for register in found}

    def regions(self, state: Register, size: int) -> Iterator[Region]:
        """Yield regions around a state whose result has ``size`` elements and no other call could give it, from the
        largest on."""
        downstream = self._downstream(state)
        if not self._writers.get(state.index):
            return
        results = [call.out for call in downstream if not _writes(call)]
        results = [each for each in results if isinstance(self._recording.fact(each), torch.Tensor)]
        for result in (each for each in results[:_MOST_RESULTS][::-1] if self._recording.fact(each).numel() == size):
            found = self._region(state, result, downstream)
            if found is not None:
                yield found

    def _downstream(self, state: Register) -> list[Call]:
        """Return the calls that depend on a state, up to the borders, in order."""
        found: dict[int, Call] = {}
        waiting = [(-1, state.index)]  # memory that depends on the state, after a place in the list
        while waiting:
            behind, group = waiting.pop()
            for call in self._group_readers.get(group, ()):
                place = self._places[id(call)]
                if place <= behind or place in found or self._is_border(call):
                    continue
                found[place] = call
                waiting.append((place, self._group(call.out)))
                if _writes(call):
                    waiting.append((place, self._group(self._read[id(call)][0])))
        return [found[place] for place in sorted(found)]

    def _region(self, state: Register, result: Register, downstream: list[Call]) -> Region | None:
        dependent = {call.out.index for call in downstream}
        calls: dict[int, Call] = {}
        inputs: dict[int, Register] = {}
        waiting = [result, *(call.out for call in self._writers[state.index])]
        while waiting:
            register = waiting.pop()
            group = self._group(register)
            if group == state.index and register.index not in self._producers:
                continue  # the state itself
            if group in self._states and group != state.index:
                return None  # another state
            if register.index not in dependent and self._is_input(register) and not self._is_whole_view(register):
                inputs[register.index] = register
                continue
            call = self._producers.get(register.index)
            if call is None or self._is_border(call):
                return None
            if id(call) not in calls:
                calls[id(call)] = call
                waiting += () if call.op in _LIKE else self._read[id(call)]
                waiting += [writer.out for writer in self._writers.get(group, ())]
        ordered = sorted(calls.values(), key=lambda call: self._places[id(call)])
        inner = {call.out.index for call in ordered if call.out.index in dependent} | {state.index}
        if any(id(reader) not in calls for index in inner - {result.index} for reader in self._readers.get(index, ())):
            return None
        given = {call.out.index for call in ordered} | inputs.keys()
        blanks = [each for call in ordered for each in read_by(call) if call.op in _LIKE and each.index not in given]
        return Region(state, ordered, _in_order(ordered, inputs), _parameters(ordered), blanks, result)

    def _is_whole_view(self, register: Register) -> bool:
        """Whether a register holds all elements of another that is an input."""
        call = self._producers.get(register.index)
        if call is None or self._is_border(call) or call.op is operator.getitem:
            return False
        size, of = self._recording.fact(register).numel(), self._recording.fact(self._read[id(call)][0])
        return isinstance(of, torch.Tensor) and of.numel() == size

    def _is_border(self, call: Call) -> bool:
        """Whether a call is no part of the arithmetic around a state, but a product with a weight (also scaled, or side
        by side with others), a norm or attention."""
        if id(call) not in self._are_borders:
            self._are_borders[id(call)] = self._makes_border(call)
        return self._are_borders[id(call)]

    def _makes_border(self, call: Call) -> bool:
        if call.op is marks.matmul:
            return any(isinstance(each, torch.Tensor) for each in call.arguments.values())
        read = self._read[id(call)]
        if call.op is _aten.cat.default:
            return all(self._is_input(each) for each in read)
        if call.op is _aten.mul.Tensor and len(read) == 1:
            made = self._producers.get(read[0].index)
            return made is not None and made.op is marks.linear
        return marks.is_mark(call.op) and call.op not in _INSIDE

    def _is_input(self, register: Register) -> bool:
        """Whether a register is a view, each element once, of what a border gave."""
        call = self._producers.get(register.index)
        if call is None or self._is_border(call):
            return register.index not in self._states
        if call.op is _aten.expand.default or not (_is_view(call) or call.op is _aten._unsafe_view.default):
            return False
        return all(self._is_input(each) for each in self._read[id(call)])


def _writes(call: Call) -> bool:
    """Whether a call writes into the first tensor that it is given."""
    return is_mutable(call.op)


def _is_view(call: Call) -> bool:
    return call.op is operator.getitem or _gives_views(call.op)


@functools.cache
def _gives_views(op: Callable[..., Any]) -> bool:
    schema = getattr(op, "_schema", None)
    return schema is not None and not schema.is_mutable and any(each.alias_info for each in schema.returns)


def _in_order(calls: list[Call], inputs: dict[int, Register]) -> list[Register]:
    read = [register.index for call in calls for register in read_by(call)]
    return sorted(inputs.values(), key=lambda each: read.index(each.index))


def _parameters(calls: list[Call]) -> list[torch.Tensor]:
    found = [each for call in calls for each in call.arguments.values() if isinstance(each, torch.Tensor)]
    return list({id(each): each for each in found if each.numel() > 1}.values())
