"""Rounds of whole-model measurements: engines take turns on one workload; see :mod:`.generate` for the method."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

import hf_fastpath

from ..bandwidth import measure_read_bandwidth, read_buffer
from ..progress import counted
from . import measure
from .engines import LLAMA_CPP, LlamaBench, NoSuchEngine, copied_cache, engine, is_ours

#: untimed calls that read the prompt once more: what reads it is recorded in the second call and captured in it or the
#: third
WARM_PROMPTS = 2


@dataclass
class Workload:
    """A workload that every engine runs.

    Attributes:
        prompt: int64 [batch, context] on the model's device.
        warm_tokens, new_tokens: n1, and n2 - n1.
        cache: holds all but the last position of the prompt; with None, the prompt is read.
        state_bytes: of recurrent states, which every token reads.
    """

    prompt: torch.Tensor
    warm_tokens: int
    new_tokens: int
    cache: DynamicCache | None = None
    state_bytes: int = 0

    @property
    def mean_context(self) -> float:
        """Positions that a timed decode step attends to, its own included, on average."""
        return self.prompt.shape[1] + self.warm_tokens + (self.new_tokens - 1) / 2


@dataclass
class Timings:
    """Measurements of one engine on one workload: seconds of calls and tokens, read bandwidths, peak bytes.

    Attributes:
        left_out: why there are none: the model does not have the engine.
    """

    first_call: float = 0.0
    peak_memory: int | None = None
    prefill: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)
    bandwidth: list[float] = field(default_factory=list)
    note: str = ""
    left_out: str = ""


def _reset_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # on Linux, this resets the process's high-water mark
            Path("/proc/self/clear_refs").write_text("5")


def _peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return None


def _fallback_note(model: PreTrainedModel) -> str:
    """Return what the report says about stock code that ran."""
    stats = hf_fastpath.report(model).to_dict()["stats"]
    reasons = "; ".join(
        ": ".join([f"{count} x {code}", *stats["details"].get(code, ())]) for code, count in stats["reasons"].items()
    )
    return f"{stats['fallback_tokens']} stock tokens ({reasons})" if stats["fallback_tokens"] else ""


def _run_round(name: str, model: PreTrainedModel, work: Workload, seen: Timings, timed: bool) -> None:
    """Run one round of one engine; a round that is not timed measures the first call and the peak memory."""
    device = work.prompt.device
    longest = work.warm_tokens + work.new_tokens
    if not timed:
        _reset_peak(device)
    start = time.perf_counter()
    with engine(name, model) as generate:
        cache = copied_cache(name, work.cache)
        generate(work.prompt, longest, cache)
        measure.synchronize(device)
        if not timed:  # this call includes the patch, and all that is built, compiled or captured
            seen.first_call = time.perf_counter() - start
            seen.peak_memory = _peak(device)
            seen.note = _fallback_note(model) if is_ours(name) else ""
            return

        def timed_call(count: int) -> float:
            cache = copied_cache(name, work.cache)
            return measure.seconds(lambda: generate(work.prompt, count, cache), device)

        for _ in range(WARM_PROMPTS if work.cache is None else 0):
            timed_call(1)
        one, short, long = (timed_call(count) for count in (1, work.warm_tokens, longest))
    if work.cache is None:
        seen.prefill.append(one)
    seen.token.append((long - short) / work.new_tokens)


def run_workload(
    model: PreTrainedModel,
    work: Workload,
    engines: Sequence[str],
    repeats: int,
    llama: LlamaBench | None = None,
    label: str = "",
) -> dict[str, Timings]:
    """Time all engines, and ``llama``, on ``work`` alternately, ``repeats`` times; ``label`` stands in the bar."""
    seen = {name: Timings() for name in (*engines, *([LLAMA_CPP] if llama else []))}
    batch, context = work.prompt.shape
    with counted(len(seen) * (repeats + 1), f"{label}, context {context}, batch {batch}") as bar:
        _run_rounds(model, work, seen, repeats, llama, bar)
    return seen


def _run_rounds(
    model: PreTrainedModel,
    work: Workload,
    seen: dict[str, Timings],
    repeats: int,
    llama: LlamaBench | None,
    bar: tqdm,
) -> None:
    device = work.prompt.device
    buffer = None
    for turn in range(-1, repeats):  # turn -1 is the first call
        if device.type == "cpu" and turn >= 0:
            # one buffer serves all turns, and is made after the peak memory was measured
            buffer = read_buffer(device) if buffer is None else buffer
            bandwidth = measure_read_bandwidth(device, repeats=3, buffer=buffer)
            for timings in seen.values():
                timings.bandwidth.append(bandwidth)
        for name in seen if turn % 2 == 0 else reversed(seen):
            if seen[name].left_out:
                pass
            elif name != LLAMA_CPP:
                try:
                    _run_round(name, model, work, seen[name], timed=turn >= 0)
                except NoSuchEngine as error:
                    seen[name].left_out = str(error)
            elif turn >= 0:
                context = work.prompt.shape[1] + work.warm_tokens
                seen[name].token.append(llama.seconds_per_token(context, work.new_tokens))
            bar.update()
