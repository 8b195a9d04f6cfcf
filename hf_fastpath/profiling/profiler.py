"""profile(model, inputs): where the time of a decode step goes, call by call."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import compat
from ..bandwidth import measure_read_bandwidth
from ..bench.measure import device_name, synchronize, wait_for_pages
from ..decode.sources.step_source import StepSource
from ..patching.api import patch, unpatch
from ..patching.reporting import loop_reason_now
from ..patching.state import PatchState, patched_model, state_of
from ..reasons import explained, named
from . import energy
from .attributed import Times, on_cpu, on_gpu
from .described import TORCH
from .places import Places
from .result import StepProfile
from .steps import WARM, Plain, Runner, running
from .times import CallTime

#: fewest steps that are measured, so that each way to run a step has some
LEAST_TOKENS = 4
#: calls in front of what is measured: kernels are loaded, graphs captured, a recorded step is proven, and the second
#: prompt of a recorded model is recorded
_WARM_CALLS = 2
#: calls of ``generate()`` over which energy is counted at most
_MOST_CALLS = 64
#: one profile at a time: runners of two would count each other's work
_turn = threading.Lock()


class Session:
    """The calls of ``generate()`` that a profile makes on one model.

    Args:
        model: as the user has given it.
        state, part: of the patched model inside.
        inputs: arguments of ``generate()`` by position and by name.
        tokens: steps that are measured.

    Attributes:
        device: of the step.
        places: of the model's modules.
        tokens: as given.
    """

    def __init__(
        self,
        model: Any,
        state: PatchState,
        part: StepSource,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        tokens: int,
    ):
        self._model, self._state = model, state
        self._first, self._named = inputs
        self.tokens = tokens
        self.device = compat.input_device(patched_model(model))
        self.places = Places(part.source, part.embedding, part.head)
        self.first_token_us: list[float] = []

    def generate(self, runner: Runner, tokens: int | None = None, as_list: bool = False) -> None:
        """Make a call whose steps ``runner`` runs: greedy search, with nothing that ends the text.

        Args:
            runner: runs the steps.
            tokens: steps behind the first ones; None for :attr:`tokens`.
            as_list: whether layers are calls of their own.

        Raises:
            ValueError: stock code has run, or the text has ended early.
        """
        steps = WARM + (self.tokens if tokens is None else tokens)
        greedy: dict[str, Any] = dict(do_sample=False, num_beams=1, max_new_tokens=1 + steps, eos_token_id=None)
        greedy |= dict(temperature=None, top_k=None, top_p=None)  # which transformers warns of, if nothing is sampled
        stats = self._state.stats
        before = dict(stats.reasons)
        synchronize(self.device)
        started = time.perf_counter()
        with running(self._state.plans, runner, as_list), stats.uncounted():
            self._model.generate(*self._first, **self._named | greedy)
        if runner.begun is None:
            new = [code for code, count in stats.reasons.items() if count > before.get(code, 0)]
            raise _by_stock(*(explained(code, ", ".join(stats.details.get(code, [])[:3])) for code in new))
        if runner.count < WARM + LEAST_TOKENS:
            raise ValueError(
                f"profile() got a text that ended behind {runner.count} steps, expected {steps}: give inputs behind "
                "which the model goes on, or fewer tokens"
            )
        self.first_token_us.append((runner.begun - started) * 1e6)


def _by_stock(*why: str) -> ValueError:
    said = "; ".join(why) or "report(model) has the reason"
    return ValueError(f"profile() finds no step of ours: stock code decodes for this model and these inputs. {said}")


@torch.no_grad()
def profile(model: nn.Module, inputs: Any, tokens: int = 32, *, bandwidth: float | None = None) -> StepProfile:
    """Measure where the time of a decode step goes: each call of a step with its module, time, bytes and share.

    The model generates ``tokens`` tokens a few times by greedy search, and nothing ends the text. On a CPU every second
    step runs call by call, with a look at the clock behind each call. On a GPU the kernels of replayed steps are
    recorded by CUPTI; which call starts which kernel is learned from steps that were not captured. An op that makes all
    layers in one call is taken apart: its calls are timed one by one and scaled to the op's own time, and the result
    says so. An unpatched model is patched for the measurement and unpatched afterwards; nothing else is changed.

    Args:
        model: a model that generates text, or a wrapper of one.
        inputs: input_ids [batch, seq_len], or a mapping of arguments of ``generate()`` (a tokenizer's or processor's
            output).
        tokens: steps that are measured, 4 or more.
        bandwidth: R, bytes a second that the device reads; None measures it, which takes a second and up to 8 GiB of
            memory.

    Returns:
        The profile, which prints as a table. :class:`.result.StepProfile` says what it has.

    Raises:
        ValueError: stock code decodes for this model or these inputs, with the reason and what helps; the model is
            spread over several devices; or an argument has no valid value.
        RuntimeError: CUPTI records no kernels.
    """
    if type(tokens) is not int or tokens < LEAST_TOKENS:
        raise ValueError(f"profile() got tokens={tokens!r}, expected a whole number from {LEAST_TOKENS} on")
    if bandwidth is not None and not 0 < bandwidth < float("inf"):
        raise ValueError(
            f"profile() got bandwidth={bandwidth!r}, expected bytes a second above 0, or None to measure it"
        )
    inside = patched_model(model)
    was_patched = state_of(inside) is not None
    if not was_patched:
        patch(model, quiet=True)
    try:
        state = state_of(inside)
        assert state is not None, "patch() has just made one"
        wait_for_pages(inside)
        with _turn, _without_prefixes(state):
            made = _profiled(model, state, _arguments(inside, inputs), tokens, bandwidth)
        state.torch_percent = made.torch_percent
        return made
    finally:
        if not was_patched:
            unpatch(model)


def _arguments(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as arguments of ``generate()`` by position and by name, on the model's device.

    Raises:
        ValueError: they are neither tensors nor a mapping.
    """
    if not isinstance(inputs, (torch.Tensor, Mapping)):
        raise ValueError(
            f"profile() got inputs of {type(inputs).__name__}, expected input_ids [batch, seq_len] or a mapping of "
            "arguments of generate(), such as a tokenizer's output with return_tensors='pt'"
        )
    device = compat.input_device(model)
    if isinstance(inputs, torch.Tensor):
        return (inputs.to(device),), {}
    return (), {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in inputs.items()}


