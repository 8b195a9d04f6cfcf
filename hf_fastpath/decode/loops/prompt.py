"""A whole prompt, op by op: what a decode plan does for one token is done for many.

The layers are the calls of :mod:`..sources.steps`. Ops that are made for a few rows are replaced by what is fast for
many (:mod:`..lower.many_rows`): matrix products of PyTorch's libraries, and PyTorch's fused attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import compat
from ...cache.fastpath_cache import FastpathCache
from ...native.heap import reading_prompt
from ...ops.decode_attention import MAX_QUERY_LEN
from ..plans.draft_plan import DraftPlan, DraftReader, moves_windows
from ..plans.plan_cache import PlanCache
from ..sources.step_source import StepSource
from . import multimodal
from .generate_calls import position_ids_of
from .prefixes import PrefixCall, Prefixes
from .prompt_lists import continues, is_readable, read, read_with_others, short_text
from .prompt_program import Prompt
from .prompt_turns import ALONE, PromptTurns, ShortText

#: devices on which a plan is one launch, while a program is one launch for every call
_CAPTURES = frozenset({"cuda"})


def repeats(tokens: torch.Tensor, count: int | None, cache: FastpathCache) -> int:
    """Return how many neighboring rows of ``tokens``, [batch, seq_len], are one prompt, which is then read once.

    The result is ``count`` if the rows are equal and ``cache`` is empty, else 1.
    """
    if not count or count == 1 or len(tokens) % count or cache.get_seq_length():
        return 1
    groups = tokens.unflatten(0, (-1, count))
    return count if bool((groups == groups[:, :1]).all()) else 1


def read_turn(
    part: StepSource, cache: FastpathCache, prompt: Prompt, plan_of: Callable[[int], DraftPlan]
) -> torch.Tensor | None:
    """Do as :func:`read` for a few tokens of one sequence behind others, which a plan reads as it reads drafts.

    Args:
        part, cache, prompt: as for :func:`read`.
        plan_of: makes or finds the plan of a width.

    Returns:
        The logits, or None if the prompt is anything else.
    """
    (batch, count), past = prompt.tokens.shape, cache.get_seq_length()
    if prompt.tokens.device.type not in _CAPTURES or batch != 1 or count > MAX_QUERY_LEN or not past:
        return None
    if moves_windows(part, past):
        return None
    if not continues(cache, prompt) or part.drafts_reason(past, past + 1) is not None:
        return None
    tokens, positions = torch.cat((prompt.tokens, prompt.positions)).tolist()
    if positions != list(range(positions[0], positions[0] + count)):
        return None
    reader = DraftReader(plan_of, cache, torch.tensor(positions[:1], device="cpu"), prompt.starts)
    try:
        return reader.read_piece(tokens)[-1:].clone()  # another thread may take the plan as soon as it has ended
    finally:
        reader.end()


def _read_in_turns(
    plans: PlanCache, part: StepSource, cache: FastpathCache, given: Prompt, turns: PromptTurns, asked: int | None
) -> torch.Tensor | None:
    """Do as :func:`read` in chunks of as many tokens as are asked for, or as leave other calls their turns; return None
    if no list of calls reads the prompt."""
    device, (batch, length) = given.tokens.device, given.tokens.shape
    fair = turns.chunk_size(device, batch, length)
    size = asked
    if fair is not None and fair < min(length, asked or length) and is_readable(part, cache, given, fair):
        size = fair
    elif not is_readable(part, cache, given, asked):
        return None
    logits, programs = None, plans.prompt_programs_of(part)
    if asked is None and (mine := short_text(part, cache, given)) is not None:
        logits = read_with_others(mine, programs, turns)
    if logits is not None:
        return logits
    for number, chunk in enumerate(given.chunks(size)):
        with turns.chunk(device, chunk.tokens.numel(), number == 0), compat.below_autograd():
            logits = read(part, cache, chunk, programs)
    return logits


def text_that_may_wait(
    part: StepSource, ids: torch.Tensor, config: Any, model_kwargs: dict, starts: torch.Tensor | None
) -> ShortText | None:
    """Return the prompt of a call as one that another call may read with its own, or None."""
    cache = model_kwargs[compat.CACHE]
    if not part.prompts.any_batch or cache.get_seq_length() or config.prefill_chunk_size:
        return None
    if multimodal.has_more_than_tokens(part, model_kwargs) or repeats(ids, config.num_return_sequences, cache) > 1:
        return None
    if starts is not None and starts.any():
        return None
    return short_text(part, cache, _prompt_of(ids, config, model_kwargs, None))


def _prompt_of(ids: torch.Tensor, config: Any, model_kwargs: dict, starts: torch.Tensor | None) -> Prompt:
    """Return the new tokens of a call of ``generate()``."""
    tokens = compat.new_tokens(ids, config, model_kwargs).long()  # int32 is fine with stock, too
    positions = position_ids_of(ids, config, model_kwargs)[:, -tokens.shape[1] :].long()
    return Prompt(tokens, positions, starts)


def read_again(
    plans: PlanCache,
    part: StepSource,
    cache: FastpathCache,
    ids: torch.Tensor,
    starts: torch.Tensor | None,
    turns: PromptTurns,
) -> None:
    """Read texts from their beginnings into an empty cache.

    Args:
        plans, part: the model.
        ids: int64 [batch, seq_len].
        starts: [batch], left padding, or None for none.
        turns: asked before each chunk.
    """
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    if starts is not None:
        positions = (positions - starts[:, None]).clamp(min=0)
    if _read_in_turns(plans, part, cache, Prompt(ids, positions, starts), turns, None) is None:
        raise RuntimeError(f"a text of {ids.shape[1]} tokens cannot be read again: unpatch() and patch() the model")


def read_text(
    plans: PlanCache,
    model: Any,
    part: StepSource,
    ids: torch.Tensor,
    config: Any,
    model_kwargs: dict,
    starts: torch.Tensor | None,
    prefixes: Prefixes | None = None,
    turns: PromptTurns = ALONE,
    by_modules: bool = False,
) -> tuple[torch.Tensor, PrefixCall | None]:
    """Run the prompt of ``generate()`` and append it to the cache, by :func:`read_turn`, :func:`read` or the model.

    Args:
        plans: of the model, with its programs.
        model, part: the model.
        ids, config, model_kwargs: of ``generate()``.
        starts: [batch], left padding of each row, or None.
        prefixes: of the model, or None.
        turns: asked before each chunk.
        by_modules: whether the model's own modules read it, in any case.

    Returns:
        [batch, vocab_size] logits of the first token; and what keeps the texts at the end of the call, or None.
    """
    weight = part.embedding.weight
    hidden_bytes = ids.numel() * weight.shape[-1] * weight.itemsize if weight.device.type == "cpu" else 0
    cache = model_kwargs[compat.CACHE]
    with reading_prompt(hidden_bytes):
        if by_modules or multimodal.has_more_than_tokens(part, model_kwargs):
            with turns.chunk(ids.device, max(1, ids.numel())):
                return compat.prefill(model, ids, config, model_kwargs).logits[:, -1], None
        alike = repeats(ids, config.num_return_sequences, cache)
        padding = starts if starts is not None and starts.any() else None
        texts = _Texts(plans, model, part, ids, config, model_kwargs, padding, turns).every(alike)
        found = None
        if prefixes is not None:
            found = prefixes.call(plans, part, texts.ids, texts.starts, config, texts.model_kwargs)
        logits = texts.read() if found is None else found.read(texts.between)
        if alike > 1:
            cache.batch_repeat_interleave(alike)
            logits = logits.repeat_interleave(alike, dim=0)
        return logits, found


@dataclass(frozen=True)
class _Texts:
    """What a call of ``generate()`` reads before its first token.

    Attributes:
        plans, model, part: the model.
        ids, config, model_kwargs: as for :func:`read_text`.
        starts: [batch], left padding of each row, or None for none.
        turns: asked before each chunk.
    """

    plans: PlanCache
    model: Any
    part: StepSource
    ids: torch.Tensor
    config: Any
    model_kwargs: dict
    starts: torch.Tensor | None
    turns: PromptTurns

    def every(self, count: int) -> _Texts:
        """Return every ``count``-th of the sequences."""
        if count == 1:
            return self
        rows = {name: each[::count] for name, each in self._of_rows() if len(each) == len(self.ids)}
        starts = None if self.starts is None else self.starts[::count]
        return replace(self, ids=self.ids[::count], model_kwargs=self.model_kwargs | rows, starts=starts)

    def between(self, begin: int, end: int) -> _Texts:
        """Return the tokens from one position to another, behind those that the cache then holds."""
        columns = {"attention_mask": slice(0, end), "position_ids": slice(begin, end)}
        cut = {name: each[:, columns[name]] for name, each in self._of_rows()}
        return replace(self, ids=self.ids[:, begin:end], model_kwargs=self.model_kwargs | cut)

    def _of_rows(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the arguments that have a row for each sequence, with their names."""
        for name in ("attention_mask", "position_ids"):
            if (found := self.model_kwargs.get(name)) is not None:
                yield name, found

    def have_a_list(self, past: int) -> bool:
        """Whether a list of calls reads them behind so many tokens."""
        shape = self.ids.shape[0], self.ids.shape[1]
        return self.part.prompts.form(self.ids.device, shape, past, self.starts is not None) is not None

    def read(self) -> torch.Tensor:
        """Do as :func:`read_text` for every sequence."""
        part, ids, config, model_kwargs = self.part, self.ids, self.config, self.model_kwargs
        cache = model_kwargs[compat.CACHE]
        given = _prompt_of(ids, config, model_kwargs, self.starts)
        tokens, device, turns = given.tokens, given.tokens.device, self.turns
        size = self.config.prefill_chunk_size
        is_turn = device.type in _CAPTURES and cache.get_seq_length() and tokens.shape[1] <= MAX_QUERY_LEN
        with turns.chunk(device, max(1, tokens.numel())) if is_turn else nullcontext():
            logits = read_turn(part, cache, given, functools.partial(self.plans.draft_plan, part, cache))
        if logits is None:
            logits = _read_in_turns(self.plans, part, cache, given, turns, size)
        if logits is None:
            with turns.chunk(device, max(1, ids.numel())), compat.text_cache(cache).reading_prompt():
                logits = compat.prefill(self.model, ids, config, model_kwargs).logits[:, -1]
        return logits
