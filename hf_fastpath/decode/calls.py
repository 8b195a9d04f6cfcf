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
        if state is not None:
            state.come_in()
            state = vars(model).get(STATE_KEY)
        if state is None or not state.enabled:
            return original(model, *args, **kwargs)
        return loop(state, original, model, *args, **kwargs)

    return method


@for_patched_models
def run_stock(state: PatchState, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """What a method of transformers' does that is none of our loops: it only comes in by the same door."""
    return original(model, *args, **kwargs)


@contextmanager
def settling(cache: FastpathCache, part: ModelPart) -> Iterator[None]:
    """Give the layers of ``cache`` one length again where the block is broken off."""
    try:
        yield
    except BaseException:
        cache.settle(len(part.layers))
        raise


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
    reason = model_reason(state, part, input_ids, cache)
    return reason or _layout_reason(input_ids, model_kwargs, cache.get_seq_length())


def model_reason(
    state: PatchState, part: ModelPart | None, input_ids: torch.Tensor, cache: FastpathCache
) -> str | None:
    """The reason code for which the model, as it is now, is left to stock code, whatever the call asks for; or None."""
    if state.loop_reason is not None or part is None:
        return state.loop_reason or "class_not_supported"
    if compat.overrides_generation(part.module, part.architecture.module):
        return "generation_method"
    if (reason := part.other_reason()) is not None:
        return reason
    embeddings = getattr(part.embedding, "weight", None)
    if embeddings is not None and input_ids.device != embeddings.device:
        return part.reason() or "device"  # that of weights that lie elsewhere says more
    if torch.is_autocast_enabled(input_ids.device.type):
        return "autocast"
    if torch.compiler.is_compiling():
        return "compiling"
    reason = state.reason_of(part) or _cache_reason(part, cache)
    return reason or ("batch_size" if input_ids.shape[0] > part.max_batch else None)


class Watch:
    """A model in a call that runs code of the user's between its tokens: what that code does to the model counts from
    the next token on.

    Args:
        state: the model's.
        part: the model, without a reason against a decode plan.

    Attributes:
        state, part: those of the model as it was when last looked at; None where stock code has to go on.
    """

    def __init__(self, state: PatchState, part: ModelPart):
        self.state, self.part = state, part
        self._model, self._snapshot = part.module, state.snapshot_of(part)

    def has_changed(self, device: torch.device) -> bool:
        """Whether the model is other than it was; False for ever once stock code, which sees all, has taken over."""
        if self.part is None:
            return False
        return not self._snapshot.holds() or torch.is_autocast_enabled(device.type)

    def look_again(self, input_ids: torch.Tensor, cache: FastpathCache) -> None:
        """Take in what the model has become; a reason for stock code is counted.

        Args:
            input_ids: of the call.
            cache: of the call.

        Raises:
            FallbackError: stock code has to go on, and the model was patched with ``strict=True``.
        """
        state, self.part = vars(self._model).get(STATE_KEY), None
        if state is None or not state.enabled:  # the user has unpatched it
            return
        self.state, part = state, state.part_of(self._model)
        reason = model_reason(state, part, input_ids, cache)
        if reason is not None:
            return state.fall_back(reason)
        self.part, self._snapshot = part, state.snapshot_of(part)


def runs_users_code(processors: Any, criteria: Any, streamer: Any) -> list[str]:
    """Reason codes of the objects of a call that are the user's own: they may do anything, to the model too."""
    codes = []
    if not all(map(compat.is_stock, criteria)):
        codes.append("custom_stopping_criteria")
    if not all(map(compat.is_stock, processors)):
        codes.append("custom_logits_processor")
    if streamer is not None and not compat.is_stock_streamer(streamer):
        codes.append("custom_streamer")
    return codes


def _cache_reason(part: ModelPart, cache: FastpathCache) -> str | None:
    """A cache the user made for another model, or without its windows, is left to stock code."""
    if len(cache.layers) > len(part.windows):
        return "other_cache"
    fits = all(layer.sliding_window in (None, window) for layer, window in zip(cache.layers, part.windows))
    return None if fits else "other_cache"


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
