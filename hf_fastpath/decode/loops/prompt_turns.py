"""When a prompt may be read, and in which chunks, where other calls run steps meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...cache.fastpath_cache import FastpathCache
from .prompt_program import Prompt


@dataclass(eq=False)
class ShortText:
    """A call's prompt, which another call may read together with its own.

    Attributes:
        part: the model as the call has it.
        cache: of the call, empty.
        prompt: the whole text, without padding.
        stream: the CUDA stream of the call, on which alone its cache is used; None on a CPU.
        logits: [batch, vocab_size] of the token that follows, once it has been read.
    """

    part: Any
    cache: FastpathCache
    prompt: Prompt
    stream: Any = None
    logits: torch.Tensor | None = None

    @property
    def text(self) -> tuple[FastpathCache, Prompt]:
        return self.cache, self.prompt


class PromptTurns(Protocol):
    """What a reader of a prompt asks before each chunk; ``batching.prompt_turns.SharedTurns`` knows of shared steps."""

    def chunk_size(self, device: torch.device, batch: int, length: int) -> int | None:
        """Return how many of ``length`` tokens of each of ``batch`` sequences are to be read at once; None for all."""

    def chunk(
        self, device: torch.device, count: int, is_first: bool = True, prompts: int = 1
    ) -> AbstractContextManager[Any]:
        """Wait for the turn of a chunk of ``count`` tokens of all sequences of so many prompts, which is read inside
        the block. A prompt's first chunk does not wait for the share of others."""

    def others(
        self, mine: ShortText, fits: Callable[[Sequence[ShortText]], bool]
    ) -> AbstractContextManager[Sequence[ShortText]]:
        """Take prompts of other calls that wait for their turn and may be read together with one, as long as all of
        them fit; those that have no logits at the end of the block wait again."""


class Alone:
    """Turns of a prompt beside which nothing runs."""

    def chunk_size(self, device: torch.device, batch: int, length: int) -> int | None:
        return None

    def chunk(
        self, device: torch.device, count: int, is_first: bool = True, prompts: int = 1
    ) -> AbstractContextManager[Any]:
        return nullcontext()

    def others(
        self, mine: ShortText, fits: Callable[[Sequence[ShortText]], bool]
    ) -> AbstractContextManager[Sequence[ShortText]]:
        return nullcontext(())


ALONE = Alone()