@contextmanager
def _without_prefixes(state: PatchState) -> Iterator[None]:
    """Let prompts be read from their beginning, and keep nothing of them, for the length of a ``with`` block."""
    kept, state.prefixes = state.prefixes, None
    try:
        yield
    finally:
        state.prefixes = kept


def _check_part(state: PatchState, model: nn.Module) -> StepSource:
    """Return the model in its roles.

    Raises:
        ValueError: its steps are stock's, or run on several devices.
    """
    part = state.plans.part_of(model) if state.loop_reason is None else None
    if state.decided is not None and (reason := loop_reason_now(state.decided, part)) is not None:
        raise _by_stock(explained(named(reason, model)))
    assert part is not None, "without one there is a reason"
    if part.ranks is not None or len(part.devices) > 1 or any(part.host_weights):
        raise ValueError(
            f"profile() takes models on one device, and this {type(model).__name__} is spread over several, or has "
            "weights in host memory: load a part of its layers on one device, which decodes as each device does"
        )
    return part


def _profiled(
    model: Any, state: PatchState, inputs: tuple[tuple[Any, ...], dict[str, Any]], tokens: int, bandwidth: float | None
) -> StepProfile:
    inside = patched_model(model)
    part = _check_part(state, inside)
    session = Session(model, state, part, inputs, tokens)
    for _ in range(_WARM_CALLS):
        session.generate(Runner(), LEAST_TOKENS)
    session.first_token_us.clear()
    times: Times = on_cpu(session) if session.device.type == "cpu" else on_gpu(session)
    joules, of_what = _energy(session)
    if bandwidth is None:
        bandwidth = measure_read_bandwidth(session.device)
    total = sum(times.us)
    calls = tuple(
        CallTime(
            number=number,
            us=us,
            percent_of_r=100 * each.bytes / us * 1e6 / bandwidth if each.bytes and us else None,
            percent_of_step=100 * us / total if total else 0.0,
            within=within,
            **vars(each),
        )
        for number, (each, us, within) in enumerate(zip(times.described, times.us, times.within))
    )
    return StepProfile(
        model=type(inside).__name__,
        dtype=str(part.embedding.weight.dtype).removeprefix("torch."),
        device=device_name(session.device),
        batch=times.batch,
        context=times.context,
        tokens=tokens,
        method=times.method,
        us=total,
        plain_us=times.plain_us,
        wall_us=times.wall_us,
        profiled_wall_us=times.profiled_wall_us,
        host_us=times.wall_us - times.plain_us,
        first_token_us=min(session.first_token_us),
        bandwidth=bandwidth,
        bytes=sum(each.bytes or 0 for each in calls),
        torch_percent=sum(each.percent_of_step for each in calls if each.runs == TORCH),
        joules=joules,
        energy=of_what,
        scaled=times.scaled,
        calls=calls,
    )


def _energy(session: Session) -> tuple[float | None, str]:
    """Return the joules of a step and what they are of, or None and why they are not known."""
    meter = energy.meter_of(session.device)
    if isinstance(meter, str):
        return None, meter
    joules, seconds, steps = 0.0, 0.0, 0
    for _ in range(_MOST_CALLS):
        runner = Plain(meter=meter)
        session.generate(runner)
        joules, seconds, steps = joules + runner.energy, seconds + runner.seconds, steps + runner.count - WARM
        if seconds >= meter.seconds:
            return joules / steps, meter.name
    return None, f"{_MOST_CALLS} calls took {seconds:.2f} s, and the counter needs {meter.seconds} s: give more tokens"
