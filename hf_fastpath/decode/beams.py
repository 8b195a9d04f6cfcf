"""Beam search: transformers' own loop chooses and reorders, and its steps are those of a plan."""

from __future__ import annotations

import time
from typing import Any

import torch

from .. import compat
from ..cache.encoder_decoder import FastpathEncoderDecoderCache, for_stock
from .calls import Watch, for_patched_models, next_positions_of, runs_users_code, settling
from .eligibility import step_aside_reason
from .encoded import Encoded
from .multimodal import Behind
from .patched import Patched
from .plan import DecodePlan
from .structure import ModelPart


def takes(part: ModelPart | None) -> bool:
    """Whether plans make the steps of a beam search; ranks would have to agree on beams as well."""
    return part is not None and part.ranks is None


@for_patched_models
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
    given = input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus
    part = state.plans.part_of(model)
    if part is None or not takes(part):  # prepare_cache() has counted the call
        return original(model, *given, **model_kwargs)
    reason, behind = step_aside_reason(state, part, input_ids, generation_config, synced_gpus, model_kwargs)
    if reason is None:
        with state.plans.place() as is_free:
            if is_free:
                has_users_code = bool(runs_users_code(logits_processor, stopping_criteria, None))
                stand_in = _Beams(state, part, behind, input_ids, generation_config, model_kwargs, has_users_code)
                return stand_in.searched(original, given, model_kwargs)
        reason = "busy"
    state.fall_back(reason)
    return original(model, *given, **for_stock(model_kwargs))


class _Beams:
    """What stands for a model in transformers' beam search: one new token of every beam is a step of a plan, and all
    else is the model's.

    The beams of a sentence attend to one output of an encoder. Its keys and values, which every beam has, therefore
    stay where they are when beams are reordered.
    """

    def __init__(
        self, state: Patched, part: Any, behind: Behind, ids: torch.Tensor, config: Any, kwargs: dict, watched: bool
    ):
        self._state, self._model, self._part = state, part.source, part
        self._batch, self._prompt_len = ids.shape
        mask = compat.text_arguments(kwargs).get("attention_mask")
        self._starts = None if mask is None else (mask == 0).sum(1)
        self._positions, self._seen = next_positions_of(behind, ids, config, kwargs), behind.seen
        self._plan: DecodePlan | None = None
        self._watch = Watch(state, part) if watched else None
        self._begun = 0.0
        self._held: int | None = None  # positions of the prompt, once it was read

    def searched(self, original: Any, given: tuple, model_kwargs: dict) -> Any:
        """Return what ``original``, transformers' beam search, gives for its arguments."""
        whole = model_kwargs[compat.CACHE]
        started = time.perf_counter()
        try:
            if isinstance(whole, FastpathEncoderDecoderCache):
                whole.is_alike_in_beams = True
            with settling(compat.text_cache(whole), self._part):
                result = original(self, *given, **model_kwargs)
        finally:
            if isinstance(whole, FastpathEncoderDecoderCache):
                whole.is_alike_in_beams = False
            self._end()
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        tokens = sequences.numel() - self._prompt_len * len(sequences)
        self._state.stats.generated(tokens, self._begun or started)
        return result

    def _end(self) -> None:
        plan, self._plan = self._plan, None  # set to None first, so that an interrupt cannot make it end twice
        if plan is not None:
            plan.end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        """Do as the model's forward for the arguments of ``prepare_inputs_for_generation``."""
        tokens, whole = inputs[compat.text_name(self._model, "input_ids")], inputs[compat.CACHE]
        cache = compat.text_cache(whole)
        if self._watch is not None and self._watch.has_changed(tokens.device):
            self._end()
            self._watch.look_again(tokens, cache)
            self._part = self._watch.part
        if self._part is None:
            return self._model(**inputs)
        if self._plan is None:
            self._plan = self._state.plans.decode_plan(self._part, self._batch, cache)
            length = cache.get_seq_length()
            self._held = length if self._held is None else self._held
            positions = self._positions + (length - self._held)
            encoded = Encoded.of(whole, self._seen) if self._part.has_encoder else None
            self._plan.begin(cache, positions, self._starts, encoded=encoded)
            self._begun = self._begun or time.perf_counter()
        else:
            self._plan.bind()  # the beams were reordered
        logits = self._plan.step(tokens[:, 0])
        return compat.text_output(logits[:, None], whole)
