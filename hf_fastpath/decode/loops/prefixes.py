"""Texts that begin as earlier ones did: what the model has made of these is not made again.

A text is found by its tokens and by the state of the model that has read it: what a plan bakes in, and a sum over all
weights. The model then reads the rest alone, as it reads a turn of a conversation.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from ... import compat
from ...cache.fastpath_cache import FastpathCache
from ...cache.prefixes import PAGE, Found, PrefixStore, has_ends, load
from ...ops.decode_attention import MAX_QUERY_LEN
from ...stats import PrefixCounts
from ..plans.plan_cache import PlanCache
from ..sources.step_source import StepSource
from ..state.snapshot import Snapshot
from ..state.weights_sum import begin_sum, weights_sum
from . import multimodal
from .forward_answers import goes_on_from_states
from .generate_calls import position_ids_of

#: a rest of so many tokens is read token by token where nothing else reads several tokens behind states
_MOST_STEPS = 256


class Piece(Protocol):
    """Tokens of prompts, behind those that the cache holds."""

    def have_a_list(self, past: int) -> bool:
        """Whether a list of calls reads them behind so many tokens."""

    def read(self) -> torch.Tensor:
        """Read them, by a list of calls or the model's modules; return [batch, vocab_size] logits of the next token."""


class Prefixes:
    """The texts of one model.

    Args:
        limit: bytes that are kept at most.

    Attributes:
        weights_stay: they were the same when a known text was read last.
    """

    def __init__(self, limit: int):
        self.weights_stay = True
        self.store, self.counts = PrefixStore(limit), PrefixCounts(limit)
        self._facts: tuple[weakref.ref[Snapshot], bool, list[bool]] | None = None

    def keeping(self) -> AbstractContextManager[Any]:
        """Return what is entered while texts are kept beside calls that run."""
        return nullcontext()

    def forget_other_threads(self) -> None:
        """Forget what threads hold: in the child of a fork, these threads do not exist."""
        self.store.forget_other_threads()

    def clear(self) -> None:
        """Forget all texts."""
        self.store.clear()

    def call(
        self,
        plans: PlanCache,
        part: StepSource,
        ids: torch.Tensor,
        starts: torch.Tensor | None,
        config: Any,
        model_kwargs: dict,
    ) -> PrefixCall | None:
        """Return what a call of ``generate()`` needs of prefixes; None if its texts are not looked up, or kept.

        Args:
            plans, part: of the model, without a reason against a decode plan.
            ids: [batch, seq_len], the prompts.
            starts: [batch], left padding of each row, or None for none.
            config, model_kwargs: of the call.
        """
        cache = model_kwargs[compat.CACHE]
        if part.ranks is not None or part.token_shape or multimodal.has_more_than_tokens(part, model_kwargs):
            return None
        if not cache.holds_nothing or compat.cache_drop(part.module) is not None:
            return None
        paddings = [0] * len(ids) if starts is None else starts.tolist()
        if not part.takes_positions and any(paddings):  # where a text's tokens stand may depend on the padding
            return None
        if not _counts_from_zero(position_ids_of(ids, config, model_kwargs), paddings, ids.shape[1]):
            return None
        if has_ends(cache) and (any(paddings) or any(layer.record_past for layer in cache.layers)):
            return None
        snapshot = plans.snapshot_of(part)
        if not self._facts_of(snapshot)[0]:
            return None
        return PrefixCall(self, plans, part, snapshot, ids, paddings, cache)

    def _facts_of(self, snapshot: Snapshot) -> tuple[bool, list[bool]]:
        """Return whether keys of a text are the same however long it gets, and what is known of stock's forward."""
        if self._facts is None or self._facts[0]() is not snapshot:
            rotary = (each for each in snapshot.part.module.modules() if hasattr(each, "rope_type"))
            self._facts = weakref.ref(snapshot), all(map(compat.has_static_rope, rotary)), []
        return self._facts[1:]

    def modules_go_on(self, part: StepSource, snapshot: Snapshot) -> bool:
        """Whether the model's own forward goes on from states with several tokens; asked once of a model as it is."""
        known = self._facts_of(snapshot)[1]
        if not known:
            known.append(goes_on_from_states(part))
        return known[0]


