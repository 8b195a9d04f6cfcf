"""Beam search: transformers' own loop chooses and reorders, and its steps are those of a plan."""

from __future__ import annotations

from typing import Any

import torch

from ...cache.encoder_decoder import for_stock
from ..sources.step_source import StepSource
from .call_scope import alone
from .counted import by_stock
from .eligibility import step_aside_reason
from .generate_calls import for_patched_models
from .patched import Patched
from .stand_in import StandIn


def takes(part: StepSource | None) -> bool:
    """Whether plans make the steps of a beam search; ranks would have to agree on beams as well."""
    return part is not None and part.ranks is None


@for_patched_models
@alone(draws_by_default=True)
def search(
    state: Patched,
    original: Any,
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Any:
    """Do what ``GenerationMixin._beam_search`` does, with its arguments, while a patched model is alive."""
    given = dict(logits_processor=logits_processor, stopping_criteria=stopping_criteria)
    given |= dict(generation_config=generation_config, synced_gpus=synced_gpus)
    part = state.plans.part_in_call(model, generation_config, is_last=True)
    if part is None or not takes(part):  # prepare_cache() has noted why
        return by_stock(state, input_ids, lambda: original(model, input_ids, **given, **for_stock(model_kwargs)))
    reason, behind = step_aside_reason(state, part, input_ids, generation_config, synced_gpus, model_kwargs)
    if reason is None:
        with state.plans.place() as is_free:
            if is_free:
                return StandIn(state, part, behind, input_ids, given, model_kwargs).run(original)
        reason = "busy"
    state.fall_back(reason)
    return by_stock(state, input_ids, lambda: original(model, input_ids, **given, **for_stock(model_kwargs)))
