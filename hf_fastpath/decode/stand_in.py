"""What stands for a model in a loop of transformers', which chooses tokens where no plan can."""

from __future__ import annotations

import time
from typing import Any

import torch

from .. import compat
from ..cache.encoder_decoder import FastpathEncoderDecoderCache
from .calls import Watch, next_positions_of, runs_users_code, settling
from .eligibility import text_of
from .encoded import Encoded
from .multimodal import Behind
from .patched import Patched
from .plan import DecodePlan


class StandIn:
    """What stands for a model in a loop of transformers' (beam search; several tokens at a position): what is new of
    every sequence is a step of a plan, and all else is the model's.

    The beams of a sentence attend to one output of an encoder. Its keys and values, which every beam has, therefore
    stay where they are when beams are reordered.

    Args:
        state, part: of the model.
        behind: what is known of the tokens behind the prompt.
        ids: the tokens that the loop goes on with.
        loop: the loop's own arguments: processors, criteria, configuration, and what else it takes.
        kwargs: the loop's further arguments.
    """

    def __init__(self, state: Patched, part: Any, behind: Behind, ids: torch.Tensor, loop: dict, kwargs: dict):
        self._state, self._model, self._part = state, part.source, part
        self._ids, self._loop, self._kwargs = ids, loop, kwargs
        self._prompt_len, text = ids.shape[1], text_of(part, ids, kwargs)
        self._batch = len(text)
        mask = compat.text_arguments(kwargs).get("attention_mask")
        starts = None if mask is None else (mask == 0).sum(1)
        self._starts = None if starts is None else starts.repeat(self._batch // len(starts))
        self._positions, self._seen = next_positions_of(behind, text, loop["generation_config"], kwargs), behind.seen
        self._plan: DecodePlan | None = None
        watched = runs_users_code(loop["logits_processor"], loop["stopping_criteria"], loop.get("streamer"))
        self._watch = Watch(state, part) if watched else None
        self._begun = 0.0
        self._held: int | None = None  # positions of the prompt, once it was read
        self._steps = 0  # forwards behind that of the prompt
        self._left_at: int | None = None  # length of the text when stock code took over from the plans

    def run(self, original: Any) -> Any:
        """Return what ``original``, a loop of transformers', gives."""
        whole = self._kwargs[compat.CACHE]
        started = time.perf_counter()
        try:
            if isinstance(whole, FastpathEncoderDecoderCache):
                whole.is_alike_in_beams = True
            with settling(compat.text_cache(whole), self._part):
                result = original(self, self._ids, **self._loop, **self._kwargs)
        finally:
            if isinstance(whole, FastpathEncoderDecoderCache):
                whole.is_alike_in_beams = False
            self._end()
        sequences = compat.sequences_of(result)
        new_tokens = sequences.numel() - self._prompt_len * len(sequences)
        left_at = sequences.shape[1] if self._left_at is None else self._left_at
        by_stock = max(0, sequences.shape[1] - left_at) * len(sequences)
        self._state.stats.generated(by_stock, started, stock=True, timed=0)
        self._state.stats.generated(new_tokens - by_stock, self._begun or started)
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
        self._steps += 1
        if self._watch is not None and self._watch.has_changed(tokens.device):
            self._end()
            self._watch.look_again(tokens, cache)
            self._part = self._watch.part
        if self._part is None:
            if self._left_at is None:
                self._left_at = self._prompt_len + self._steps
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
