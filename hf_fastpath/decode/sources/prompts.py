"""How prompts of a source of steps are read op by op: what ``loops.prompt`` asks of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...cache.fastpath_cache import FastpathCache
from ...ops.kv_cache import KVCache
from ..lower.positions import Positions
from ..lower.which_op import Lower
from ..run.program import Program


@dataclass(frozen=True)
class PromptInputs:
    """What a program has for a prompt, as registers that are filled for each prompt.

    Attributes:
        form: what :meth:`Prompts.form` has given for such prompts.
        batch: number of sequences.
        tokens: int64 [batch, query_len].
        positions: int64 [batch, query_len].
        caches: each layer's keys and values.
        states: each layer's states.
        at: the places of the tokens, with the tables of cos and sin for every kind of layer.
        size: gives what stands for a number that a function makes of query_len.
    """

    form: Any
    batch: int
    tokens: Any
    positions: Any
    caches: Sequence[KVCache]
    states: Sequence[Sequence[Any]]
    at: Positions
    size: Callable[[Callable[[int], Any]], Any]


class CachedAttention(Protocol):
    """What a plan and a cache ask of a layer's attention."""

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Number of KV heads, and elements of a key."""

    @property
    def value_shape(self) -> tuple[int, int]:
        """Number of KV heads, and elements of a value."""

    @property
    def num_heads(self) -> int:
        """Number of query heads."""

    @property
    def head_dim(self) -> int:
        """Elements of a query head."""


class Prompts(Protocol):
    """The prompts of a model, as the model is now."""

    @property
    def any_batch(self) -> bool:
        """Whether the lists of calls are the same for any number of sequences."""

    def form(self, device: torch.device, shape: tuple[int, int], past: int, is_padded: bool) -> Any:
        """Return what prompts have in common that one list of calls reads: an object that lives as long as the source
        does. None if stock code reads the prompt.

        Args:
            device: of the prompt.
            shape: [batch, query_len].
            past: tokens before the prompt.
            is_padded: rows begin with padding.
        """

    def begin(self, form: Any) -> None:
        """Make ready what the calls for a prompt of ``form`` read besides the model's tensors."""

    def prepare(self, cache: FastpathCache, batch: int) -> None:
        """Make an empty cache ready for a prompt."""

    def record(self, program: Program, to: Lower, last: Lower, given: PromptInputs) -> Any:
        """Emit the calls of a prompt; return the register of the last token's logits, [batch, 1, vocab_size].

        Args:
            program: gets the calls.
            to: makes the calls of all tokens, and gives them to ``program``.
            last: makes those of the last token of each sequence.
        """


def empty_states(attention: CachedAttention, like: torch.Tensor, batch: int) -> list[torch.Tensor]:
    """Return keys and values, [batch, num_kv_heads, 0, head_dim], of ``like``'s dtype and device."""
    shapes = attention.cache_shape, attention.value_shape
    return [like.new_empty(batch, heads, 0, dim) for heads, dim in shapes]
