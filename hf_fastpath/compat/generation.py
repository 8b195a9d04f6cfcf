"""``generate()``: what it asks for, and the steps of its loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.generation import GenerationConfig, GenerationMixin, GenerationMode
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from .caches import _OLD_CACHE, CACHE
from .models import text_decoder
from .token_methods import inputs_method

__all__ = [
    "BaseStreamer",
    "EosTokenCriteria",
    "GenerateDecoderOnlyOutput",
    "GenerationConfig",
    "GenerationMixin",
    "MaxLengthCriteria",
    "Tokenizer",
]


def is_sample_mode(generation_mode: Any) -> bool:
    """Whether ``generate()`` will run greedy search or sampling."""
    return generation_mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def is_beam_mode(generation_mode: Any) -> bool:
    """Whether ``generate()`` will run beam search."""
    return generation_mode in (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)


def is_assisted_mode(generation_mode: Any) -> bool:
    """Whether ``generate()`` will verify drafts."""
    return generation_mode is GenerationMode.ASSISTED_GENERATION


#: argument of a forward: of how many tokens logits are made, from the last back
LOGITS_TO_KEEP = "logits_to_keep"
#: the arguments that ``generate()`` passes to the model's forward in calls that our loops would take
FORWARD_ARGUMENTS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "use_cache", LOGITS_TO_KEEP, "return_dict", CACHE, _OLD_CACHE}
)


#: keyword arguments of ``generate()`` that change neither logits nor the cache: ``prepare_inputs_for_generation``
#: drops labels, and without labels a forward computes no loss
WITHOUT_EFFECT = frozenset({"labels", "num_items_in_batch"})


def is_stock_streamer(streamer: Any) -> bool:
    """Whether a streamer is of a class of transformers' or ours, and no method of it was replaced on the instance."""
    if any(name in vars(streamer) for name in ("put", "end", "on_finalized_text")):
        return False
    return type(streamer).__module__.startswith(("transformers.", "hf_fastpath."))


class _EndsWhen(StoppingCriteria):
    """A stopping criterion that ends all rows once ``is_over`` says so."""

    def __init__(self, is_over: Callable[[], bool]):
        self._is_over = is_over

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self._is_over(), device=input_ids.device)


def criteria_and(criteria: Any, is_over: Callable[[], bool]) -> StoppingCriteriaList:
    """Return a call's stopping criteria, and one that ends it once ``is_over`` says so."""
    return StoppingCriteriaList([*criteria, _EndsWhen(is_over)])


def looks_at_tokens_alone(criterion: StoppingCriteria) -> bool:
    """Whether a stopping criterion comes to the same end in every process that is given the same tokens."""
    return type(criterion) in (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)


def numbers_of(processor: LogitsProcessor) -> tuple:
    """Return the class of a processor of transformers', and its settings as far as they are plain values."""
    plain = {name: value for name, value in vars(processor).items() if isinstance(value, (int, float, str))}
    return type(processor).__name__, sorted(plain.items())


def is_stock(thing: LogitsProcessor | StoppingCriteria) -> bool:
    """Whether a processor or criterion is of a class of transformers', and calls no function of the user's."""
    return type(thing).__module__.startswith("transformers.") and type(thing) is not PrefixConstrainedLogitsProcessor


#: warpers in the order in which generate() applies them -> attribute with the setting, the value that changes nothing
_WARPERS: dict[type[LogitsProcessor], tuple[str, float]] = {
    TemperatureLogitsWarper: ("temperature", 1.0),
    TopKLogitsWarper: ("top_k", 0.0),
    TopPLogitsWarper: ("top_p", 1.0),
    MinPLogitsWarper: ("min_p", 0.0),
}


def sampling_settings(processors: Sequence[LogitsProcessor]) -> list[float] | None:
    """Return temperature, top_k, top_p and min_p of ``processors``, or None if a plan cannot sample so.

    A plan can if the processors are these warpers, each at most once and in this order, if they keep at least one token
    and give the others no chance, and if float32 holds the temperature and its inverse.
    """
    settings, kinds = [neutral for _, neutral in _WARPERS.values()], list(_WARPERS)
    last = -1
    for processor in processors:
        place = kinds.index(type(processor)) if type(processor) in kinds else -1
        keeps, filtered = (getattr(processor, name, None) for name in ("min_tokens_to_keep", "filter_value"))
        if place <= last or keeps not in (None, 1) or filtered not in (None, -float("inf")):
            return None
        settings[place], last = float(getattr(processor, _WARPERS[kinds[place]][0])), place
    limits = torch.finfo(torch.float32)
    return settings if limits.tiny <= settings[0] <= 1 / limits.tiny else None


