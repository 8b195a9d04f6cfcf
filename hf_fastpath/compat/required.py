"""Names and arguments of transformers that are used later than when this folder is imported: a release that has moved
one is found by ``patch()``, and not in the middle of a call."""

from __future__ import annotations

import functools
import importlib
import inspect

#: module -> names in it, which may be attributes of classes
_NAMES: dict[str, tuple[str, ...]] = {
    "transformers.cache_utils": (
        *("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer"),
        *("DynamicCache.get_seq_length", "DynamicCache.update", "EncoderDecoderCache"),
    ),
    "transformers.generation": (
        *("GenerationMixin._sample", "GenerationMixin._assisted_decoding", "GenerationMixin._beam_search"),
        *("GenerationMixin.generate", "GenerationMixin._prefill", "GenerationMixin.prepare_inputs_for_generation"),
        *("GenerationMixin._update_model_kwargs_for_generation", "GenerationMixin._prepare_cache_for_generation"),
        *("GenerationMixin._get_candidate_generator", "GenerationMixin._optimize_model_for_decode"),
        *("GenerationMode.GREEDY_SEARCH", "GenerationMode.SAMPLE", "GenerationMode.BEAM_SEARCH"),
        *("GenerationMode.BEAM_SAMPLE", "GenerationMode.ASSISTED_GENERATION"),
    ),
    "transformers.generation.candidate_generator": (
        *("AssistedCandidateGenerator", "PromptLookupCandidateGenerator"),
        *("_prepare_attention_mask", "_prepare_position_ids"),
    ),
    "transformers.generation.utils": ("_speculative_sampling",),
    "transformers.utils.output_capturing": ("_active_collector",),
    "transformers.quantizers.auto": ("AUTO_QUANTIZATION_CONFIG_MAPPING", "AutoHfQuantizer.from_config"),
    "transformers": (
        *("AutoModel", "AutoModelForCausalLM", "AutoModelForMultimodalLM", "AutoModelForSeq2SeqLM"),
        *("AutoModelForSpeechSeq2Seq", "PreTrainedModel", "PreTrainedConfig.get_text_config"),
    ),
}
#: function -> arguments that it is given by name, or that ours take in its place
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "GenerationMixin._sample": (
        *("input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"),
    ),
    "GenerationMixin._assisted_decoding": (
        *("input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"),
        *("inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer"),
    ),
    "GenerationMixin._beam_search": (
        *("input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus"),
    ),
    "GenerationMixin._prefill": ("input_ids", "generation_config", "model_kwargs", "is_first_iteration"),
    "GenerationMixin.prepare_inputs_for_generation": ("input_ids", "next_sequence_length"),
    "GenerationMixin._update_model_kwargs_for_generation": (
        *("outputs", "model_kwargs", "is_encoder_decoder", "num_new_tokens"),
    ),
    "GenerationMixin._prepare_cache_for_generation": ("generation_config", "model_kwargs", "generation_mode"),
    "GenerationMixin._get_candidate_generator": (
        *("generation_config", "input_ids", "inputs_tensor", "assistant_model", "logits_processor"),
        *("target_tokenizer", "assistant_tokenizer", "model_kwargs"),
    ),
}


@functools.cache
def what_is_missing() -> str | None:
    """Return in words what the installed transformers lacks of what is used here; None if it has all of it."""
    for module, names in _NAMES.items():
        for name in names:
            if _found(module, name) is None:
                return f"{module} has no {name}"
    for name, arguments in _ARGUMENTS.items():
        known = inspect.signature(_found("transformers.generation", name)).parameters
        missing = [each for each in arguments if each not in known]
        if missing:
            return f"{name}() takes no {', '.join(missing)}"
        others = [each.name for each in known.values() if each.name not in (*arguments, "self") and _is_needed(each)]
        if others and name in _GIVEN:
            return f"{name}() needs {', '.join(others)}, too"
    return None


#: functions of these that are called here, instead of by transformers
_GIVEN = ("GenerationMixin._prefill", "GenerationMixin._update_model_kwargs_for_generation")


def _is_needed(parameter: inspect.Parameter) -> bool:
    is_named = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return is_named and parameter.default is inspect.Parameter.empty


def _found(module: str, name: str) -> object:
    try:
        value: object = importlib.import_module(module)
    except ImportError:
        return None
    for part in name.split("."):
        value = getattr(value, part, None)
    return value
