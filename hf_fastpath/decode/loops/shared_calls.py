"""Calls of ``generate()`` that may share steps with other calls of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ... import compat
from ...cache.buffers import RING_SLACK
from ...cache.fastpath_cache import FastpathCache
from ...reasons import Cause
from ..model.modules import is_packed
from ..run.to_host import wait_for
from ..sources.step_source import StepSource
from . import adapter_rows
from .call_scope import CallScope, scope_here
from .generate_calls import end_tokens, ends_by_length_or_token
from .patched import Patched
from .prompt import read_again


def why_not_shared(state: Patched, part: StepSource, cache: Any, config: Any, criteria: Any) -> Cause | None:
    """Return why the rows of a call cannot be slots beside those of other calls, or None.

    Args:
        state, part: of the model; there is no reason against our loop.
        cache: of the call.
        config, criteria: of the call.
    """
    what = why_model_not_shared(state, part)
    if what is None and adapter_rows.are_named():
        what = "an adapter for each row"
    if what is None and (not isinstance(cache, FastpathCache) or any(cache.page_sizes)):
        what = "a KV cache in pages"
    if what is None and part.learned_positions is not None:
        known = part.learned_positions[0]
        if criteria.max_length is None or criteria.max_length > known:
            what = f"max_length is {criteria.max_length}, and the model has learned {known} positions"
    if what is None and getattr(config, "is_assistant", False):
        what = "drafts for another model"
    return None if what is None else Cause("not_shared", what)


def why_model_not_shared(state: Patched, part: StepSource) -> str | None:
    """Return what a model has that slots cannot serve, or None."""
    if part.has_encoder:
        return "an encoder"
    if part.token_shape:
        return "several tokens at a position"
    if part.ranks is not None or len(part.devices) > 1 or part.host_weights:
        return "weights on several devices"
    if any(kind.states for kind in part.kinds):
        return "recurrent states"
    if part.counts_alike:
        return "positions that are counted for all rows alike"
    if part.by_length.is_bounded(1) or part.by_length.is_bounded(2):
        return "steps that differ with the length of the text"
    if any(is_packed(module) and module.mixes_rows for module in part.module.modules()):
        return "inputs that are rounded by those of all rows (LLM.int8)"
    return part.proof_reason(state.plans, 2)


class SharedCall:
    """A call that may share steps.

    Args:
        state: of the model.
        scope: of the call's thread, or None.
    """

    def __init__(self, state: Patched, scope: CallScope | None):
        self.sharing, self.scope = state.sharing, scope
        self.is_joined = False
        self.ticket: Any = None  # of the call in the room of the slots
        self._plans = state.plans

    @classmethod
    @contextmanager
    def of(cls, state: Patched, part: StepSource, loop: Any, cache: Any) -> Iterator[SharedCall | None]:
        """Be a call that may share steps, for the length of a ``with`` block.

        Yields:
            The call; None if it goes its own way, for a reason that is noted.
        """
        scope = scope_here()
        shares = state.options.share_steps or (scope is not None and scope.shares)
        reason = why_not_shared(state, part, cache, loop.config, loop.criteria) if shares else None
        if reason is not None:
            state.stats.note(reason)
        is_seen = shares and loop.runs_users_code and cache.stands_for is None  # the user's code may edit the cache
        if not shares or reason is not None or is_seen:
            yield None
            return
        with state.sharing.call():
            made = cls(state, scope)
            try:
                yield made
            finally:
                if made.ticket is not None:
                    state.sharing.leave_room(made.ticket)

    def enter(self, part: StepSource, cache: FastpathCache, loop: Any) -> None:
        """Wait until there is room for the prompt, and for the rows behind it.

        Raises:
            Cancelled: the request of the call is cancelled.
        """
        longest = loop.length + 1
        if not cache.is_dropped and loop.max_length is not None:
            longest = max(longest, loop.max_length)
        self.ticket = self.sharing.enter(part, cache.kv_dtype, loop.batch, longest, self.scope)

    def is_due(self, part: StepSource, cache: FastpathCache) -> bool:
        """Whether the call joins now: others are under way, which have the model as it is."""
        if self.is_joined or not (self.sharing.calls > 1 or (self.scope is not None and self.scope.shares)):
            return False
        return self.sharing.fits(self.sharing.plans.fingerprint_of(part), cache.kv_dtype)

    def join(
        self,
        part: StepSource,
        cache: FastpathCache,
        loop: Any,
        positions: torch.Tensor,
        starts: torch.Tensor | None,
    ) -> Any:
        """Let the call go on by steps that it shares.

        Args:
            part: the model.
            cache: of the call.
            loop: the call.
            positions: [batch], position ids of the tokens that are read next.
            starts: [batch], left padding, or None.

        Returns:
            What stands where a decode plan would stand; None if the rows cannot be slots.
        """
        places, held = positions.tolist(), cache.get_seq_length()
        if not all(0 <= place <= held for place in places) or not cache.take():
            return None
        self.is_joined = True
        given: dict[str, Any] = dict(length=held + 1, positions=places, chooser=self._chooser(loop, held + 1))
        given |= dict(ticket=self.ticket, starts=[0] * loop.batch if starts is None else starts.tolist())
        has_windows = any(kind.window is not None for kind in part.kinds)
        given |= self._to_read_again(part, cache, loop, places, given["starts"])
        given["most_ahead"] = RING_SLACK if has_windows and not self.ends_itself(loop) else None
        given["unfinished"] = [bool(each) for each in loop.unfinished.tolist()]
        return self.sharing.join(self.sharing.member(part, cache, self.scope, **given))

    def _to_read_again(
        self, part: StepSource, cache: FastpathCache, loop: Any, positions: list[int], starts: list[int]
    ) -> dict[str, Any]:
        """Return what a member needs to read its text again, where that is known: its tokens are all that the cache
        holds, at the positions behind each other, and nobody reads the cache."""
        held = cache.get_seq_length()
        is_plain = loop.ids.shape[1] == held + 1 and positions == [held - start for start in starts]
        if not (is_plain and cache.is_dropped) or part.is_multimodal:
            return {}

        def again(text: torch.Tensor) -> None:
            with self.sharing.prompts.prompt() as turns:
                padding = torch.tensor(starts, device=loop.device) if any(starts) else None
                read_again(self._plans, part, cache, text.to(loop.device), padding, turns)
                wait_for(loop.device)  # another thread's stream reads the cache

        return dict(text=loop.ids[:, :held].long().cpu(), read_again=again)

    @staticmethod
    def _chooser(loop: Any, length: int) -> dict[str, Any] | None:
        """Return how the leader chooses tokens, or None if the call's thread has to.

        Args:
            loop: the call.
            length: tokens that the cache holds of a row, and the one that is read next.
        """
        config = loop.config
        keeps = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        if keeps or (loop.settings is None if config.do_sample else len(loop.processors)):
            return None
        end = end_tokens(loop.criteria)
        ends = frozenset(torch.cat(end).tolist()) if end else frozenset()
        made: dict[str, Any] = dict(end_tokens=ends, pad=int(loop.pad) if loop.has_eos else 0)
        if loop.max_length is not None:  # of the call's text, which a cache that was there before may hold more than
            made["max_length"] = loop.max_length - loop.length + length
        if config.do_sample:
            made |= dict(settings=tuple(loop.settings), processors=loop.processors, generator=loop.generator)
        return made

    @staticmethod
    def ends_itself(loop: Any) -> bool:
        """Whether the leader knows the end, if it chooses."""
        return ends_by_length_or_token(loop.criteria)


def to_tokens(found: Any, loop: Any, device: torch.device | str) -> torch.Tensor:
    """Return int64 [batch] tokens of what a step has chosen for a call; their log-probabilities are kept."""
    if found.logprobs is not None:
        loop.scope.logprobs.append(found.logprobs)
    return torch.tensor(found.tokens, device=device)


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return float32 [rows], log-probabilities of ``tokens``, int64 [rows], by ``logits``, [rows, vocab_size]."""
    return logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def with_request(scope: CallScope | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a stock loop with which it ends once the call's request is cancelled."""
    if scope is None:
        return given
    criteria = compat.criteria_and(given["stopping_criteria"], lambda: scope.is_cancelled)
    return given | {"stopping_criteria": criteria}
