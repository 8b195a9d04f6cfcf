"""Drafts of ``generate()``: transformers' candidate generators."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.generation import candidate_generator as candidates
from transformers.generation import utils as generation_utils

#: whether ``GenerationMixin._assisted_decoding`` also asks the stopping criteria about every draft, as in 5.17; if they
#: end the text behind a draft, no token follows that draft. Remove it when 5.17 is not supported.
CRITERIA_SEE_DRAFTS = "is_done_candidate" in inspect.signature(generation_utils._speculative_sampling).parameters


def candidate_generator(model: Any, **arguments: Any) -> Any:
    """Return the candidate generator of ``GenerationMixin._assisted_decoding`` with these arguments, or None.

    The result is None unless drafts come from an assistant or a lookup in the prompt, and the model's choice decides.

    Args:
        model: the model that generates.
        arguments: the arguments of ``GenerationMixin._get_candidate_generator``.
    """
    config = arguments["generation_config"]
    others = ("assistant_early_exit", "use_mtp", "speculation_type", "assistant_ensemble_weight")
    if any(getattr(config, name, None) for name in others):
        return None
    made = model._get_candidate_generator(**arguments)
    if looks_up_drafts(made):
        if not made.logits_processor:  # on the host, comparisons do not wait for the device
            made.eos_token_id = None if made.eos_token_id is None else made.eos_token_id.cpu()
            made.logits_processor = None
        return made
    return made if type(made) is candidates.AssistedCandidateGenerator else None


def lengthen_draft_inputs(generator: Any, count: int) -> None:
    """Tell an assistant's generator that the text in front of its next draft has ``count`` more tokens."""
    given = generator.assistant_kwargs
    for name, extend in (
        ("attention_mask", candidates._prepare_attention_mask),
        ("position_ids", candidates._prepare_position_ids),
    ):
        if given.get(name) is not None:
            length = given[name].shape[-1] + count
            given = extend(model_kwargs=given, new_length=length, is_encoder_decoder=False)
    generator.assistant_kwargs = given


def looks_up_drafts(generator: Any) -> bool:
    """Whether drafts are pieces of the text itself."""
    return type(generator) is candidates.PromptLookupCandidateGenerator


def note_confidence(generator: Any, probability: float) -> None:
    """Tell an assistant's generator the probability of the token it drafted; it learns its threshold from that."""
    if hasattr(generator, "probs"):
        generator.probs.append(probability)


def update_drafts(generator: Any, text: torch.Tensor, drafted: int, matches: int) -> None:
    """Tell a generator how many of its ``drafted`` tokens the model accepted."""
    scores = text.new_empty((1, drafted + 1))
    generator.update_candidate_strategy(input_ids=text, scores=scores, num_matches=matches)


def keep_draft_length(generator: Any) -> None:
    """Store the draft length that was found in the assistant, as ``GenerationMixin._assisted_decoding`` does."""
    if looks_up_drafts(generator):
        return
    config = generator.assistant_model.generation_config
    if config.num_assistant_tokens_schedule == "heuristic":
        config.num_assistant_tokens = generator.num_assistant_tokens
