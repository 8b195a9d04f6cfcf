"""What lies between projections and attention, run on random numbers at a few positions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from ...decode.calls.named_calls import Register
from ..probing import MISFITS, evaluate, seeded
from ..recorded_step import Recording
from ..skeleton import past_tokens
from .lengths import at_position

#: positions at which rotations are compared
_POSITIONS = (0, 1, 23, 901)


def shown(
    recording: Recording,
    model: nn.Module,
    at_positions: set[int],
    front: Any,
    outputs: list[Register],
    used: Collection[Any] | None = None,
) -> list[tuple[list, list, list]] | None:
    """Return what a front makes of random numbers at a few positions: its sources, the tables of the positions, and
    ``outputs``; None if the front cannot be run.

    Args:
        used: places of tables; the others hold random numbers, too, since the model's may be constant up to a position
            that is not among the few. None if all hold the model's.
    """
    sources, tables, calls = front
    others = [] if used is None else [place for place in range(len(tables)) if place not in used]
    angle_calls = [call for call in recording.calls if call.out.index in at_positions]
    found = []
    try:
        for position in (min(each, past_tokens(model.config)) for each in _POSITIONS):
            angle_values = evaluate(angle_calls, at_position(recording, position))
            with seeded(position):
                values = [torch.randn(recording.fact(each).shape, dtype=torch.float64) for each in sources]
                needed = {each.index: angle_values[each.index] for each in tables}
                needed |= {tables[place].index: _random(needed[tables[place].index]) for place in others}
            given = {each.index: value for each, value in zip(sources, values)}
            made = evaluate(calls, given | needed)
            found.append((values, [needed[each.index] for each in tables], [made[each.index] for each in outputs]))
    except MISFITS:
        return None
    return found


def alike(found: list[tuple[list, list, list]], places: Collection[Any]) -> set[int]:
    """Return the places of tables in what :func:`shown` gives that hold what a table at one of ``places`` holds."""

    def same(one: int, other: int) -> bool:
        pairs = [(tables[one].flatten(), tables[other].flatten()) for _, tables, _ in found]
        return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)

    count = len(found[0][1])
    return {place for place in range(count) if any(same(place, each) for each in range(count) if each in places)}


def _random(like: torch.Tensor) -> torch.Tensor:
    is_whole = not like.is_floating_point() and not like.is_complex()
    return torch.randint_like(like, 9) if is_whole else torch.randn_like(like)