def new_tokens(input_ids: torch.Tensor, generation_config: Any, model_kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return those of ``input_ids`` that the cache does not hold; the caller gives the whole text or only its new part.

    The mask's length tells which, as in ``GenerationMixin._prefill``.
    """
    mask = model_kwargs.get("attention_mask")
    # transformers may have dropped a mask of ones and noted its length
    covered = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    return input_ids[:, _past_len(model_kwargs[CACHE]) :] if covered == input_ids.shape[1] else input_ids


def num_new_tokens(input_ids: torch.Tensor, generation_config: Any, model_kwargs: Mapping[str, Any]) -> int:
    """Return how many tokens of a prompt the cache does not hold; embeddings in their place are always the whole
    text's."""
    embeds = model_kwargs.get("inputs_embeds")
    if embeds is None:
        return new_tokens(input_ids, generation_config, model_kwargs).shape[1]
    return embeds.shape[1] - _past_len(model_kwargs[CACHE])


def _past_len(cache: Any) -> int:
    """Return the tokens of a text that are not read again; behind states alone, all of what is given is new."""
    return 0 if all(cache.is_linear) else cache.get_seq_length()


class _FoldedRows(TorchFunctionMode):
    """Gives products of 16 bits on the CPU two dimensions where their rows are a slice.

    Of a prompt the head is given the last token alone, ``x[:, -1:]``. PyTorch folds such rows only if their strides are
    those of a whole tensor; else a head of 248,320 tokens and 2,560 features takes 5.4 seconds instead of 0.07.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not nn.functional.linear or not args or not _is_slice(args[0]):
            return func(*args, **kwargs)
        rows, *others = args
        return func(rows.flatten(0, -2), *others, **kwargs).unflatten(0, rows.shape[:-1])


def _is_slice(x: torch.Tensor) -> bool:
    is_short = x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16)
    return is_short and x.dim() > 2 and x.stride(-3) != x.shape[-2] * x.stride(-2)


def prefill(model: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict) -> Any:
    """Run the prompt as ``GenerationMixin._sample`` does."""
    is_slow = input_ids.device.type == "cpu" and model.dtype in (torch.float16, torch.bfloat16)
    with _FoldedRows() if is_slow else nullcontext():  # a mode costs every call of a forward microseconds
        named = dict(generation_config=generation_config, model_kwargs=model_kwargs, is_first_iteration=True)
        return model._prefill(input_ids=input_ids, **named)


def following_logits(model: Any, input_ids: torch.Tensor, count: int, prompt_len: int, model_kwargs: dict) -> Any:
    """Run the last ``count`` tokens of a text as ``GenerationMixin._sample`` runs the token that it has chosen.

    Args:
        input_ids: [batch, seq_len], the text, which begins as the caller of ``generate()`` gave it.
        count: number of its tokens that the cache does not hold.
        prompt_len: number of its tokens that were there when ``generate()`` began.
        model_kwargs: the keyword arguments of the prompt.

    Returns:
        [batch, count, vocab_size] logits of the token that follows each.
    """
    known = _updated(model, model_kwargs, input_ids.shape[1] - prompt_len)
    with model._optimize_model_for_decode():
        inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=count, **known)
        if LOGITS_TO_KEEP in inputs:
            inputs[LOGITS_TO_KEEP] = count
        return model(**inputs, return_dict=True).logits[:, -count:]


def inputs_behind(model: Any, input_ids: torch.Tensor, model_kwargs: dict) -> dict[str, Any]:
    """Return the arguments that ``GenerationMixin._sample`` would give a model's forward with the first new token.

    Args:
        input_ids: [batch, seq_len], of the prompt.
        model_kwargs: the keyword arguments of the prompt.
    """
    text = torch.nn.functional.pad(input_ids, (0, 1))
    known = _updated(model, model_kwargs, 1)
    return inputs_method(model)(text, next_sequence_length=1, **known)


def _updated(model: Any, model_kwargs: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the keyword arguments of a prompt once ``count`` tokens follow it."""
    named = dict(is_encoder_decoder=model.config.is_encoder_decoder, num_new_tokens=count)
    return model._update_model_kwargs_for_generation(outputs={}, model_kwargs=dict(model_kwargs), **named)


def rotary_positions(model: Any, position_ids: torch.Tensor) -> torch.Tensor:
    """Return the positions by which queries and keys are turned, [axes, batch, seq_len].

    Args:
        model: of which the positions are.
        position_ids: [batch, seq_len], or [axes, batch, seq_len] for several axes (time, height, width). An axis of the
            text may come before these; transformers only makes masks of it.
    """
    if position_ids.dim() == 2:
        return position_ids[None]
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    of_class = getattr(getattr(text_decoder(model), "rotary_emb", None), "mrope_section", None)
    axes = len(parameters.get("mrope_section") or of_class or ())
    return position_ids[1:] if axes and len(position_ids) == axes + 1 else position_ids


def pad_token(generation_config: Any) -> torch.Tensor | None:
    """Return the pad token as ``generate()`` resolved it, a tensor."""
    return generation_config._pad_token_tensor


def philox_offset(device: torch.device) -> int:
    """Return how far the default CUDA generator of ``device`` has advanced."""
    return _cuda_generator(device).get_offset()


def set_philox_offset(device: torch.device, offset: int) -> None:
    """Move the default CUDA generator of ``device`` to ``offset``, also back."""
    _cuda_generator(device).set_offset(offset)


def _cuda_generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def sequences_of(result: Any) -> Any:
    """Return the token ids among what ``generate()`` or one of its loops has given; None if a loop gives none."""
    return result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)


def num_tokens_behind(model: Any, prompt: Any, arguments: Mapping[str, Any], result: Any) -> int:
    """Return how many tokens a call of ``generate()`` has made, whatever its loop.

    Args:
        model: whose ``generate()`` was called.
        prompt: its first argument, or None.
        arguments: those that were given by name.
        result: what it gave.
    """
    sequences = sequences_of(result)
    if not isinstance(sequences, torch.Tensor):
        return 0
    if getattr(model.config, "is_encoder_decoder", False):
        given = arguments.get("decoder_input_ids")
        return sequences.numel() - len(sequences) * (1 if given is None else given.shape[-1])
    prompt = arguments.get("input_ids") if prompt is None else prompt
    if isinstance(prompt, torch.Tensor) and prompt.dim() == sequences.dim():
        return sequences.numel() - len(sequences) * prompt[0].numel()
    return sequences.numel()  # the prompt is embeddings, or text before sound, and comes not back


def uses_generation_mixin_sample(model: Any) -> bool:
    """Whether the model's class has transformers' own greedy and sampling loop."""
    return getattr(type(model), "_sample", None) is GenerationMixin._sample
