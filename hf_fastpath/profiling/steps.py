"""Runners of decode steps, which take the place of a plan's own for the calls of ``generate()`` of one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from ..bench.measure import synchronize
from ..compat import below_autograd, put_marker
from ..decode.calls.named_calls import Step
from ..decode.plans.decode_plan import DecodePlan
from ..decode.plans.plan_cache import PlanCache
from ..decode.run.graph import random_numbers_in_turn
from ..decode.run.program import Program
from .described import CallFacts, describe
from .energy import Meter
from .places import Places

#: how a step was run on a CPU
PLAIN, CLOCKED = "plain", "clocked"
#: steps of a call that are left out: the first runs eagerly, the second captures
WARM = 2


class ListPlan(DecodePlan):
    """A decode plan whose layers are calls of their own, where others have one call for all of them."""

    def _made_for(self, of_sequence: int) -> Step:
        return replace(super()._made_for(of_sequence), one_call=False)


@dataclass
class Runner:
    """What runs the steps of a call of ``generate()``.

    Attributes:
        begun: when the first token was there, by ``time.perf_counter()``.
        ended: when the last step was over.
        count: number of steps so far.
        batch, past: number of sequences, and positions that each of them held in front of the measured steps.
        programs: the program of each step.
    """

    begun: float | None = None
    ended: float = 0.0
    count: int = 0
    batch: int = 0
    past: int = 0
    programs: list[Program] = field(default_factory=list)

    def take(self, plan: DecodePlan) -> None:
        """Note that a call has taken a plan, behind its first token."""
        if self.begun is None:
            synchronize(plan.device)
            self.begun = time.perf_counter()

    def step(self, plan: DecodePlan) -> None:
        """Run a step."""
        if self.count == WARM:
            self.batch, self.past = plan.batch, plan.cache.get_seq_length()
        self.programs.append(plan.program)
        self.run(plan)
        self.count += 1

    def run(self, plan: DecodePlan) -> None:
        """Run a step as the plan does."""
        DecodePlan._run(plan)

    def end(self, plan: DecodePlan) -> None:
        """Note that a call lets go of a plan."""
        synchronize(plan.device)
        self.ended = time.perf_counter()

    @property
    def context(self) -> int:
        """Positions that each sequence holds in the middle of the measured steps, the new one included."""
        return self.past + 1 + (self.count - WARM) // 2

    @property
    def program(self) -> Program:
        """The program of most steps behind the first ones."""
        later = self.programs[WARM:]
        return max(later, key=later.count)


@contextmanager
def running(plans: PlanCache, runner: Runner, as_list: bool = False) -> Iterator[None]:
    """Let ``runner`` run the steps of this thread's calls of ``generate()`` for the length of a ``with`` block.

    Args:
        plans: of the model.
        as_list: whether plans are made whose layers are calls of their own.
    """
    here, taken = threading.get_ident(), []
    take = plans.plan_of

    def plan_of(part: Any, batch: int, cache: Any, sampled: bool = False) -> DecodePlan:
        is_here = threading.get_ident() == here
        if is_here and as_list:
            cache.take()
            plan: DecodePlan = ListPlan(part, batch, cache.stored_dtype, sampled, cache.page_sizes)
        else:
            plan = take(part, batch, cache, sampled)
        if is_here:
            taken.append(plan)
            vars(plan).update(_run=lambda: runner.step(plan), end=lambda: _end(plan))
            runner.take(plan)
        return plan

    def _end(plan: DecodePlan) -> None:
        _give_back(plan)
        runner.end(plan)
        plan.end()

    vars(plans)["plan_of"] = plan_of
    try:
        yield
    finally:
        del vars(plans)["plan_of"]
        for plan in taken:  # those of calls that were broken off
            _give_back(plan)


def _give_back(plan: DecodePlan) -> None:
    """Let a plan run its own steps again."""
    vars(plan).pop("_run", None)
    vars(plan).pop("end", None)


@contextmanager
def _in_turn(plan: DecodePlan) -> Iterator[None]:
    """Do around a step what a plan does around its program."""
    with random_numbers_in_turn(plan.device), below_autograd():
        yield
    plan.warm = True


@dataclass
class Plain(Runner):
    """Runs steps as they are, and takes the time of all steps behind the first ones.

    Attributes:
        meter: counter of energy, or None.
        first, joules: when the measured steps began, and what the counter said.
        energy: joules of the measured steps.
        marks: of each measured step on a GPU, events in front of it and behind it.
        spans: of each measured step elsewhere, its microseconds.
    """

    meter: Meter | None = None
    first: float = 0.0
    joules: float = 0.0
    energy: float = 0.0
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    spans: list[float] = field(default_factory=list)

    def run(self, plan: DecodePlan) -> None:
        if self.count == WARM:
            synchronize(plan.device)
            self.joules = self.meter.joules() if self.meter is not None else 0.0
            self.first = time.perf_counter()
        if self.count < WARM:
            return DecodePlan._run(plan)
        if plan.device.type != "cuda":
            start = time.perf_counter()
            DecodePlan._run(plan)
            return self.spans.append((time.perf_counter() - start) * 1e6)
        with torch.cuda.device(plan.device):
            before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            DecodePlan._run(plan)
            behind.record()
        self.marks.append((before, behind))

    def end(self, plan: DecodePlan) -> None:
        super().end(plan)
        if self.meter is not None:
            self.energy = self.meter.joules() - self.joules

    @property
    def seconds(self) -> float:
        """Seconds of the measured steps."""
        return self.ended - self.first

    @property
    def step_us(self) -> list[float]:
        """Microseconds of each measured step on its device."""
        return self.spans or [before.elapsed_time(behind) * 1e3 for before, behind in self.marks]


@dataclass
class Describing(Runner):
    """Runs a step call by call and says what each call is, once for each program.

    Attributes:
        places: of the model.
        described: id of a program -> its calls.
    """

    places: Places | None = None
    described: dict[int, list[CallFacts]] = field(default_factory=dict)

    def run(self, plan: DecodePlan) -> None:
        if self.count < WARM or id(plan.program) in self.described:
            return self.run_known(plan)
        assert self.places is not None
        paths = self.places.of_calls(plan.program.calls)
        with _in_turn(plan):
            self.described[id(plan.program)] = [
                describe(call, path, op, arguments, result, plan.device)
                for path, (call, op, arguments, result) in zip(paths, plan.program.run_each())
            ]

    def run_known(self, plan: DecodePlan) -> None:
        """Run a step whose calls are known, or one of the first."""
        DecodePlan._run(plan)


@dataclass
class Clocked(Describing):
    """On a CPU: runs every second step with a look at the clock behind each call.

    Attributes:
        clocks: of each step with a clock: its number, and nanoseconds at its begin and behind each call.
        spans: of each step: when it began and ended, in seconds, and PLAIN or CLOCKED, or empty if it does not count.
    """

    clocks: list[tuple[int, list[int]]] = field(default_factory=list)
    spans: list[tuple[float, float, str]] = field(default_factory=list)

    def run(self, plan: DecodePlan) -> None:
        start, clocks, known = time.perf_counter(), len(self.clocks), id(plan.program) in self.described
        super().run(plan)
        how = "" if not known or self.count < WARM else PLAIN if len(self.clocks) == clocks else CLOCKED
        self.spans.append((start, time.perf_counter(), how))

    def run_known(self, plan: DecodePlan) -> None:
        if self.count < WARM or self.count % 2:
            return DecodePlan._run(plan)
        with _in_turn(plan):
            times = plan.program.run_clocked()
        self.clocks.append((self.count, times))

    def shares(self, program: Program) -> list[list[float]]:
        """Return the microseconds of each call, of each step of a program with a clock."""
        mine = [times for number, times in self.clocks if self.programs[number] is program]
        return [[(end - start) / 1e3 for start, end in zip(times, times[1:])] for times in mine]

    def plain_us(self, program: Program) -> list[float]:
        """Return the microseconds of each step of a program without a clock."""
        spans = zip(self.spans, self.programs)
        return [(end - start) * 1e6 for (start, end, how), its in spans if how == PLAIN and its is program]

    def wall_us(self, program: Program, how: str) -> list[float]:
        """Return the microseconds from each step of a program, PLAIN or CLOCKED, to the next step."""
        found = zip(self.spans, self.spans[1:], self.programs)
        return [(behind[0] - span[0]) * 1e6 for span, behind, its in found if span[2] == how and its is program]


@dataclass
class Marked(Describing):
    """On a GPU: runs steps call by call, with a marker in front of each call and at the end."""

    def run_known(self, plan: DecodePlan) -> None:
        if self.count < WARM:
            return DecodePlan._run(plan)
        with _in_turn(plan):
            put_marker(plan.device)
            for _ in plan.program.run_each():
                put_marker(plan.device)


@dataclass
class Replayed(Runner):
    """On a GPU: runs steps as they are, with a marker in front of each.

    Attributes:
        first: when the measured steps began.
    """

    first: float = 0.0

    def run(self, plan: DecodePlan) -> None:
        if self.count == WARM:
            synchronize(plan.device)
            self.first = time.perf_counter()
        if self.count >= WARM:
            put_marker(plan.device)
        DecodePlan._run(plan)


def typical(steps: Sequence[Sequence[float]]) -> list[float]:
    """Return the times of the calls of a typical step: medians, all scaled alike to add up to the median step.

    What disturbs a call in fewer than half of the steps changes nothing.

    Args:
        steps: times of the calls of each step.

    Raises:
        ValueError: there are no steps.
    """
    if not steps:
        raise ValueError(
            "profile() has measured too few steps of one kind, as the text crosses lengths: give more tokens"
        )
    medians = [median(times) for times in zip(*steps)]
    total = sum(medians)
    factor = median(map(sum, steps)) / total if total else 0.0
    return [each * factor for each in medians]
