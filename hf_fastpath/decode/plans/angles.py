"""Rotary angles: cos and sin of positions. The model's own module computes them, so any kind of scaling is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

from ...ops.decode_attention import MAX_QUERY_LEN
from ..model.structure import ModelInRoles, full_angles
from ..run.program import Program
from ..sources.step_source import StepSource

#: rows of the first table of rotary angles, unless the model's longest context is shorter; a captured graph holds the
#: table's address, so that a larger table needs a new capture
_ANGLE_ROWS = {"cuda": 32768, "cpu": 4096}
#: rows of a table at most, if generate() expects more tokens than the first table has rows for
_MOST_ANGLE_ROWS = 131072
#: positions whose angles are computed at once: the intermediate values are float32 and several times as large
_ANGLE_PIECE = 8192
#: rows of a run if nobody has said how long the text becomes
_RUN_ROWS = 1024


def angles_at(part: ModelInRoles, like: torch.Tensor, positions: torch.Tensor) -> dict[str | None, tuple]:
    """Compute cos and sin at ``positions`` for every kind of layer.

    Args:
        like: a tensor of the dtype and on the device of the result.
        positions: int [batch, query_len].

    Returns:
        Kind of layer -> (cos, sin), each [batch, query_len, rotary_dim].
    """
    made: dict[str | None, tuple] = {}
    rotary: Any = part.rotary
    for kind in part.rope_kinds:
        tables = rotary.forward(like, positions, *(() if kind is None else (kind,)))
        made[kind] = tuple(full_angles(part.architecture, table.to(like.dtype)) for table in tables)
    return made


def has_angles(part: StepSource) -> TypeGuard[ModelInRoles]:
    """Whether a plan keeps tables of a model's angles: of what a file describes, unless it has no rotary embedding."""
    return part.rotary is not None


class _Run(NamedTuple):
    """Neighboring positions in the tables: ``size`` positions from ``first`` on lie in the rows from ``row`` on."""

    first: int
    size: int
    row: int


class AngleTables:
    """Tables of cos and sin for a plan, with a row for every position that the plan may come to.

    If positions follow from the length of the cache, a position is the number of its row. Positions that a caller gave
    may be any numbers: then the tables hold a run of rows for each sequence, and the plan adds a shift to a position to
    get the number of its row.

    Args:
        part: the model.
        program: the program of the plan; it gets registers for the tables.
        dtype, device: of the tables.

    Attributes:
        registers: kind of layer -> registers of cos and sin.
    """

    def __init__(self, part: ModelInRoles, program: Program, dtype: torch.dtype, device: torch.device):
        self._part, self._program = part, program
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._longest = getattr(part.rotary, "max_seq_len_cached", _MOST_ANGLE_ROWS)
        self._runs: tuple[_Run, ...] = ()
        self._rows = 0  # rows of the tables
        self.registers = {kind: (program.register(), program.register()) for kind in part.rope_kinds}

    def find(self, position: int, count: int) -> _Run | None:
        """Return the run that holds ``count`` positions from ``position`` on, or None."""
        held = (run for run in self._runs if run.first <= position and position + count <= run.first + run.size)
        return next(held, None)

    def cover(self, positions: Sequence[int], count: int, length: int, expected: int) -> bool:
        """Make the tables hold ``count`` positions from each of ``positions`` on.

        Args:
            positions: position of the next token of each sequence.
            count: new tokens of each sequence.
            length: tokens that the cache holds.
            expected: tokens that the cache will hold, as far as that is known.

        Returns:
            Whether the tables moved to other addresses.
        """
        last = max(positions) + count
        usual = _ANGLE_ROWS.get(self._like.device.type, 0)
        if min(positions) >= 0 and last <= max(length + count, usual):
            wanted = max(usual, expected + max(positions) - length + 1)
            known = sum(run.size for run in self._runs if run.first == run.row == 0)
            rows = max(last, 2 * known, min(wanted, self._longest, _MOST_ANGLE_ROWS))
            return self._fill((_Run(0, rows, 0),))
        starts = sorted({position - MAX_QUERY_LEN for position in positions})  # rejected drafts may go back this far
        ahead = min(expected - length if expected > length else _RUN_ROWS, _MOST_ANGLE_ROWS // len(starts))
        each = MAX_QUERY_LEN + max(count, ahead)
        runs: list[_Run] = []
        for start in starts:
            before = runs[-1] if runs else _Run(start, 0, 0)
            if runs and start <= before.first + before.size:
                runs[-1] = before._replace(size=start + each - before.first)
            else:
                runs.append(_Run(start, each, before.row + before.size))
        return self._fill(tuple(runs))

    def _fill(self, runs: tuple[_Run, ...]) -> bool:
        """Put ``runs`` into the tables, which are allocated anew if they are too short; return whether they were."""
        self._runs = ()  # until all rows are filled: an interrupt may come before
        rows, moved = sum(run.size for run in runs), False
        with torch.inference_mode(False), torch.no_grad():
            for run in runs:
                for first in range(0, run.size, _ANGLE_PIECE):
                    end = min(first + _ANGLE_PIECE, run.size)
                    piece = torch.arange(run.first + first, run.first + end, device=self._like.device)[None]
                    made = angles_at(self._part, self._like, piece)
                    if rows > self._rows:
                        self._allocate(rows, made)
                        moved = True
                    for kind, pair in made.items():
                        for register, values in zip(self.registers[kind], pair):
                            self._program.values[register.index][run.row + first : run.row + end] = values[0]
        self._runs = runs
        return moved

    def _allocate(self, rows: int, like: dict[str | None, tuple]) -> None:
        self._rows = 0
        for kind, pair in like.items():
            for register, values in zip(self.registers[kind], pair):
                self._program.values[register.index] = values.new_empty(rows, values.shape[-1])
        self._rows = rows
