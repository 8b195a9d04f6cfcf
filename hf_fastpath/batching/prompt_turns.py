"""Prompts beside steps: one at a time, in chunks, between which the rows that decode have their share of the time.

A prompt that is read at once may stall every row for as long as it takes. So it is cut into chunks that take about as
long as a step, or on a GPU so long that starting kernels does not matter. How many steps end while a chunk is read
tells how much of their speed the rows have kept: all of it where steps run on other cores, nothing where a chunk takes
all cores. If that was less than half, the reader waits until it is half: as long as the chunk has taken where rows
stood still. Where more prompts wait than rows go on, as at the beginning of many calls, rows have that much less.

Short prompts that wait when one is read are read together with it, where a graph reads several.

On a GPU, steps stand still while a prompt is read that takes no longer than a few of them: its launches and theirs
would wait for each other, and it took up to ten times as long (H200, 118 ms instead of 10).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..decode.loops.call_scope import Cancelled, scope_here
from ..decode.loops.prompt_turns import ShortText
from ..decode.run.to_host import wait_for

#: tokens of a chunk at least: with fewer, products of a CPU take longer for each token, and on a GPU the launches of a
#: chunk's calls take as long
LEAST = {"cpu": 64, "cuda": 256}
#: seconds that a chunk takes at least where its launches take some milliseconds, whatever it holds
LEAST_S = {"cpu": 0.0, "cuda": 0.03}
#: tokens of a chunk at most
MOST = 4096
#: a prompt that takes no longer than so many steps is read at once: its rows come the sooner
SHORT = 4
#: as many times the least, where neither steps nor chunks have been timed
_UNKNOWN = 4
#: newest chunks, of which the fastest tells how long a token takes: in short ones, and beside steps, it takes longer
_CHUNKS = 8
#: share of the newest measurement in what is known of the speed of steps; of a step beside a chunk, which takes longer
_NEWEST, _BESIDE = 0.3, 0.03
#: steps, by the time that they usually take, that a reader waits at most until one has ended: nobody may lead
_MOST_STEPS = 3


class SharedTurns:
    """The prompts of one model, for calls that share steps.

    Args:
        sharing: the steps (:class:`.sharing.Sharing`).

    Attributes:
        calls: calls that read their prompt or wait for that.
        steps: how many have ended.
        blocks_steps: a chunk is read, or is the next, and steps wait for its end; guarded by the lock of ``sharing``.
    """

    def __init__(self, sharing: Any):
        self._sharing = sharing
        self._one = threading.Lock()
        self._waiting: list[ShortText] = []
        self._changed = threading.Condition(sharing.lock)
        self.calls = 0
        self.blocks_steps = False
        self._is_stepping = False
        self.steps, self._steps_before = 0, -1
        self._not_before = 0.0
        self._is_reading = False
        self._step_s: float | None = None
        self._token_s: dict[str, deque[float]] = {}  # of the newest chunks on a type of device

    # ---- for who reads a prompt -------------------------------------------------------------------------------

    @contextmanager
    def prompt(self, text: ShortText | None = None) -> Iterator[SharedTurns]:
        """Read a prompt, for the length of a ``with`` block.

        Two threads that start as many small kernels hand the GIL to each other at each of them, and take ten times as
        long as one after the other.

        Args:
            text: the prompt, if another call may read it meanwhile: it has logits then.
        """
        with self._sharing.lock:
            self.calls += 1
            if text is not None:
                self._waiting.append(text)
        try:
            with self._one:
                self._waits_no_more(text)
                yield self
        finally:
            self._waits_no_more(text)
            with self._sharing.lock:
                self.calls -= 1

    def _waits_no_more(self, text: ShortText | None) -> None:
        with self._sharing.lock:
            if text in self._waiting:
                self._waiting.remove(text)

    @contextmanager
    def others(self, mine: ShortText, fits: Callable[[Sequence[ShortText]], bool]) -> Iterator[Sequence[ShortText]]:
        """See ``decode.loops.prompt_turns.PromptTurns``."""
        taken: list[ShortText] = []
        with self._sharing.lock:
            for each in list(self._waiting):
                is_alike = each.part is mine.part and each.stream == mine.stream
                if is_alike and each.cache.kv_dtype == mine.cache.kv_dtype and fits([mine, *taken, each]):
                    taken.append(each)
                    self._waiting.remove(each)
        try:
            yield taken
        finally:
            with self._sharing.lock:
                self._waiting += [each for each in taken if each.logits is None]

    def chunk_size(self, device: torch.device, batch: int, length: int) -> int | None:
        """See ``decode.loops.prompt_turns.PromptTurns``."""
        with self._sharing.lock:
            step_s, token_s = self._step_s, self._seconds_of_token(device)
            if not self._rows() or self._is_short(device, batch * length):
                return None
        least = _least(device)
        if step_s is None or token_s is None:
            size = _UNKNOWN * least
        else:
            size = max(least, int(max(step_s, LEAST_S.get(device.type, LEAST_S["cuda"])) / token_s))
        # few numbers of rows occur, of which each may have calls of its own
        return max(1, min(MOST, least * 2 ** round(math.log2(size / least))) // batch)

    @contextmanager
    def chunk(self, device: torch.device, count: int, is_first: bool = True, prompts: int = 1) -> Iterator[None]:
        """See ``decode.loops.prompt_turns.PromptTurns``.

        Raises:
            Cancelled: the request of the call is cancelled.
        """
        scope = scope_here()
        try:
            is_shared = self._wait_for_turn(device, count // prompts, is_first)
            if scope is not None and scope.is_cancelled:
                raise Cancelled
            started, before = time.perf_counter(), self.steps
            self._is_reading = True
            yield
            if is_shared:
                wait_for(device)
                self._note_chunk(device, count, time.perf_counter() - started, before)
        finally:
            with self._sharing.lock:
                self.blocks_steps = self._is_reading = False
                self._changed.notify_all()

    def _wait_for_turn(self, device: torch.device, count: int, is_first: bool) -> bool:
        """Wait until rows have had their share; return whether there are any.

        A prompt's first chunk waits for nothing where rows go on beside it: short prompts come to their rows as soon as
        they can. Where rows stand still for a short prompt, the next one waits as long as any chunk, but for no step.
        """
        with self._sharing.lock:
            now = time.perf_counter()
            stops_steps = is_first and device.type != "cpu" and self._is_short(device, count)
            latest = max(now, self._not_before) + _MOST_STEPS * (self._step_s or 0.0)
            while (stops_steps or not is_first) and now < latest and self._rows():
                has_stepped = stops_steps or self.steps != self._steps_before or not self._goes_on()
                if now >= self._not_before and has_stepped:
                    break
                self._changed.wait(max(0.0, self._not_before - now) or latest - now)
                now = time.perf_counter()
            if not self._rows():
                return False
            self.blocks_steps = stops_steps or _takes_all_cores(device)
            while self.blocks_steps and self._is_stepping:
                self._changed.wait()
            return True

    def _note_chunk(self, device: torch.device, count: int, seconds: float, steps_before: int) -> None:
        with self._sharing.lock:
            if count >= _least(device):  # shorter ones take as long
                self._token_s.setdefault(device.type, deque(maxlen=_CHUNKS)).append(seconds / count)
            kept = (self.steps - steps_before) * (self._step_s or 0.0) / seconds
            share = min(1.0, self._rows() / max(1, self.calls)) * max(0.0, 1 - 2 * kept)
            self._not_before = time.perf_counter() + share * seconds
            self._steps_before = self.steps if share else -1

    def _seconds_of_token(self, device: torch.device) -> float | None:
        """Return how long a token of a prompt takes, if that is known."""
        return min(self._token_s.get(device.type, ()), default=None)

    def _is_short(self, device: torch.device, count: int) -> bool:
        """Whether a prompt of so many tokens is read at once. The caller holds the lock."""
        step_s, token_s = self._step_s, self._seconds_of_token(device)
        takes_few_steps = step_s is not None and token_s is not None and count * token_s <= SHORT * step_s
        return takes_few_steps or count < 2 * _least(device)

    def _rows(self) -> int:
        """Return how many rows go on with their texts: those of members, and calls that are about to join."""
        sharing = self._sharing
        rows = sum(len(each.starts) for each in (*sharing.members, *sharing.joining) if not each.has_ended)
        return max(rows, sharing.calls - self.calls - sharing.room.num_waiting)

    def _goes_on(self) -> bool:
        """Whether a step comes, as far as that is known."""
        return bool(self._sharing.joining) or any(member.is_due for member in self._sharing.members)

    # ---- for the leader ---------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Wait for the end of a chunk that takes all cores. The caller holds the lock, and steps behind it."""
        while self.blocks_steps:
            self._changed.wait()
        self._is_stepping = True

    def end_step(self, seconds: float) -> None:
        """Note that a step has ended. The caller holds the lock."""
        self._is_stepping = False
        self.steps += 1
        known = seconds if self._step_s is None else self._step_s
        self._step_s = known + (_BESIDE if self._is_reading else _NEWEST) * (seconds - known)
        self._changed.notify_all()


def _least(device: torch.device) -> int:
    return LEAST.get(device.type, LEAST["cuda"])


def _takes_all_cores(device: torch.device) -> bool:
    """Whether a chunk and a step side by side would have more threads than there are cores: both would wait for the
    slowest of their threads again and again."""
    return device.type == "cpu" and 2 * torch.get_num_threads() > _num_cores()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
