"""Why a call of ``generate()`` is left to transformers' loops: the model, the request, the cache or the arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ... import compat
from ...cache.fastpath_cache import FastpathCache
from ...options import MAX_BATCH
from ...reasons import Cause, class_name
from ..sources.step_source import StepSource
from . import multimodal
from .multimodal import Behind
from .patched import Patched

#: the ``model_kwargs`` that our loops understand; the tokenizer comes along with stop strings, and is not used
KNOWN_MODEL_KWARGS = frozenset(
    {compat.CACHE, "use_cache", "attention_mask", "position_ids", "logits_to_keep", "tokenizer", "inputs_embeds"}
)
#: types of token and position ids that PyTorch's embeddings take
INDEX_DTYPES = (torch.int64, torch.int32)


def step_aside_reason(
    state: Patched,
    part: StepSource | None,
    input_ids: torch.Tensor,
    config: Any,
    synced_gpus: bool,
    model_kwargs: dict,
) -> tuple[str | None, Behind]:
    """Return the reason code for which this call is left to transformers' loop, or None; and what our loop has to know
    of a prompt of more than tokens."""
    text = text_of(part, input_ids, model_kwargs)
    reason, behind = _text_reason(state, part, text, config, synced_gpus, model_kwargs), Behind()
    if reason is not None or part is None:
        return reason, behind
    if multimodal.has_more_than_tokens(part, model_kwargs):
        reason, behind = multimodal.looked_at(part, input_ids, model_kwargs)
    known = part.computed_positions if reason is None else None
    if known is not None and (config.max_length or 0) > known:
        reason = Cause("position_ids", f"max_length is {config.max_length}, the model's table has {known} positions")
    reason = reason or _pad_token_reason(part, config, len(input_ids))
    return reason or _length_reason(state, part, text, config, model_kwargs), behind


def _length_reason(
    state: Patched, part: StepSource, input_ids: torch.Tensor, config: Any, model_kwargs: Mapping[str, Any]
) -> Cause | None:
    """Return why steps of some length of this text are not known, or None."""
    if not part.by_length.is_bounded(len(input_ids)):
        return None
    text = compat.text_arguments(model_kwargs)
    first = multimodal.prompt_shape(input_ids, text)[1]
    mask, cache = text.get("attention_mask"), text[compat.CACHE]
    first = max(first, cache.get_seq_length() + 1, 0 if mask is None or part.has_encoder else mask.shape[-1])
    end = first + max(1, (config.max_length or input_ids.shape[1]) - input_ids.shape[1])
    output = model_kwargs.get("encoder_outputs") if part.has_encoder else None
    encoded = None if output is None else output[0].shape[1]
    return part.by_length.reason(state.plans, len(input_ids), first, end, encoded)


def text_of(part: StepSource | None, input_ids: torch.Tensor, model_kwargs: dict) -> torch.Tensor:
    """Return a token of each position of the texts that a call goes on with, [batch, seq_len]."""
    if part is None or not part.token_shape:
        return input_ids
    return compat.text_of_channels(input_ids, model_kwargs, *part.token_shape)


def _text_reason(
    state: Patched, part: StepSource | None, input_ids: torch.Tensor, config: Any, synced_gpus: bool, model_kwargs: dict
) -> str | None:
    """Return the reason against this call if its prompt were tokens alone, or None."""
    text = compat.text_arguments(model_kwargs)
    cache, batch = text.get(compat.CACHE), input_ids.shape[0]
    reason = uncovered_reason(state.loop_reason, state.model, part)
    if reason is not None or part is None:
        return reason
    if synced_gpus:
        return "synced_gpus"
    if (reason := request_reason(part, config)) is not None:
        return reason
    if (reason := reason_of_call(config, model_kwargs)) is not None:
        return reason
    if (reason := _arguments_reason(part, input_ids, text)) is not None:
        return reason
    if not isinstance(cache, FastpathCache):  # of a model with a reason, prepare_cache() has left transformers' own
        return state.plans.known_reason_of(part) or Cause("other_cache", class_name(cache))
    if batch > (most := min(MAX_BATCH, state.options.max_batch_size)):
        return Cause("batch_size", f"{batch} sequences, {most} at most")
    if (reason := _dropped_cache_reason(part, input_ids, config, model_kwargs)) is not None:
        return reason
    reason = model_reason(state, part, input_ids, cache)
    # a cache of states alone does not count for transformers, which reads a whole text again behind them
    past_len = cache.get_seq_length() if cache.key_layers else 0
    return reason or _layout_reason(part, input_ids, text, past_len)


def _dropped_cache_reason(part: StepSource, input_ids: torch.Tensor, config: Any, model_kwargs: dict) -> Cause | None:
    """Return the reason against a call in which the model's class drops a cache that holds tokens, or None.

    That does not matter if the tokens are all read again, at positions that turn as before.
    """
    found = compat.cache_drop(part.module)
    if found is None:
        return None
    length, past = input_ids.shape[1], compat.text_cache(model_kwargs[compat.CACHE]).get_seq_length()
    held = past + compat.num_new_tokens(input_ids, config, model_kwargs)  # once the prompt is read
    step = max(length, found.length) + 1  # length of the text in the first step that may drop the cache
    in_prompt = 0 < past <= found.length < length
    in_step = held + step - length - 1 <= found.length and (config.max_length is None or step < config.max_length)
    if not (in_prompt or in_step):
        return None
    # transformers' own loop over beams would give all tokens to a step of ours
    is_harmless = found.is_read_again and (config.num_beams or 1) == 1
    if is_harmless and held == length and compat.is_static_rope(part.module.config):
        return None
    return Cause("generation_method", f"{found.method}, which drops the cache behind {found.length} tokens")


def request_reason(part: StepSource, config: Any) -> str | None:
    """Return the reason against every call with this generation config, or None. Nothing is recorded for it."""
    method = asked_method(part)
    is_plain = not (part.token_shape or part.has_encoder or part.is_multimodal) and part.ranks is None
    if method is not None and not (is_plain and (config.num_beams or 1) == 1):
        return Cause("generation_method", method)
    if (reason := _asked_reason(config)) is not None:
        return reason
    size = config.prefill_chunk_size
    if size is None:
        return None
    states_alone = not part.has_encoder and not any(kind.keys for kind in part.config_kinds)
    if states_alone or type(size) is not int or size < 1:  # stock code raises, or has rules of its own
        return Cause("unsupported_input", f"prefill_chunk_size={size!r}")
    return None


def _asked_reason(config: Any) -> str | None:
    """Return the reason against calls that ask for this, whatever the model is, or None."""
    if config.compile_config is not None:
        return "compile_config"
    asked = (name for name in ("output_attentions", "output_hidden_states") if getattr(config, name))
    return next((Cause("attention_outputs", name) for name in asked), None)


def reason_of_call(config: Any, model_kwargs: Mapping[str, Any], users_own: bool = False) -> str | None:
    """Return the reason against a call whatever the model is, which is not looked at then; or None. Looking takes a
    hundredth of a call of five tokens of a small model.

    Args:
        users_own: the user has given the cache.
    """
    if (reason := _asked_reason(config)) is not None:
        return reason
    if not model_kwargs.get("use_cache", config.use_cache is not False):
        return Cause("no_cache", "use_cache=False")
    cache = compat.text_cache(model_kwargs.get(compat.CACHE))
    is_stocks = users_own or config.cache_implementation not in (None, "dynamic")
    is_stocks = is_stocks and cache is not None and not isinstance(cache, FastpathCache)
    return Cause("other_cache", class_name(cache)) if is_stocks else None


def why_no_drafts(
    state: Patched,
    part: StepSource | None,
    input_ids: torch.Tensor,
    config: Any,
    synced_gpus: bool,
    model_kwargs: dict,
) -> str | None:
    """Return the reason code for which this call, which verifies drafts, is left to transformers' loop, or None."""
    if part is not None and (part.has_encoder or part.is_multimodal):  # prepare_cache() has made no cache of ours
        loop_reason = uncovered_reason(state.loop_reason, state.model, part)
        kind = "an encoder" if part.has_encoder else "a part for images or sound"
        return loop_reason or Cause("generation_mode", f"drafts for a model with {kind}")
    reason, _ = step_aside_reason(state, part, input_ids, config, synced_gpus, model_kwargs)
    if reason is not None or part is None:
        return reason
    if (method := asked_method(part)) is not None:
        return Cause("generation_method", method)
    if multimodal.has_more_than_tokens(part, model_kwargs):
        return Cause("generation_mode", "drafts behind a prompt of more than tokens")
    return None


