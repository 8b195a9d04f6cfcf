"""What stands for a model in a loop of transformers', which chooses tokens where no plan can, or asks the model's own
method what each token is given."""

from __future__ import annotations

import time
from typing import Any

import torch

from ... import compat
from ...cache.encoder_decoder import FastpathEncoderDecoderCache
from ...reasons import Cause
from ..plans.encoded import Encoded
from ..plans.plan_by_length import AnyPlan
from ..sources.step_source import StepSource
from .eligibility import INDEX_DTYPES, is_left_padding, text_of
from .generate_calls import CallWatch, next_positions_of, runs_users_code, settling
from .multimodal import Behind
from .patched import Patched

_OF_A_TOKEN = ("input_ids", "attention_mask", "position_ids")
#: arguments of a forward that say no more of a token
_KNOWN = {*_OF_A_TOKEN, *compat.CACHES, *compat.WITHOUT_EFFECT, "use_cache", "return_dict", "logits_to_keep"}


class StandIn:
    """What stands for a model in a loop of transformers' (beam search; several tokens at a position; a method that has
    to be asked): what is new of every sequence is a step of a plan, and all else is the model's.

    The beams of a sentence attend to one output of an encoder. Its keys and values, which every beam has, therefore
    stay where they are when beams are reordered.

    Args:
        state, part: of the model.
        behind: what is known of the tokens behind the prompt.
        ids: the tokens that the loop goes on with.
        loop: the loop's own arguments: processors, criteria, configuration, and what else it takes.
        kwargs: the loop's further arguments.
        asked: the method that the loop asks what a token is given, if that may be more than the token and its position.
    """

    def __init__(
        self,
        state: Patched,
        part: StepSource,
        behind: Behind,
        ids: torch.Tensor,
        loop: dict,
        kwargs: dict,
        asked: str | None = None,
    ):
        self._state, self._model = state, part.source
        self._part: StepSource | None = part
        self._ids, self._loop, self._kwargs = ids, loop, kwargs
        self._asked, self._is_left = asked, False
        self._end_of_prompt = 0
        if asked is not None:
            new = compat.num_new_tokens(ids, loop["generation_config"], kwargs)
            self._end_of_prompt = kwargs[compat.CACHE].get_seq_length() + new
        self._prompt_len, text = ids.shape[1], text_of(part, ids, kwargs)
        self._batch = len(text)
        mask = compat.text_arguments(kwargs).get("attention_mask")
        starts = None if mask is None else (mask == 0).sum(1)
        self._starts = None if starts is None else starts.repeat(self._batch // len(starts))
        self._positions, self._seen = next_positions_of(behind, text, loop["generation_config"], kwargs), behind.seen
        self._plan: AnyPlan | None = None
        watched = runs_users_code(loop["logits_processor"], loop["stopping_criteria"], loop.get("streamer"))
        self._watch = CallWatch(state, part) if watched or asked is not None else None
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
            part = self._part
            assert part is not None, "a call begins with one"
            with settling(compat.text_cache(whole), part):
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
        self._steps += 1
        part = self._part
        if part is None or self._is_left:
            return self._by_stock(inputs)
        if self._asked is not None and not self._is_known(part, inputs):
            self._state.stats.note(Cause("generation_method", self._asked))
            self._end()
            self._is_left = True
            return self._by_stock(inputs)
        tokens, whole = inputs[compat.text_name(self._model, "input_ids")], compat.cache_of(inputs, None)
        cache = compat.text_cache(whole)
        if self._watch is not None and self._watch.has_changed(tokens.device):
            self._end()
            self._watch.look_again(tokens, cache)
            part = self._part = self._watch.part
        if part is None:
            return self._by_stock(inputs)
        plan = self._plan
        if plan is None:
            plan = self._plan = self._state.plans.decode_plan(part, self._batch, cache)
            length = cache.get_seq_length()
            self._held = length if self._held is None else self._held
            positions = self._positions + (length - self._held)
            encoded = None if self._seen is None else Encoded.of(whole, self._seen)
            plan.begin(cache, positions, self._starts, encoded=encoded)
            self._begun = self._begun or time.perf_counter()
        else:
            plan.bind()  # the beams were reordered
        logits = plan.step(tokens[:, 0])
        return compat.text_output(logits[:, None], whole)

    def _by_stock(self, inputs: dict[str, Any]) -> Any:
        if self._left_at is None:
            self._left_at = self._prompt_len + self._steps
        return self._model(**inputs)

    def _is_known(self, part: StepSource, inputs: dict[str, Any]) -> bool:
        """Whether the forward is given no more than a plan reads: a token of each sequence, at the next position,
        behind all that the cache holds."""
        given = {name: value for name, value in inputs.items() if value is not None and value is not False}
        cache, tokens, mask, positions = compat.cache_of(given, None), *map(given.get, _OF_A_TOKEN)
        if given.keys() - _KNOWN or cache is not self._kwargs[compat.CACHE]:
            return False
        if tokens is None or tokens.shape != (self._batch, 1) or tokens.dtype not in INDEX_DTYPES:
            return False
        held = self._begins_as_known(part, cache, mask, positions) if self._held is None else self._held
        if held is None:
            return False
        length = held + self._steps - 1
        if cache.key_layers and cache.get_seq_length() != length:
            return False
        places = torch.arange(length + 1, device=tokens.device).expand(self._batch, -1)
        shown = places >= (0 if self._starts is None else self._starts[:, None])
        expected = (self._positions + self._steps - 1)[:, None]
        mask = torch.ones_like(shown) if mask is None else mask
        if positions is None:
            positions = places[:, -1:] if part.takes_positions else expected
        if mask.shape != shown.shape or positions.shape not in (expected.shape, (1, 1)):
            return False
        return bool((mask == shown).all() & (positions == expected).all())

    def _begins_as_known(
        self, part: StepSource, cache: Any, mask: torch.Tensor | None, positions: torch.Tensor | None
    ) -> int | None:
        """Take over where the first token behind the prompt is: there may be more in front of it than the loop's text,
        such as tokens that PEFT has learned. Return None if that is nowhere a plan can begin, else :attr:`_held`."""
        held = self._held = cache.get_seq_length() if cache.key_layers else self._end_of_prompt
        if held != self._end_of_prompt:
            if part.computed_positions is not None or part.by_length.is_bounded(self._batch):
                return None
            if not part.takes_positions:
                self._positions = torch.full_like(self._positions, held)
        if mask is None:
            self._starts = None
        elif mask.dim() == 2 and is_left_padding(mask):
            self._starts = (mask == 0).sum(1)
        else:
            return None
        if mask is not None and part.padding_reason(mask) is not None:
            return None
        if part.takes_positions and (positions is None or bool((positions == held).all())):
            self._positions = torch.full_like(self._positions, held)  # as forwards count by themselves
        return held
