"""Replacements for methods of a patched model's ``generate()``: its loops, and the method that makes its KV cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn

from .. import compat
from ..batching import generate_batch
from ..cache.encoder_decoder import FastpathEncoderDecoderCache
from ..cache.fastpath_cache import FastpathCache
from ..decode.loops import adapter_rows, assisted, beams, counted, sample
from ..decode.loops.call_scope import scope_here
from ..decode.loops.eligibility import reason_of_call, request_reason, unknown_argument
from ..decode.loops.patched import STATE_KEY
from ..decode.sources.step_source import StepSource
from ..reasons import Cause
from .state import PatchState

#: methods of transformers that our loops replace
LOOPS: dict[str, Callable[..., Any]] = {
    "_sample": sample.sample,
    "_assisted_decoding": assisted.decode,
    "_beam_search": beams.search,
    "generate": counted.generate,
    "generate_batch": generate_batch.generate_batch,
}


def prepare_cache(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Do as the class's own method, but make a FastpathCache where that would make a plain ``DynamicCache``."""
    state: PatchState | None = vars(self).get(STATE_KEY)
    named = compat.named_arguments(type(self)._prepare_cache_for_generation, self, args, kwargs)
    model_kwargs, generation_mode = named["model_kwargs"], named["generation_mode"]
    users_own = model_kwargs.get(compat.CACHE) is not None
    result = compat.prepare_cache_stock(self, **named)
    if state is None or not state.enabled:  # the state is None if another thread has just unpatched the model
        return result
    state.stats.new_call()
    is_sample = compat.is_sample_mode(generation_mode)
    with adapter_rows.looked_at(self) if is_sample else nullcontext():
        return _prepared(self, state, named, users_own, result)


def _prepared(self: nn.Module, state: PatchState, named: dict[str, Any], users_own: bool, result: Any) -> Any:
    """Put a FastpathCache in the place of the cache that transformers has made, if one serves the call."""
    generation_config, model_kwargs = named["generation_config"], named["model_kwargs"]
    generation_mode = named["generation_mode"]
    is_sample = compat.is_sample_mode(generation_mode)
    is_stocks = is_sample and state.ranks is None  # whatever the model is
    is_stocks = is_stocks and reason_of_call(generation_config, model_kwargs, users_own) is not None
    if is_stocks and users_own:
        state.plans.leave(generation_config)
    is_looked_at = state.loop_reason is None and not is_stocks
    part = state.plans.part_in_call(self, generation_config) if is_looked_at else None
    by_plans = is_sample or (compat.is_beam_mode(generation_mode) and beams.takes(part))
    if not (by_plans or (compat.is_assisted_mode(generation_mode) and state.generates)):
        state.fall_back(
            state.loop_reason or Cause("generation_mode", str(getattr(generation_mode, "value", generation_mode)))
        )
    whole = model_kwargs.get(compat.CACHE)
    made = compat.text_cache(whole)
    plain = generation_config.cache_implementation in (None, "dynamic") and type(made) is compat.DynamicCache
    if part is not None and not by_plans:
        plain = plain and compat.is_assisted_mode(generation_mode) and not (part.has_encoder or part.is_multimodal)
    if plain and not (users_own or is_stocks) and _takes_our_cache(self, state, part, generation_config, model_kwargs):
        is_text_alone, stocks = made is whole, made
        scope = scope_here()
        page_size = state.options.page_size if scope is None or not scope.shares else None  # slots have no pages
        kv_dtype = state.options.kv_dtype
        if kv_dtype is None and part is not None and part.is_cast_down:
            kv_dtype = part.embedding.weight.dtype  # a prompt that modules read under autocast gives others
        made = FastpathCache.from_dynamic(made, kv_dtype, page_size)
        made.stands_for = stocks
        made.is_dropped = not generation_config.return_dict_in_generate and state.prefixes is None
        if part is not None:
            del made.layers[len(part.kinds) :]  # a config may tell of more layers than its decoder has
        model_kwargs[compat.CACHE] = (
            made if is_text_alone else FastpathEncoderDecoderCache(made, whole.cross_attention_cache)
        )
    if isinstance(made, FastpathCache):
        state.own_loops.let_go(made)
        if not generation_config.is_assistant:  # an assistant is asked for a few tokens at a time
            made.expect(generation_config.max_length)
        if part is not None and part.is_cast_down:
            state.stats.note("autocast_left_out")
        if made.page_counts is not None:
            state.stats.pages = made.page_counts
            if any(made.is_sliding):
                state.stats.note(Cause("window_not_paged", f"page_size={state.options.page_size}"))
    return result


def _takes_our_cache(
    model: nn.Module, state: PatchState, part: StepSource | None, config: Any, model_kwargs: dict
) -> bool:
    """Whether a FastpathCache serves a call.

    What the call asks for is looked at first, so that a model is not recorded for a call of stock code.
    """
    if state.loop_reason is None and part is not None:
        if request_reason(part, config) is not None:
            return False
        if not part.modules_use_cache and unknown_argument(part, model_kwargs) is not None:
            return False
    return state.serves(model, part)
