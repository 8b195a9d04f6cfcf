"""The times of a step's calls, measured on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from .. import ops
from ..compat import kernel_records
from ..decode.calls.whose import op_name
from ..decode.run.program import Program
from . import kernels
from .described import CallFacts
from .places import Places
from .steps import CLOCKED, PLAIN, WARM, Clocked, Marked, Plain, Replayed, Runner, typical
from .times import Scaled

#: ops that make all layers in one call
ONE_CALL = (ops.decode_layers.overload,)
#: steps for learning which kernels each call starts: the first describes the calls, and the second loads kernels
_LEARNING = 4


class Calls(Protocol):
    """What makes calls of ``generate()``; ``profiler.Session`` implements it."""

    tokens: int
    device: torch.device
    places: Places

    def generate(self, runner: Runner, tokens: int | None = None, as_list: bool = False) -> None:
        """Make a call whose steps ``runner`` runs."""


@dataclass(frozen=True)
class Times:
    """The measured times of a step.

    Attributes:
        method: how calls were timed.
        described, us, within: what each call is, its microseconds, and the op that makes it as a part of its own.
        scaled: what was scaled, or None.
        plain_us, wall_us, profiled_wall_us: see ``times.StepTimes``.
        batch, context: sequences, and positions in the middle of the measurement.
    """

    method: str
    described: Sequence[CallFacts]
    us: Sequence[float]
    within: Sequence[str | None]
    scaled: Scaled | None
    plain_us: float
    wall_us: float
    profiled_wall_us: float
    batch: int
    context: int


def place_of_one_call(program: Program) -> int | None:
    """Return the place of the call that makes all layers, or None."""
    return next((place for place, call in enumerate(program.calls) if call.op in ONE_CALL), None)


def taken_apart(
    one: Sequence[float], place: int, op: str, listed: Sequence[float]
) -> tuple[list[float], list[str | None], Scaled]:
    """Return the times of a list of calls, of which one op makes some; what makes each of them; and what was scaled.

    Args:
        one: microseconds of each call of the step with the op.
        place: of the op in that step.
        op: name of the op.
        listed: microseconds of each call of the step without the op.
    """
    count = len(listed) - len(one) + 1
    inside = listed[place : place + count]
    scaled = Scaled(op, one[place], sum(inside))
    factor = scaled.us / scaled.list_us if scaled.list_us else 0.0
    us = [*one[:place], *(each * factor for each in inside), *one[place + 1 :]]
    within: list[str | None] = [None] * place
    within += [op] * count
    return us, within + [None] * (len(us) - len(within)), scaled


def on_cpu(session: Calls) -> Times:
    """Measure by a clock around each call."""
    runner = Clocked(places=session.places)
    session.generate(runner, session.tokens + 2)  # one step describes the calls, and the last has no step behind it
    program = runner.program
    one, described = typical(runner.shares(program)), runner.described[id(program)]
    within: list[str | None] = [None] * len(one)
    method = "a clock behind each call, in every second step"
    plain, wall, profiled = (
        median(each) for each in (runner.plain_us(program), *(runner.wall_us(program, how) for how in (PLAIN, CLOCKED)))
    )
    return Times(method, described, one, within, None, plain, wall, profiled, runner.batch, runner.context)


def on_gpu(session: Calls) -> Times:
    """Measure by the kernels' records of replayed steps."""
    plain = Plain()
    session.generate(plain)
    starts, marked = _started(session, as_list=False)
    program, described = marked.program, marked.described[id(marked.program)]
    replayed, steps = _replays(session, as_list=False)
    within: list[str | None] = [None] * len(starts)
    scaled: Scaled | None = None
    method = "CUPTI's records of the kernels of replayed steps, each from the end of the call in front to its own"
    us = typical([kernels.added(step, starts) for step in steps])
    if (place := place_of_one_call(program)) is not None:
        listed, by_list = _started(session, as_list=True)
        described = by_list.described[id(by_list.program)]
        each = typical([kernels.added(step, listed) for step in _replays(session, as_list=True)[1]])
        us, within, scaled = taken_apart(us, place, op_name(program.calls[place].op), each)
    wall = plain.seconds / (plain.count - WARM) * 1e6
    profiled = (replayed.ended - replayed.first) / (replayed.count - WARM) * 1e6
    return Times(
        method, described, us, within, scaled, median(plain.step_us), wall, profiled, plain.batch, plain.context
    )


def _started(session: Calls, as_list: bool) -> tuple[list[list[str]], Marked]:
    """Return the names of the kernels that each call of a step starts, and what has run the step."""
    runner = Marked(places=session.places)
    run: Any = lambda: session.generate(runner, _LEARNING, as_list)  # noqa: E731
    marker, records = kernel_records(run, session.device)
    return kernels.of_calls(records, marker, len(runner.program)), runner


def _replays(session: Calls, as_list: bool) -> tuple[Replayed, list[list[Any]]]:
    """Return what has run steps as graphs, and the kernels of each step."""
    runner = Replayed()
    run: Any = lambda: session.generate(runner, None, as_list)  # noqa: E731
    marker, records = kernel_records(run, session.device)
    steps = kernels.between_markers(records, marker)
    if len(steps) != runner.count - WARM:
        raise RuntimeError(f"the profiler shows {len(steps)} markers, expected one for each of {runner.count} steps")
    return runner, [step for step, its in zip(steps, runner.programs[WARM:]) if its is runner.program]
