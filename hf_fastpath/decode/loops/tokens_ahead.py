"""Tokens that a device has chosen and the host has not seen: how far the host is ahead, and what it takes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ... import compat
from ...cache.fastpath_cache import FastpathCache
from ..ranks.process_group import Ranks
from ..run.graph import random_numbers_in_turn


@dataclass
class Pending:
    """The tokens of a step, on their way from the device to the host.

    Attributes:
        length: length of the sequences with these tokens.
        tokens, unfinished: [batch] in host memory, valid once ``event`` has passed.
        chosen_by_plan: the plan has chosen the tokens, and the host has not seen them in any other way.
    """

    length: int
    tokens: torch.Tensor
    unfinished: torch.Tensor
    event: torch.cuda.Event | None
    chosen_by_plan: bool = False


class TokensAhead:
    """A call of ``generate()`` whose host may be some tokens ahead of what it has seen.

    Args:
        input_ids: int64 [batch, seq_len].
        max_length: tokens of a sequence at most, or None.
        streamer: gets the tokens, or None.
    """

    ahead: int
    unfinished: torch.Tensor

    def __init__(self, input_ids: torch.Tensor, max_length: int | None, streamer: Any):
        self.device = input_ids.device
        self.batch, self.prompt_len = input_ids.shape
        self.max_length: Any = max_length
        self.streamer = streamer
        self.ids = input_ids
        self.length = self.prompt_len  # length of the sequences, with the tokens that the device has chosen by itself
        self.chosen: list[torch.Tensor] = []  # the tokens that the device has chosen, [batch] each, which follow ids
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self.pending: deque[Pending] = deque()
        self.offsets: dict[int, int] = {}
        self.drawn_to: int | None = None  # the generator's offset after the last number that was drawn here
        self.finished_length: int | None = None  # length at which every row had ended, once the host knows
        self.ranks: Ranks | None = None  # the processes over which the model is spread

    def _draw(self, function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        """Return ``function(*arguments)``, which draws the next tokens.

        The generator's offset before the draw is remembered if the draw may have to be undone.
        """
        with random_numbers_in_turn(self.device):
            if not self.ahead:
                return function(*arguments)
            offset = compat.philox_offset(self.device)
            if offset != self.drawn_to:  # another thread has drawn; its numbers cannot be given back
                self.offsets.clear()
            self.offsets[self.length] = offset
            drawn = function(*arguments)
            self.drawn_to = compat.philox_offset(self.device)
            return drawn

    def _send(self, tokens: torch.Tensor) -> None:
        """Start copying this step's tokens to the host."""
        unfinished = torch.empty(self.batch, dtype=torch.long, device="cpu", pin_memory=True)
        unfinished.copy_(self.unfinished, non_blocking=True)
        on_host = torch.empty(self.batch, dtype=torch.long, device="cpu", pin_memory=True)
        if self.streamer is not None:
            on_host.copy_(tokens, non_blocking=True)
        self.pending.append(Pending(self.length, on_host, unfinished, self._event()))

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _look_back(self, wait: bool = False) -> bool:
        """Take in the tokens that have arrived, and wait only if the host is too far ahead.

        Returns:
            Whether every row has ended.
        """
        while self.pending:
            oldest = self.pending[0]
            if oldest.event is not None:
                if not (wait or len(self.pending) > self.ahead or self._has_passed(oldest.event)):
                    return False
                oldest.event.synchronize() if self.ranks is None else self.ranks.wait(oldest.event)
            self.pending.popleft()
            self.offsets.pop(oldest.length - 1, None)
            if oldest.chosen_by_plan:
                self.chosen.append(oldest.tokens.clone())
            if self.streamer is not None:
                self.streamer.put(oldest.tokens.clone())
            if not oldest.unfinished.numpy().any():
                self.finished_length = oldest.length
                return True
        return False

    def _settle(self, tokens: int = 1) -> None:
        """Before the host looks at what the device computes: do not wait forever if that needs other ranks."""
        if self.ranks is not None:
            self.ranks.settle(self.device, tokens)

    def _has_passed(self, event: torch.cuda.Event) -> bool:
        """Whether a device has passed an event. Ranks pass it at other times, and all have to run equally far ahead."""
        return self.ranks is None and event.query()

    def _drain(self) -> int:
        """Wait for the tokens on their way; return how many steps were run past the end."""
        if self.finished_length is None:
            self._look_back(wait=True)
        return 0 if self.finished_length is None else self.length - self.finished_length

    def _undo(self, steps: int, cache: FastpathCache) -> None:
        """Take back ``steps`` tokens from sequences, scores and cache, and the random numbers that they used."""
        self.length -= steps
        self.ids = self.ids[:, : self.length]  # the plan's tokens past the end were never appended
        for recorded in (self.scores, self.logits):
            del recorded[len(recorded) - steps if recorded else 0 :]
        if cache.state_layers:
            cache.reset()  # nothing can be taken back from states, and nobody reads them: see generate()
        else:
            cache.crop(-steps)
        if self.length in self.offsets:
            with random_numbers_in_turn(self.device):
                if compat.philox_offset(self.device) == self.drawn_to:
                    compat.set_philox_offset(self.device, self.offsets[self.length])
