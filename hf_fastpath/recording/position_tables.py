"""Tables of which a step takes the row of a position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..decode.calls.named_calls import Call, Register
from .passes.lengths import at_position
from .probing import MISFITS, evaluate
from .recorded_step import Recording, behind, read_by

_aten = torch.ops.aten

#: tokens at which rows are looked up: one of them may be that of padding, which has a row of its own
_TOKENS = (1, 2)


@dataclass(frozen=True, order=True)
class PositionTable:
    """A table with a row for every position.

    Attributes:
        count: positions that have a row.
        first: row of position 0.
        is_learned: the rows are parameters; the model's own code may make others longer.
    """

    count: int
    first: int
    is_learned: bool


def position_tables(recording: Recording) -> Iterator[PositionTable]:
    """Yield the tables of positions that a step reads."""
    for call in recording.calls:
        table, rows = _looked_up(call)
        if not isinstance(table, torch.Tensor) or table.dim() != 2 or not isinstance(rows, Register):
            continue
        calls = _made_of_positions(recording, rows)
        if calls is None:
            continue
        try:
            first, second, last = (_row(recording, calls, rows, position) for position in (0, 1, len(table)))
        except MISFITS:
            continue
        if first != second and last >= len(table):  # else far positions share rows
            yield PositionTable(len(table) - first, first, isinstance(table, torch.nn.Parameter))


def _looked_up(call: Call) -> tuple[object, object]:
    """Return the table of which a call takes rows, and the rows; None and None for other calls."""
    given = call.arguments
    if call.op is _aten.embedding.default:
        return given["weight"], given["indices"]
    if call.op is _aten.index_select.default and given["dim"] == 0:
        return given["self"], given["index"]
    if call.op is _aten.index.Tensor and len(given["indices"]) == 1:
        return given["self"], given["indices"][0]
    return None, None


def _made_of_positions(recording: Recording, rows: Register) -> list[Call] | None:
    """Return the calls that make ``rows`` of tokens and positions, in order; None if these read more."""
    calls = behind(recording.calls, rows)
    known = {recording.tokens.index, recording.positions.index, *(call.out.index for call in calls)}
    for call in calls:
        if any(isinstance(each, torch.nn.Parameter) for each in call.arguments.values()):
            return None
        if any(each.index not in known for each in read_by(call)):
            return None
    return calls if rows.index in known else None


def _row(recording: Recording, calls: list[Call], rows: Register, position: int) -> int:
    """Return the last row that is taken at a position, whatever the token."""
    shape, found = (recording.batch, recording.query_len), []
    for token in _TOKENS:
        given = at_position(recording, position) | {recording.tokens.index: torch.full(shape, token)}
        found.append(int(evaluate(calls, given)[rows.index].flatten()[0]))
    return max(found)
