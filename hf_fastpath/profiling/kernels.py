"""Which call of a step each kernel of a GPU belongs to, and what it adds to the step's time."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence

from ..compat import KernelRecord


def between_markers(records: Sequence[KernelRecord], marker: str) -> list[list[KernelRecord]]:
    """Return the kernels behind each marker, up to the next one, in order of their starts."""
    found: list[list[KernelRecord]] = []
    for record in records:
        if record.name == marker:
            found.append([])
        elif found:
            found[-1].append(record)
    return found


def of_calls(records: Sequence[KernelRecord], marker: str, calls: int) -> list[list[str]]:
    """Return the names of the kernels that each call of a step starts.

    Args:
        records: of steps with a marker in front of every call, and one at the end.
        marker: name of markers.
        calls: number of calls of a step.

    Raises:
        RuntimeError: the markers are not those of whole steps.
    """
    found = between_markers(records, marker)
    if not found or len(found) % (calls + 1):
        raise RuntimeError(f"the profiler shows {len(found)} markers, expected {calls + 1} for each step")
    last = found[-calls - 1 : -1]  # the newest step: kernels of the first may be loaded meanwhile
    return [[record.name for record in each] for each in last]


def added(step: Sequence[KernelRecord], expected: Sequence[Sequence[str]]) -> list[float]:
    """Return the microseconds that each call of a step adds: from the end of the calls before it to its own.

    Calls overlap where a kernel starts before the one in front has ended; what is counted so adds up to the time from
    the first kernel's start to the last one's end.

    Args:
        step: the kernels of a replayed step in order of their starts; what follows them is left out.
        expected: the names of the kernels that each call starts.

    Raises:
        RuntimeError: the step has fewer kernels.
    """
    owners = [(name, call) for call, names in enumerate(expected) for name in names]
    if len(step) < len(owners):
        raise RuntimeError(f"a replayed step has {len(step)} kernels, its calls by themselves start {len(owners)}")
    kernels = step[: len(owners)]
    if Counter(record.name for record in kernels) == Counter(name for name, _ in owners):
        # kernels side by side may start in another order, those of one name hardly do
        waiting: defaultdict[str, deque[int]] = defaultdict(deque)
        for name, call in owners:
            waiting[name].append(call)
        numbers = [waiting[record.name].popleft() for record in kernels]
    else:  # a library has chosen other kernels, as many
        numbers = [call for _, call in owners]
    ends: dict[int, float] = {}
    for record, call in zip(kernels, numbers):
        ends[call] = max(ends.get(call, 0.0), record.end)
    found, now = [], min((record.start for record in kernels), default=0.0)
    for call in range(len(expected)):
        end = max(ends.get(call, now), now)
        found.append(end - now)
        now = end
    return found
