"""Replacements for methods of a patched model's ``generate()``: its loops, and the method that makes its KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .. import compat
from ..cache.encoder_decoder import FastpathEncoderDecoderCache
from ..cache.fastpath_cache import FastpathCache
from ..decode import assisted, beams, loop
from ..decode.eligibility import unknown_argument
from ..decode.patched import STATE_KEY
from ..reasons import Cause
from .state import PatchState

#: methods of transformers that our loops replace
LOOPS: dict[str, Callable[..., Any]] = {
    "_sample": loop.sample,
    "_assisted_decoding": assisted.decode,
    "_beam_search": beams.search,
}


def prepare_cache(self: nn.Module, generation_config: Any, model_kwargs: dict, generation_mode: Any, *rest, **named):
    """Do as the class's own method, but make a FastpathCache where that would make a plain ``DynamicCache``."""
    state: PatchState | None = vars(self).get(STATE_KEY)
    users_own = model_kwargs.get(compat.CACHE) is not None
    result = compat.prepare_cache_stock(self, generation_config, model_kwargs, generation_mode, *rest, **named)
    if state is None or not state.enabled:  # the state is None if another thread has just unpatched the model
        return result
    state.stats.new_call()
    part = state.plans.part_in_call(self, generation_config) if state.loop_reason is None else None
    has_encoder = part is not None and part.has_encoder
    by_plans = compat.is_sample_mode(generation_mode) or (compat.is_beam_mode(generation_mode) and beams.takes(part))
    if not (by_plans or (compat.is_assisted_mode(generation_mode) and state.generates)):
        state.fall_back(
            state.loop_reason or Cause("generation_mode", str(getattr(generation_mode, "value", generation_mode)))
        )
    whole = model_kwargs.get(compat.CACHE)
    made = compat.text_cache(whole)
    plain = generation_config.cache_implementation in (None, "dynamic") and type(made) is compat.DynamicCache
    ours = takes_our_cache(self, state) and (by_plans or not has_encoder)
    if part is not None and part.is_recorded:  # nothing but our loop uses the cache
        ours = ours and unknown_argument(part, model_kwargs) is None
    if plain and ours and not users_own:
        is_text_alone = made is whole
        made = FastpathCache.from_dynamic(made, state.options.kv_dtype, state.options.page_size)
        made.is_dropped = not generation_config.return_dict_in_generate
        if part is not None:
            del made.layers[len(part.kinds) :]  # a config may tell of more layers than its decoder has
        model_kwargs[compat.CACHE] = (
            made if is_text_alone else FastpathEncoderDecoderCache(made, whole.cross_attention_cache)
        )
    if isinstance(made, FastpathCache):
        if not generation_config.is_assistant:  # an assistant is asked for a few tokens at a time
            made.expect(generation_config.max_length)
        if part is not None and part.is_cast_down:
            state.stats.note("autocast_left_out")
        if made.page_counts is not None:
            state.stats.pages = made.page_counts
            if any(made.is_sliding):
                state.stats.note(Cause("window_not_paged", f"page_size={state.options.page_size}"))
    return result


def takes_our_cache(model: nn.Module, state: PatchState) -> bool:
    """Whether a FastpathCache serves this model: our loop uses it, or every layer's attention does."""
    plan = state.decided
    if plan.loop_reason is None:
        return compat.overridden_method(model, plan.family.module) is None
    windows = compat.layer_windows(model.config)
    return windows is not None and len(windows) in (plan.patched.get("attention"), plan.patched.get("layer"))
