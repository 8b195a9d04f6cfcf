"""A call of ``generate()`` at the door of our loops: whether it comes in, and how it leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .. import compat
from ..cache import FastpathCache
from ..forwards import STATE_KEY
from ..loops import Loop
from .structure import MAX_BATCH

if TYPE_CHECKING:
    from ..patch_state import PatchState
    from .structure import ModelPart

#: what our loops understand of ``model_kwargs``; the tokenizer comes along with stop strings and goes unused
KNOWN_MODEL_KWARGS = frozenset(
    {compat.CACHE, "use_cache", "attention_mask", "position_ids", "logits_to_keep", "tokenizer"}
)


def for_patched_models(loop: Callable[..., Any]) -> Loop:
    """Make ``loop(state, original, model, ...)`` what a method of ``GenerationMixin`` does while a patched model is
    alive: ``original``, the method itself, for every other model."""

    @functools.wraps(loop)
    def method(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        state: PatchState | None = vars(model).get(STATE_KEY)
        if state is None or not state.enabled:
            return original(model, *args, **kwargs)
        return loop(state, original, model, *args, **kwargs)

    return method


@contextmanager
def settling(cache: FastpathCache, part: ModelPart) -> Iterator[None]:
    """Give the layers of ``cache`` one length again where the block is broken off."""
    try:
        cache.is_kept = True  # by this: forwards inside need not
        yield
    except BaseException:
        cache.settle(len(part.layers))
        raise
    finally:
        cache.is_kept = False


def step_aside_reason(
    state: PatchState,
    part: ModelPart | None,
    input_ids: torch.Tensor,
    config: Any,
    synced_gpus: bool,
    model_kwargs: dict,
) -> str | None:
    """The reason code for which this call is left to transformers' loop, or None."""
    cache = model_kwargs.get(compat.CACHE)
    if state.loop_reason is not None or part is None:
        return state.loop_reason or "class_not_supported"
    if compat.overrides_generation(part.module, part.architecture.module):
        return "generation_method"
    if synced_gpus:
        return "synced_gpus"
    if config.compile_config is not None:
        return "compile_config"
    if config.output_attentions or config.output_hidden_states:
        return "attention_outputs"
    if not model_kwargs.get("use_cache"):
        return "no_cache"
    if not isinstance(cache, FastpathCache):
        return "other_cache"
    if input_ids.shape[0] > min(MAX_BATCH, state.options.max_batch_size):
        return "batch_size"
    if any(value is not None for name, value in model_kwargs.items() if name not in KNOWN_MODEL_KWARGS):
        return "unsupported_input"
    if input_ids.shape[1] == 0:
        return "unsupported_input"
    if (reason := part.other_reason()) is not None:
        return reason
    embeddings = getattr(part.embedding, "weight", None)
    if embeddings is not None and input_ids.device != embeddings.device:
        return part.reason() or "device"  # that of weights that lie elsewhere says more
    if torch.is_autocast_enabled(input_ids.device.type):
        return "autocast"
    if torch.compiler.is_compiling():
        return "compiling"
    layout = _layout_reason(input_ids, model_kwargs, cache.get_seq_length())
    reason = state.reason_of(part) or _cache_reason(part, cache, input_ids) or layout
    return reason or ("batch_size" if input_ids.shape[0] > part.max_batch else None)


def _cache_reason(part: ModelPart, cache: FastpathCache, input_ids: torch.Tensor) -> str | None:
    """A cache the user made for another model, or without its windows, or changed layer by layer, is left to stock
    code.

    Raises:
        RuntimeError: it holds keys and values of another batch or model, or such as do not go together.
    """
    if len(cache.layers) > len(part.windows):
        return "other_cache"
    if not all(layer.sliding_window in (None, window) for layer, window in zip(cache.layers, part.windows)):
        return "other_cache"
    if not cache.take():
        return "edited_cache"
    if not cache.get_seq_length():
        return None
    if len(cache.layers) < len(part.windows):
        return "edited_cache"
    batch, dtype, device = len(input_ids), part.embedding.weight.dtype, input_ids.device
    for layer, its in zip(cache.layers, part.layers):
        shape = batch, *its.attention.cache_shape
        layer.admit(shape, shape, dtype, device)
    return None


def _layout_reason(input_ids: torch.Tensor, model_kwargs: dict, past_len: int) -> str | None:
    mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is not None:
        # generate() takes the whole conversation or only what is new; the mask always covers the cache
        if mask.shape[-1] not in (input_ids.shape[1], past_len + input_ids.shape[1]) or mask.shape[-1] <= past_len:
            return "attention_mask"
        if mask.dim() != 2 or mask.device != input_ids.device or not is_left_padding(mask):
            return "attention_mask"
    if position_ids is None or position_ids.dim() != 2 or position_ids.device != input_ids.device:
        return "position_ids"
    return None


def is_left_padding(mask: torch.Tensor) -> bool:
    """Whether every row of a [batch, seq_len] mask is zeros, then ones, and ends in a one."""
    ones = mask.to(torch.int8)
    return bool((ones[:, 1:] >= ones[:, :-1]).all() & (ones[:, -1] == 1).all() & ((mask == 0) | (mask == 1)).all())


def ends_by_length_or_token(criteria: Any) -> bool:
    """Whether nothing else ends the text, and its length does at some point."""
    known = all(type(criterion) in (compat.MaxLengthCriteria, compat.EosTokenCriteria) for criterion in criteria)
    return known and criteria.max_length is not None


def end_tokens(criteria: Any) -> list[torch.Tensor]:
    """The tokens that end the text, on the device."""
    return [criterion.eos_token_id.flatten() for criterion in criteria if hasattr(criterion, "eos_token_id")]
