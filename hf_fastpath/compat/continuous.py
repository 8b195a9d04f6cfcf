"""``generate_batch()``: what it asks for, and what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from transformers.generation.continuous_batching import ContinuousMixin
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from .generation import sampling_settings

#: settings that say nothing of tokens, or that :func:`batch_arguments` gives in any case
_GIVEN = frozenset(
    {
        *("max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p", "eos_token_id"),
        *("pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version", "use_cache"),
        *("return_dict_in_generate", "num_return_sequences", "_from_model_config", "cache_implementation"),
    }
)


def _returns_copies() -> bool:
    try:
        return "__child#" in inspect.getsource(ContinuousMixin.generate_batch)
    except OSError:  # there is no source; newer releases return them
        return True


_COPIES_ARE_RETURNED = _returns_copies()


def copies_of(config: Any) -> int:
    """Return how many results ``generate_batch()`` gives of each prompt; 5.17 gives one, whatever is asked for.

    Remove this when 5.17 is not supported.
    """
    return (config.num_return_sequences or 1) if _COPIES_ARE_RETURNED else 1


def why_not_batch_arguments(model: Any, config: Any) -> str | None:
    """Return the setting with which ``generate_batch()`` would do something else than ``generate()`` for each prompt;
    None if there is none.

    ``generate_batch()`` takes what a config says alone, and drops processors that mix requests.
    """
    processors = model._get_logits_processor(config)
    if sampling_settings(processors) is None or (processors and not config.do_sample):
        return ", ".join(type(each).__name__ for each in processors)
    for name, value in model.generation_config.to_dict().items():
        if name not in _GIVEN and value not in (None, False) and getattr(config, name, None) is None:
            return f"generation_config.{name} of the model"
    for name in ("num_beams", "stop_strings", "max_time", "prompt_lookup_num_tokens", "output_scores", "output_logits"):
        if getattr(config, name, None) not in (None, False, 1):
            return name
    return None


def batch_arguments(model: Any, config: Any) -> dict[str, Any]:
    """Return the arguments of ``generate()`` that do for one prompt what ``generate_batch()`` does with a config that
    there is nothing against."""
    temperature, top_k, top_p, min_p = sampling_settings(model._get_logits_processor(config)) or (1.0, 0, 1.0, 0.0)
    ends = config.eos_token_id if config.eos_token_id is not None else getattr(model.config, "eos_token_id", None)
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    sampled = dict(temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p)
    made: dict[str, Any] = dict(do_sample=bool(config.do_sample), pad_token_id=pad)
    if ends is not None or model.generation_config.eos_token_id is not None:
        made["eos_token_id"] = -1 if ends is None else ends
    return made | (sampled if config.do_sample else {})


def generation_output(
    id: str,
    prompt: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[float] | None,
    error: BaseException | None,
    created: float,
    lifespan: tuple[float, float],
) -> GenerationOutput:
    """Make what ``generate_batch()`` returns of a request that has ended; times are those of ``perf_counter()``."""
    return GenerationOutput(
        request_id=id,
        prompt_ids=list(prompt),
        generated_tokens=list(tokens),
        logprobs=list(logprobs or ()),
        error=None if error is None else str(error),
        status=RequestStatus.FINISHED if error is None else RequestStatus.FAILED,
        created_time=created,
        lifespan=lifespan,
    )
