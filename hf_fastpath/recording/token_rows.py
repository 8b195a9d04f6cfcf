"""A step of one token of each of many sequences, taken for the step of the tokens of a prompt.

Sequences know nothing of each other. So what a step computes of one token does not depend on which sequence has it, and
the same calls read the tokens of one text, if those that look beyond a token (attention over a cache, convolutions,
recurrent states) are told that the rows follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy
import torch

from ..decode.calls.named_calls import Call, Register, read_by
from . import marks
from .numbers_of_lengths import follow_sizes, follows_length
from .recorded_step import Recording, Unrecordable, is_mutable

_aten = torch.ops.aten

#: the number of tokens of all sequences, in the formulas of numbers
ROWS = sympy.Symbol("rows", integer=True, positive=True)
#: calls that look beyond a token
BEYOND = frozenset((*marks.OF_CACHES, *marks.EFFECTS))


def check_rows(recording: Recording) -> None:
    """Check that each row is a token of its own, and let sizes that are made of the number of rows follow
    :data:`ROWS`.

    Args:
        recording: of one token of each of a number of sequences that divides no size of the model.

    Raises:
        Unrecordable: a call is not that of a token alone.
    """
    count = recording.batch
    states = {each.index for held in recording.states for each in held}
    _expand_late(recording)
    for call in recording.calls:
        if call.op is marks.text_positions or any(map(follows_length, call.arguments.values())):
            raise Unrecordable(f"{call.name} counts on from the length of the text")
        if call.op in BEYOND:
            continue
        if any(each.index in states for each in read_by(call)):
            if call.op is not _aten.view.default:
                raise Unrecordable(f"{call.name} reads a state")
            call.arguments["size"] = [-1, *call.arguments["size"][1:]]  # a state is that of a text, not of a token
            states.add(call.out.index)
            continue
        if is_mutable(call.op) or call.out.index in recording.mutated:
            raise Unrecordable(f"{call.name} writes to memory")
        if any(_has_rows(recording, each) for each in read_by(call)) and not _has_rows(recording, call.out):
            raise Unrecordable(f"{call.name} puts the tokens of several sequences together")
        if any(size and size % count == 0 for each in call.arguments.values() for size in getattr(each, "shape", ())):
            raise Unrecordable(f"{call.name} reads a tensor with a part for each sequence")
        follow_sizes(call.arguments, count, ROWS)
    recording.rows_are_tokens = True


def _expand_late(recording: Recording) -> None:
    """Let a tensor that is the same for all sequences be repeated by a call, as often as there are tokens."""
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        made = []
        for name, value in call.arguments.items():
            if not isinstance(value, torch.Tensor) or call.op in BEYOND:
                continue
            dims = [dim for dim, size in enumerate(value.shape) if size and size % recording.batch == 0]
            if not dims or any(value.stride(dim) for dim in dims):
                continue
            once = value.detach()
            for dim in dims:
                once = once.narrow(dim, 0, 1)
            made.append(recording.call(_aten.expand.default, value, self=once, size=list(value.shape)))
            call.arguments[name] = made[-1].out
        if made:
            instead[id(call)] = [*made, call]
    recording.rewrite(instead, {})


def _has_rows(recording: Recording, register: Register) -> bool:
    """Whether what a register holds has a part for each row; also if nobody knows what the register holds."""
    fact = recording.facts.get(register.index)
    if not isinstance(fact, torch.Tensor):
        return True
    return any(size and size % recording.batch == 0 for size in fact.shape)


def last_rows(recording: Recording) -> tuple[int, list[Register]]:
    """Return the place of the first call from which on the last token of each sequence is enough, and what the calls
    from there on read of those before: registers whose first dimension is the rows.

    Raises:
        Unrecordable: there is no such place.
    """
    first = max((place for place, call in enumerate(recording.calls) if call.op in BEYOND), default=-1) + 1
    for place in range(first, len(recording.calls)):
        made = {call.out.index for call in recording.calls[place:]}
        crossing = {each.index: each for each in _read(recording.calls[place:]) if each.index not in made}
        rows = [each for each in crossing.values() if _has_rows(recording, each)]
        if all(_begins_with_rows(recording, each) for each in rows):
            return place, rows
    raise Unrecordable("no call from which on the last tokens are enough")


def _read(calls: list[Call]) -> Iterator[Register]:
    for call in calls:
        yield from read_by(call)


def _begins_with_rows(recording: Recording, register: Register) -> bool:
    """Whether the first dimension is the rows, and no other follows their number."""
    fact = recording.facts.get(register.index)
    if not isinstance(fact, torch.Tensor) or fact.dim() == 0 or fact.shape[0] != recording.batch:
        return False
    return all(size % recording.batch for size in fact.shape[1:] if size)