class PrefixCall:
    """The prefixes of one call of ``generate()``.

    Args:
        prefixes: of the model.
        plans, part, snapshot: the model as it is.
        ids: [batch, seq_len], the prompts.
        paddings: left padding of each of them.
        cache: of the call, empty.
    """

    def __init__(
        self,
        prefixes: Prefixes,
        plans: PlanCache,
        part: StepSource,
        snapshot: Snapshot,
        ids: torch.Tensor,
        paddings: list[int],
        cache: FastpathCache,
    ):
        self._prefixes, self._plans, self._part, self._snapshot = prefixes, plans, part, snapshot
        self._ids, self._paddings, self._cache = ids, paddings, cache
        self._fingerprint, self._sum = snapshot.fingerprint, begin_sum(snapshot.held_tensors())

    @functools.cached_property
    def _guard(self) -> tuple:
        """What keys, values and states depend on besides the tokens, as it was when the call began."""
        return self._fingerprint, self._sum.value()

    def _guard_now(self) -> tuple:
        return self._snapshot.fingerprint, weights_sum(self._snapshot.held_tensors())

    def read(self, between: Callable[[int, int], Piece]) -> torch.Tensor:
        """Read the prompts, but not what is known of them.

        Args:
            between: gives the tokens from one position to another.

        Returns:
            [batch, vocab_size] logits of the token behind the prompts.
        """
        rows, length = self._ids.tolist(), self._ids.shape[1]
        texts = [row[padding:] for row, padding in zip(rows, self._paddings)]
        at_marks, store = has_ends(self._cache), self._prefixes.store
        if at_marks and len(texts) > 1:
            return between(0, length).read()
        if not (at_marks or self._sum.is_done()):
            if (answer := self._read_meanwhile(texts, between)) is not None:
                return answer
        found, begin = self._known(self._guard, texts, at_marks)
        self._prefixes.weights_stay |= begin > 0
        step = self._steps_from(begin, between(begin, length)) if at_marks and 0 < begin < length else False
        if step is None:
            begin = 0
        self._count(texts, begin)
        if begin:
            self._load(found, begin)
        if not at_marks:
            return between(begin, length).read()
        if begin == length and found[0].mark is not None and found[0].mark.logits is not None:
            return found[0].mark.logits.clone()
        shared = min(store.common(self._guard, texts[0]), length - 1)
        for end in (shared, length):
            if end > begin and (end == length or end >= begin + PAGE):
                logits = self._by_steps(begin, end) if step else between(begin, end).read()
                self._keep(self._ids[:, :end], logits)
                begin = end
        return logits

    def _read_meanwhile(self, texts: list[list[int]], between: Callable[[int, int], Piece]) -> torch.Tensor | None:
        """Read the prompts while the sum over the weights is under way, as if they were those of the newest text that
        such a model has read; return None if they were not, or nothing is known of the prompts."""
        prefixes, length = self._prefixes, self._ids.shape[1]
        likely = prefixes.store.newest_guard(lambda guard: guard[0] == self._fingerprint)
        if likely is None or not prefixes.weights_stay:
            return None
        found, begin = self._known(likely, texts, False)
        if not begin:
            return None
        self._load(found, begin)
        logits = between(begin, length).read()
        prefixes.weights_stay = self._guard == likely
        if not prefixes.weights_stay:
            self._cache.reset()
            return None
        self._count(texts, begin)
        return logits

    def _known(self, guard: tuple, texts: list[list[int]], at_marks: bool) -> tuple[list[Found], int]:
        """Return what is kept of each text, and the position up to which all are known; 0 if nothing is kept of any."""
        found = [self._prefixes.store.find(guard, text, len(text) - 1, at_marks) for text in texts]
        begin = min(padding + each.count for padding, each in zip(self._paddings, found))
        return found, begin if any(each.count for each in found) else 0

    def _count(self, texts: list[list[int]], begin: int) -> None:
        known = sum(max(0, begin - padding) for padding in self._paddings)
        self._prefixes.counts.add(sum(map(len, texts)), known)

    def _load(self, found: list[Found], begin: int) -> None:
        cache = self._cache
        self._part.prompts.prepare(cache, len(found))
        load(cache, found, self._paddings, begin)

    def _steps_from(self, begin: int, piece: Piece) -> bool | None:
        """Return whether the rest, a piece, has to be read token by token behind states; None if it is not to be read
        so."""
        length = self._ids.shape[1]
        rest = length - begin
        if piece.have_a_list(begin):
            return False
        if rest > MAX_QUERY_LEN and self._prefixes.modules_go_on(self._part, self._snapshot):
            return False
        return True if rest <= min(_MOST_STEPS, max(MAX_QUERY_LEN, length // 8)) else None

    def _by_steps(self, begin: int, end: int) -> torch.Tensor:
        """Read the tokens between two positions by a decode plan."""
        plan = self._plans.decode_plan(self._part, len(self._ids), self._cache)
        try:
            plan.begin(self._cache, torch.full((len(self._ids),), begin, device="cpu"), None)
            for place in range(begin, end):
                logits = plan.step(self._ids[:, place].long())
            return logits.clone()
        finally:
            plan.end()

    def keep_prompt(self) -> None:
        """Keep the prompts as soon as they were read, for calls that run beside this one. With windows or states, their
        ends are kept while they are read."""
        if not has_ends(self._cache):
            assert self._guard, "the host waits for the sum before others wait for the host"
            with self._prefixes.keeping():
                self._keep(self._ids)

    def keep(self, ids: torch.Tensor, may_have_changed: bool) -> None:
        """Keep the texts that the cache holds at the end of the call.

        Args:
            ids: [batch, seq_len], with the tokens that were generated.
            may_have_changed: code of the user's has run since the call began, which may have changed the model.
        """
        if may_have_changed and not (self._snapshot.holds() and self._guard_now() == self._guard):
            return
        self._keep(ids)

    def _keep(self, ids: torch.Tensor, logits: torch.Tensor | None = None) -> None:
        cache, counts, store = self._cache, self._prefixes.counts, self._prefixes.store
        held = min(ids.shape[1], cache.get_seq_length())
        batch = len(ids)
        # sequences that begin with the same prompt follow each other
        paddings = [padding for padding in self._paddings for _ in range(batch // len(self._paddings))]
        try:
            if cache.take():
                for row, (tokens, padding) in enumerate(zip(ids[:, :held].tolist(), paddings)):
                    store.keep(self._guard, tokens[padding:], cache, row, padding, logits)
        except compat.OUT_OF_MEMORY:  # the call itself is done
            store.clear()
        counts.kept_bytes = store.num_bytes


def _counts_from_zero(positions: torch.Tensor, paddings: list[int], length: int) -> bool:
    """Whether the first token of each text is at position 0, and each next one behind it."""
    if positions.shape[-1] != length or positions.dim() != 2:
        return False
    expected = torch.arange(length, device=positions.device) - torch.tensor(paddings, device=positions.device)[:, None]
    return bool(((positions == expected) | (expected < 0)).all())
