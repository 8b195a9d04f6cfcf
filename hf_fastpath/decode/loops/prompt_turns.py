"""When a prompt may be read, and in which chunks, where other calls run steps meanwhile."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class PromptTurns(Protocol):
    """What a reader of a prompt asks before each chunk; ``batching.prompt_turns.SharedTurns`` knows of shared steps."""

    def chunk_size(self, device: torch.device, batch: int, length: int) -> int | None:
        """Return how many of ``length`` tokens of each of ``batch`` sequences are to be read at once; None for all."""

    def chunk(self, device: torch.device, count: int, is_first: bool = True) -> AbstractContextManager[Any]:
        """Wait for the turn of a chunk of ``count`` tokens of all sequences, which is read inside the block. A prompt's
        first chunk does not wait for the share of others."""


class Alone:
    """Turns of a prompt beside which nothing runs."""

    def chunk_size(self, device: torch.device, batch: int, length: int) -> int | None:
        return None

    def chunk(self, device: torch.device, count: int, is_first: bool = True) -> AbstractContextManager[Any]:
        return nullcontext()


ALONE = Alone()
