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
from ..reasons import Cause
from .structure import MAX_BATCH

if TYPE_CHECKING:
    from ..patch_state import PatchState
    from .structure import ModelPart

#: what our loops understand of ``model_kwargs``; the tokenizer comes along with stop strings and goes unused
KNOWN_MODEL_KWARGS = frozenset(
    {compat.CACHE, "use_cache", "attention_mask", "position_ids", "logits_to_keep", "tokenizer"}
)
#: types of token and position ids that PyTorch's embeddings take
INDEX_DTYPES = (torch.int64, torch.int32)


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
    cache, batch = model_kwargs.get(compat.CACHE), input_ids.shape[0]
    if state.loop_reason is not None or part is None:
        return state.loop_reason or Cause("class_not_supported", module=state.model)
    if (method := compat.overridden_method(part.module, part.architecture.module)) is not None:
        return Cause("generation_method", method)
    if synced_gpus:
        return "synced_gpus"
    if config.compile_config is not None:
        return "compile_config"
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            return Cause("attention_outputs", name)
    if not model_kwargs.get("use_cache"):
        return Cause("no_cache", "use_cache=False")
    if not isinstance(cache, FastpathCache):
        return Cause("other_cache", type(cache).__name__)
    if batch > (most := min(MAX_BATCH, state.options.max_batch_size)):
        return Cause("batch_size", f"{batch} sequences, {most} at most")
    if (reason := _arguments_reason(input_ids, config, model_kwargs)) is not None:
        return reason
    if (reason := part.other_reason()) is not None:
        return reason
    embeddings = getattr(part.embedding, "weight", None)
    if embeddings is not None and input_ids.device != embeddings.device:
        # that of weights that lie elsewhere says more
        return part.reason() or Cause("device", f"input_ids on {input_ids.device}, the model on {embeddings.device}")
    if torch.is_autocast_enabled(input_ids.device.type):
        return Cause("autocast", f"torch.autocast({input_ids.device.type!r})")
    if torch.compiler.is_compiling():
        return "compiling"
    layout = _layout_reason(input_ids, model_kwargs, cache.get_seq_length())
    reason = state.reason_of(part) or _cache_reason(part, cache) or layout or _pad_token_reason(part, config, batch)
    if reason is None and batch > part.max_batch:
        return Cause("batch_size", f"{batch} sequences, {part.max_batch} at most where MLPs are mixtures")
    return reason


def _arguments_reason(input_ids: torch.Tensor, config: Any, model_kwargs: dict) -> str | None:
    """An argument that our loops know nothing of."""
    for name, value in model_kwargs.items():
        if name in KNOWN_MODEL_KWARGS or name in compat.WITHOUT_EFFECT or value is None:
            continue
        if name.startswith("output_"):  # these ask for more to be returned
            if value is not False:
                return Cause("attention_outputs", name)
            continue
        return Cause("unsupported_input", name)
    if input_ids.shape[1] == 0:
        return Cause("unsupported_input", "input_ids is empty")
    if input_ids.dtype not in INDEX_DTYPES:
        return Cause("unsupported_input", f"input_ids is {input_ids.dtype}")
    return None


def _cache_reason(part: ModelPart, cache: FastpathCache) -> str | None:
    """A cache the user made for another model, or without its windows, is left to stock code."""
    if len(cache.layers) > len(part.windows):
        return Cause("other_cache", f"it has {len(cache.layers)} layers, the model {len(part.windows)}")
    for number, (layer, window) in enumerate(zip(cache.layers, part.windows)):
        if layer.sliding_window not in (None, window):
            return Cause("other_cache", f"layer {number} has the window {layer.sliding_window}, the model {window}")
    return None


def _layout_reason(input_ids: torch.Tensor, model_kwargs: dict, past_len: int) -> str | None:
    mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is not None:
        what = f"{mask.dtype} {tuple(mask.shape)} on {mask.device}"
        # generate() takes the whole conversation or only what is new; the mask always covers the cache
        if mask.shape[-1] not in (input_ids.shape[1], past_len + input_ids.shape[1]) or mask.shape[-1] <= past_len:
            return Cause("attention_mask", f"{what}, for {input_ids.shape[1]} tokens and {past_len} in the cache")
        if mask.dim() != 2 or mask.device != input_ids.device or not is_left_padding(mask):
            return Cause("attention_mask", what)
    if position_ids is None:
        return Cause("position_ids", "None")
    if position_ids.dim() != 2 or position_ids.device != input_ids.device or position_ids.dtype not in INDEX_DTYPES:
        return Cause("position_ids", f"{position_ids.dtype} {tuple(position_ids.shape)} on {position_ids.device}")
    return None


def _pad_token_reason(part: ModelPart, config: Any, batch: int) -> str | None:
    """Rows that have ended are read on as pad tokens."""
    pad, known = config.pad_token_id, len(part.embedding.weight)
    if batch == 1 or config.eos_token_id is None or not isinstance(pad, int) or 0 <= pad < known:
        return None
    return Cause("unsupported_input", f"pad_token_id={pad}, of {known} tokens")


def note_nonfinite(state: PatchState, logits: torch.Tensor) -> None:
    """Count a call whose newest ``logits`` are no numbers; the host waits for the device."""
    if not bool(logits.amax(-1).isfinite().all()):
        state.stats.note(Cause("nonfinite_logits", "at the end of generate()"))


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
