"""The times of the calls of a decode step, in groups, and what is said of the whole step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: titles of calls in no layer
OUTSIDE, FRONT, BETWEEN, BEHIND = "outside of layers", "in front of layers", "between layers", "behind layers"


@dataclass(frozen=True)
class CallTime:
    """A call of a step, and the time that it adds.

    Attributes:
        number: place in the step's list of calls.
        op: name of the op, or of PyTorch's or a Python function.
        kind: of what kind it is: products, attention, experts, states, adapters, norms, tokens, ranks, PyTorch, views.
        runs: what runs it: ``"hf_fastpath"``, ``"hf_fastpath reference"`` (an op without a kernel for the device),
            ``"PyTorch"``, or ``"Python"`` for an element of a tuple.
        layer: path of its layer (``model.layers.0``), empty outside of layers.
        module: path of the module that it comes from; of several, what they have in common and their names in braces.
        shape: of its result; empty if it gives no tensor, or several.
        weights: shapes of the matrices that it multiplies by.
        us: microseconds from the end of the call in front to its own.
        bytes: least number of bytes that it moves; None if nobody knows.
        percent_of_r: bytes a second, in per cent of R; None without bytes, or without time.
        percent_of_step: share of the step.
        within: the op that makes this call as a part of its own, or None.
    """

    number: int
    op: str
    kind: str
    runs: str
    layer: str
    module: str
    shape: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    us: float
    bytes: int | None
    percent_of_r: float | None
    percent_of_step: float
    within: str | None

    @property
    def sizes(self) -> str:
        """The shapes of its weights, or without these of its result."""
        shapes = self.weights or ((self.shape,) if self.shape else ())
        return ", ".join("x".join(map(str, shape)) for shape in shapes)


@dataclass(frozen=True)
class Scaled:
    """The calls of an op that makes all layers at once, which were timed one by one and scaled to the op's own time.

    Attributes:
        op: name of the op.
        us: microseconds of the op, to which its calls add up.
        list_us: microseconds of its calls one by one.
    """

    op: str
    us: float
    list_us: float


@dataclass(frozen=True)
class StepTimes:
    """Where the time of a decode step goes.

    Attributes:
        model, dtype, device: class and type of the model, name of its device.
        batch, context: sequences, and positions that each of them holds in the middle of the measurement.
        tokens: number of steps that were measured.
        method: how calls were timed.
        us: microseconds of a step: the sum of its calls.
        plain_us: the same without the profiler.
        wall_us: wall time of a token, with what the host does between two steps; without the profiler.
        profiled_wall_us: the same under the profiler.
        host_us: wall_us less plain_us: what the host costs a token.
        first_token_us: from the call of ``generate()`` to the first token: the prompt, and an encoder.
        bandwidth: R, the bytes a second that the device reads at best.
        bytes: of all calls that are known.
        torch_percent: share of the step in calls that PyTorch runs, views among them.
        joules: of a step, of all sequences; None if there is no counter.
        energy: what the joules are of, or why there are none.
        scaled: how calls inside of one op were timed, or None.
        calls: in order.
    """

    model: str
    dtype: str
    device: str
    batch: int
    context: int
    tokens: int
    method: str
    us: float
    plain_us: float
    wall_us: float
    profiled_wall_us: float
    host_us: float
    first_token_us: float
    bandwidth: float
    bytes: int
    torch_percent: float
    joules: float | None
    energy: str
    scaled: Scaled | None
    calls: tuple[CallTime, ...]

    def by_kind(self) -> dict[str, tuple[int, float, int]]:
        """Return the number, the microseconds and the bytes of the calls of each kind, the longest first."""
        return self._groups(lambda call: call.kind)

    def by_layer(self) -> dict[str, tuple[int, float, int]]:
        """Return the same of each layer, in order; the empty path has all outside of layers."""
        found = self._groups(lambda call: call.layer)
        return {layer: found[layer] for layer in dict.fromkeys(call.layer for call in self.calls)}

    def _groups(self, key: Callable[[CallTime], str]) -> dict[str, tuple[int, float, int]]:
        found: dict[str, tuple[int, float, int]] = {}
        for call in self.calls:
            count, us, moved = found.get(key(call), (0, 0.0, 0))
            found[key(call)] = count + 1, us + call.us, moved + (call.bytes or 0)
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def limit_us(self, moved: int) -> float:
        """Return the microseconds in which the device reads so many bytes."""
        return moved / self.bandwidth * 1e6

    def summary(self) -> list[str]:
        """Return lines on the whole step."""
        batch = f"batch {self.batch}, context {self.context}"
        limit = self.limit_us(self.bytes)
        share = f"{100 * limit / self.us:.1f} % of R" if self.us else "no time"
        lines = [
            f"{self.model} {self.dtype}, {batch}, on {self.device}",
            f"  a token: {self.wall_us:,.1f} us, of which the host costs {self.host_us:,.1f} us; "
            f"the first token: {self.first_token_us:,.1f} us",
            f"  a step: {self.us:,.1f} us under the profiler, {self.plain_us:,.1f} us without it "
            f"(a token under the profiler: {self.profiled_wall_us:,.1f} us); medians of {self.tokens} tokens",
            f"  limit: {limit:,.1f} us for {self.bytes / 1e6:,.3f} MB at R = {self.bandwidth / 1e9:,.1f} GB/s: {share}",
            f"  PyTorch's calls: {self.torch_percent:.1f} % of the step",
            f"  energy: {self._energy()}",
            f"  how: {self.method}",
        ]
        if self.scaled is not None:
            lines.append(
                f"  {self.scaled.op} makes all layers in one call of {self.scaled.us:,.1f} us; the calls were timed "
                f"one by one ({self.scaled.list_us:,.1f} us) and scaled to that"
            )
        return lines

    def _energy(self) -> str:
        if self.joules is None:
            return f"not known: {self.energy}"
        each = f", {self.joules / self.batch:.4g} J of each sequence" if self.batch > 1 else ""
        return f"{self.joules:.4g} J a token{each}, of {self.energy}"

    def cells(self, us: float, moved: int | None) -> tuple[str, str, str, str]:
        """Return what tables show of a time and of bytes: both, per cent of R, and per cent of the step."""
        of_r = f"{100 * self.limit_us(moved) / us:.1f}" if moved and us else "-"
        share = f"{100 * us / self.us:.1f}" if self.us else "-"
        return f"{us:,.2f}", "-" if moved is None else f"{moved:,}", of_r, share

    def in_order(self) -> list[tuple[str, list[CallTime]]]:
        """Return the calls in order, neighbors in a layer under its path."""
        found: list[tuple[str, list[CallTime]]] = []
        for call in self.calls:
            if not found or found[-1][1][0].layer != call.layer:
                found.append((call.layer or OUTSIDE, []))
            found[-1][1].append(call)
        return found

    def layers(self) -> list[tuple[str, list[CallTime]]]:
        """Return the layers with their calls, and what is in front of them, between them and behind them."""
        inside = [place for place, call in enumerate(self.calls) if call.layer]
        found: dict[str, list[CallTime]] = {}
        for place, call in enumerate(self.calls):
            title = call.layer or OUTSIDE
            if inside and not call.layer:
                title = FRONT if place < inside[0] else BETWEEN if place < inside[-1] else BEHIND
            found.setdefault(title, []).append(call)
        last = [(title, found.pop(title)) for title in (BETWEEN, BEHIND) if title in found]
        return [*found.items(), *last]

    def groups(self) -> list[tuple[str, list[CallTime]]]:
        """Do as :meth:`layers`, with layers that make the same calls under one title, as the means of each call."""
        found: dict[tuple, list[tuple[str, list[CallTime]]]] = {}
        for title, calls in self.layers():
            alike = tuple((call.op, call.sizes, call.bytes, call.runs) for call in calls)
            found.setdefault((alike, "" if calls[0].layer else title), []).append((title, calls))
        return [_mean_of(alike) for alike in found.values()]


def _mean_of(layers: list[tuple[str, list[CallTime]]]) -> tuple[str, list[CallTime]]:
    """Return a title and the calls of the first of some layers, with the mean times of all."""
    title, calls = layers[0]
    if len(layers) == 1:
        return title, calls
    means = [_mean([each[place] for _, each in layers]) for place in range(len(calls))]
    others = f"{len(layers) - 1} layers like it, to {layers[-1][0]}" if len(layers) > 2 else f"{layers[1][0]} like it"
    return f"{title}, and {others} (means)", means


def _mean(alike: Sequence[CallTime]) -> CallTime:
    us, share = (sum(getattr(each, name) for each in alike) / len(alike) for name in ("us", "percent_of_step"))
    return CallTime(**vars(alike[0]) | {"us": us, "percent_of_step": share})
