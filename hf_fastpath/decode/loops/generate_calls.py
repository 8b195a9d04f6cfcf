"""How a call of ``generate()`` comes to our loops, what the user's code does to the model meanwhile, and how the call
leaves."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ... import compat
from ...cache.fastpath_cache import FastpathCache
from ...reasons import Cause
from ..plans.plan_cache import PlanCache
from ..ranks.process_group import Ranks
from ..sources.step_source import StepSource
from . import adapter_rows
from .eligibility import model_reason, torch_reason
from .multimodal import Behind
from .patched import STATE_KEY, Patched


def for_patched_models(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that stands for a method of ``GenerationMixin`` while a patched model is alive.

    For a patched model the function calls ``loop(state, original, model, ...)``; for every other model it calls
    ``original``, the method itself.
    """

    of_tokens = "input_ids" in inspect.signature(loop).parameters

    @functools.wraps(loop)
    def method(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        state: Patched | None = vars(model).get(STATE_KEY)
        if state is not None:
            state.come_in()
            state = vars(model).get(STATE_KEY)
        if state is None or not state.enabled:
            return original(model, *args, **kwargs)
        if of_tokens:
            kwargs, args = compat.named_arguments(original, model, args, kwargs), ()
        return loop(state, original, model, *args, **kwargs)

    return method


def agreed_reason(
    ranks: Ranks | None, reason: str | None, part: StepSource | None, plans: PlanCache, batch: int
) -> str | None:
    """Return the reason for stock code that all ranks follow; every rank has to call this function.

    Args:
        ranks: the processes, or None where each goes its own way.
        reason: this rank's.
        part: whose steps decode; there is a reason if it is None.
        batch: number of sequences.
    """
    if ranks is None:
        return reason
    reason = ranks.agreed(reason)
    return part.reason_of_ranks(plans, batch) if reason is None and part is not None else reason


@contextmanager
def settling(cache: FastpathCache, part: StepSource) -> Iterator[None]:
    """Give all layers of ``cache`` the same length again if the block is broken off."""
    try:
        cache.stands_for = None
        cache.is_kept = True  # this block settles the cache, so that forwards inside it need not
        yield
    except BaseException:
        cache.settle(len(part.layers))
        raise
    finally:
        cache.is_kept = False


@contextmanager
def alike(ranks: Ranks | None, call: Any, model_kwargs: dict, chooses: bool) -> Iterator[tuple[bool, bool]]:
    """Draw the same tokens on all ranks over which a model is spread, for the length of a ``with`` block.

    Args:
        ranks: the processes, or None for a model that this one has whole.
        call: what one of our loops keeps of a call of ``generate()``.
        chooses: whether a plan may choose the tokens.

    Yields:
        Whether ranks could come to other tokens or ends: there is code of the user's, or an end depends on time; and
        whether plans may choose the tokens on all ranks.

    Raises:
        ValueError: ranks were given other tokens or settings.
    """
    if ranks is None:
        yield False, chooses
        return
    settings = [
        call.config.do_sample,
        call.criteria.max_length,
        [end.tolist() for end in end_tokens(call.criteria)],
    ]
    settings += [compat.numbers_of(each) for each in call.processors if compat.is_stock(each)]
    own_code = call.runs_users_code or bool(call.grammars) or not all(map(compat.looks_at_tokens_alone, call.criteria))
    found = ranks.check_alike(call.ids, model_kwargs.get("attention_mask"), settings, own_code, chooses)
    with ranks.one_generator(call.ids.device) if call.config.do_sample else nullcontext():
        yield found


class CallWatch:
    """A watch on a model in a call that runs code of the user's between its tokens.

    What that code does to the model takes effect with the next token.

    Args:
        state: the model's state.
        part: the model, without a reason against a decode plan.

    Attributes:
        state, part: those of the model when it was last looked at; ``part`` is None if stock code has to go on.
    """

    def __init__(self, state: Patched, part: StepSource):
        self.state: Patched = state
        self.part: StepSource | None = part
        self._model, self._snapshot = part.source, state.plans.snapshot_of(part)

    def has_changed(self, device: torch.device) -> bool:
        """Whether the model differs from what it was. Once stock code has taken over, which sees all, this is False."""
        if self.part is None:
            return False
        with adapter_rows.looked_at(self._model):
            is_other = not self._snapshot.holds()
        is_other = is_other or torch.is_autocast_enabled(device.type)
        return is_other or torch_reason(self._model) is not None

    def look_again(self, input_ids: torch.Tensor, cache: FastpathCache, rows: Any = None) -> None:
        """Take on the model as it is now; a reason for stock code is counted.

        Args:
            input_ids: of the call.
            cache: of the call.
            rows: adapters that the call names for its rows, or None.

        Raises:
            FallbackError: stock code has to go on, and the model was patched with ``strict=True``.
        """
        state, self.part = vars(self._model).get(STATE_KEY), None
        if state is None or not state.enabled:  # the user has unpatched the model
            return
        with adapter_rows.looked_at(self._model):
            self.state, part = state, state.plans.part_of(self._model)
            reason = model_reason(state, part, input_ids, cache)
            if reason is None and rows is not None and part is not None:
                reason = adapter_rows.reason_against(part, rows, len(input_ids))
            if reason is not None:
                return state.fall_back(reason)
            assert part is not None, "without one there is a reason"
            self.part, self._snapshot = part, state.plans.snapshot_of(part)


def position_ids_of(ids: torch.Tensor, config: Any, model_kwargs: Mapping[str, Any]) -> torch.Tensor:
    """int64 or int32 [batch or 1, new tokens]: the position ids of a call's prompt; of a model that takes none, the
    places of the tokens in the text."""
    given = model_kwargs.get("position_ids")
    if given is not None:
        return given
    past = model_kwargs[compat.CACHE].get_seq_length()
    count = compat.num_new_tokens(ids, config, model_kwargs)
    return torch.arange(past, past + count, device=ids.device)[None]


def next_positions_of(behind: Behind, input_ids: torch.Tensor, config: Any, model_kwargs: dict) -> torch.Tensor:
    """Return the position of each sequence's first new token, [batch].

    Args:
        behind: what is known of the tokens behind the prompt.
        input_ids, config, model_kwargs: of a call of ``generate()`` that there is no reason against.
    """
    found = behind.positions
    if found is None:
        found = position_ids_of(input_ids, config, compat.text_arguments(model_kwargs))[:, -1] + 1
    return found.expand(len(input_ids))


def grammars_of(processors: Any) -> list[Cause]:
    """Return a reason for each processor of a call that holds the text to a grammar."""
    return [Cause("grammar_mask", compat.name_of(each)) for each in processors if compat.is_grammar(each)]


def runs_users_code(processors: Any, criteria: Any, streamer: Any, knows_grammars: bool = False) -> list[Cause]:
    """Return a reason for each object of a call that is the user's own: it may do anything, also to the model.

    Args:
        knows_grammars: whether the loop knows what processors of :func:`grammars_of` do, which then are none of these.
    """
    processors = [each for each in processors if not (knows_grammars and compat.is_grammar(each))]
    pairs = ("custom_stopping_criteria", criteria), ("custom_logits_processor", processors)
    of_the_user = [Cause(code, compat.name_of(own)) for code, all_ in pairs for own in all_ if not compat.is_stock(own)]
    if streamer is not None and not compat.is_stock_streamer(streamer):
        of_the_user.append(Cause("custom_streamer", compat.name_of(streamer)))
    return of_the_user


def note_nonfinite(state: Patched, logits: torch.Tensor) -> None:
    """Count a call whose newest ``logits`` are not finite; the host waits for the device."""
    if not bool(logits.amax(-1).isfinite().all()):
        state.stats.note(Cause("nonfinite_logits", "at the end of generate()"))


def ends_by_length_or_token(criteria: Any) -> bool:
    """Whether only the length and end tokens end the text, and there is a greatest length."""
    known = all(type(criterion) in (compat.MaxLengthCriteria, compat.EosTokenCriteria) for criterion in criteria)
    return known and criteria.max_length is not None


def end_tokens(criteria: Any) -> list[torch.Tensor]:
    """Return the tokens that end the text, on the device."""
    return [criterion.eos_token_id.flatten() for criterion in criteria if hasattr(criterion, "eos_token_id")]