def uncovered_reason(loop_reason: str | None, model: nn.Module | None, part: StepSource | None) -> str | None:
    """Return the reason code for which our loops take no call of a patched model, or None.

    Args:
        loop_reason: the reason that ``patch()`` found.
        model: the model.
        part: the model in its roles as it is now, or None.
    """
    if loop_reason is not None or part is None:
        return loop_reason or Cause("class_not_supported", module=model)
    if (method := compat.overridden_method(part.module, part.architecture.module)) is not None:
        return Cause("generation_method", method)
    return None


def model_reason(state: Patched, part: StepSource | None, input_ids: torch.Tensor, cache: FastpathCache) -> str | None:
    """Return the reason code for which stock code runs the model as it is now, whatever the call asks for; or None."""
    reason = uncovered_reason(state.loop_reason, state.model, part)
    if reason is not None or part is None:
        return reason
    if (reason := part.other_reason()) is not None:
        return reason
    embeddings = getattr(part.embedding, "weight", None)
    if isinstance(embeddings, torch.Tensor) and input_ids.device != embeddings.device:
        # the reason of a model whose weights lie elsewhere says more
        return part.reason() or Cause("device", f"input_ids on {input_ids.device}, the model on {embeddings.device}")
    if torch.is_autocast_enabled(input_ids.device.type):
        return Cause("autocast", f"torch.autocast({input_ids.device.type!r})")
    if torch.compiler.is_compiling():
        return "compiling"
    if (reason := torch_reason(part.source)) is not None:
        return reason
    reason = state.plans.reason_of(part) or _cache_reason(part, cache, input_ids)
    reason = reason or part.proof_reason(state.plans, len(input_ids))
    if reason is None and (batch := input_ids.shape[0]) > part.max_batch:
        return Cause("batch_size", f"{batch} sequences, {part.max_batch} at most of this mixture")
    return reason


def asked_method(part: StepSource) -> str | None:
    """Return the method that has to be asked what each token is given, or None if that is known."""
    return compat.overridden_inputs(part.module, part.architecture.module)


def torch_reason(model: nn.Module) -> Cause | None:
    """Return why PyTorch's calls of a model are not what they were when ours were compared with them, or None."""
    if (mode := compat.foreign_mode()) is not None:
        return Cause("torch_mode", mode)
    function = compat.replaced_function(model)
    return None if function is None else Cause("replaced_function", function)


def _arguments_reason(part: StepSource, input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> str | None:
    """Return the reason for an argument that our loops do not know, or None."""
    for name, value in model_kwargs.items():
        if name.startswith("output_") and value is not None and value is not False:  # it asks for more results
            return Cause("attention_outputs", name)
    if (unknown := unknown_argument(part, model_kwargs)) is not None:
        return Cause("unsupported_input", unknown)
    if multimodal.prompt_shape(input_ids, model_kwargs)[1] == 0:
        return Cause("unsupported_input", "input_ids is empty")
    if input_ids.dtype not in INDEX_DTYPES:
        return Cause("unsupported_input", f"input_ids is {input_ids.dtype}")
    return None


def unknown_argument(part: StepSource, model_kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of an argument of a forward that says more of the prompt than our loops know, or None.

    With some of these, forwards keep more than the text in a cache of transformers' own: BLIP's, whose decoder is given
    an image.
    """
    if part.is_multimodal or part.has_encoder:  # such models are asked what their arguments mean
        return None
    for name, value in model_kwargs.items():
        is_known = name in KNOWN_MODEL_KWARGS or name in compat.WITHOUT_EFFECT or name.startswith("output_")
        if not is_known and value is not None:
            return name
    return None


def _cache_reason(part: StepSource, cache: FastpathCache, input_ids: torch.Tensor) -> str | None:
    """Return the reason to leave a cache to stock code, or None.

    Stock code takes a cache that the user made for another model or without its windows, or changed layer by layer.

    Raises:
        RuntimeError: the cache holds keys and values of another batch or model, or layers that do not fit together.
    """
    count, known = len(cache.layers), len(part.kinds)
    if any(getattr(layer, "cumulative_length", 0) for layer in cache.layers[known:]):
        return Cause("other_cache", f"it has {count} layers, the model {known}")
    del cache.layers[known:]  # a config may tell of more layers than its model has
    count = len(cache.layers)
    for number, (its, models) in enumerate(zip(cache.kinds, part.kinds)):
        if its.window not in (None, models.window):
            return Cause("other_cache", f"layer {number} has the window {its.window}, the model {models.window}")
        if (its.keys, its.states) != (models.keys, models.states):
            return Cause("other_cache", f"layer {number} holds other things than the model's")
    if any(kind.states for kind in part.kinds[count:]):
        return Cause("other_cache", "it was made without the model's config, and the model keeps states")
    if any(layer.record_past for layer in cache.state_layers):
        return Cause("other_cache", "its states record their past")
    if not cache.take():
        held = sorted({layer.cumulative_length for layer in cache.key_layers})
        return Cause("edited_cache", f"its layers hold {', '.join(map(str, held))} positions")
    if not cache.get_seq_length():
        return None
    if count < len(part.kinds):
        return Cause("edited_cache", f"it has {count} layers, the model {len(part.kinds)}")
    batch, dtype = len(input_ids), part.embedding.weight.dtype
    devices = [device for kind, device in zip(part.kinds, part.layer_devices) if kind.keys]
    for layer, attention, device in zip(cache.key_layers, part.attentions, devices):
        layer.admit((batch, *attention.cache_shape), (batch, *attention.value_shape), dtype, device)
    for layer, states in zip(cache.layers, part.states(1)):
        if states:
            layer.admit_states(states, batch)
    return None


def _layout_reason(
    part: StepSource, input_ids: torch.Tensor, model_kwargs: Mapping[str, Any], past_len: int
) -> str | None:
    mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    length = multimodal.prompt_shape(input_ids, model_kwargs)[1]
    if mask is not None:
        what = f"{mask.dtype} {tuple(mask.shape)} on {mask.device}"
        # generate() is given the whole conversation or only its new part; the mask always covers the cache
        if mask.shape[-1] not in (length, past_len + length) or mask.shape[-1] <= past_len:
            return Cause("attention_mask", f"{what}, for {length} tokens and {past_len} in the cache")
        if mask.dim() != 2 or mask.device != input_ids.device or not is_left_padding(mask):
            return Cause("attention_mask", what)
        if (reason := part.padding_reason(mask)) is not None:
            return reason
    if position_ids is None:
        return Cause("position_ids", "None") if part.takes_positions and not part.has_encoder else None
    has_axes = part.is_multimodal and position_ids.dim() == 3
    # axes of images and sound may be counted in floating point, see ``multimodal``
    is_number = position_ids.dtype in INDEX_DTYPES or (has_axes and position_ids.dtype == torch.float32)
    if not (is_number and (position_ids.dim() == 2 or has_axes)) or position_ids.device != input_ids.device:
        return Cause("position_ids", f"{position_ids.dtype} {tuple(position_ids.shape)} on {position_ids.device}")
    return None


def _pad_token_reason(part: StepSource, config: Any, batch: int) -> str | None:
    """Return a reason if the pad token is no token of the model: rows that have ended are read on as pad tokens."""
    pad, known = config.pad_token_id, part.num_embeddings
    if batch == 1 or config.eos_token_id is None or not isinstance(pad, int) or 0 <= pad < known:
        return None
    return Cause("unsupported_input", f"pad_token_id={pad}, of {known} tokens")


def is_left_padding(mask: torch.Tensor) -> bool:
    """Whether every row of a [batch, seq_len] mask is zeros, then ones, and ends in a one."""
    ones = mask.to(torch.int8)
    return bool((ones[:, 1:] >= ones[:, :-1]).all() & (ones[:, -1] == 1).all() & ((mask == 0) | (mask == 1)).all())
