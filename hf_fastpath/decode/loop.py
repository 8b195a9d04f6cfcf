"""The decode loop that takes the place of ``GenerationMixin._sample`` for patched models.

Everything before and after it is transformers' own ``generate()``. The prompt runs through the patched modules; each
new token is one step of a :class:`~hf_fastpath.decode.plan.DecodePlan`.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import compat
from . import prompt
from .calls import end_tokens, ends_by_length_or_token, for_patched_models, settling, step_aside_reason
from .plan import MAX_EOS_TOKENS

if TYPE_CHECKING:
    from ..cache import FastpathCache
    from ..patch_state import PatchState
    from .plan import DecodePlan
    from .structure import ModelPart

#: how many tokens the host may be ahead of the device: enough to hide its work, few enough to waste little at the end
MAX_AHEAD = 8
_TOO_MANY = torch.empty(0)  # stands for more end tokens than a plan looks for


@for_patched_models
def sample(
    state: PatchState,
    original: Any,
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """What ``GenerationMixin._sample`` does while a patched model is alive, with its arguments."""
    state.stats.new_call()
    part = state.part_of(model)
    reason = step_aside_reason(state, part, input_ids, generation_config, synced_gpus, model_kwargs)
    if reason is None and compat.is_held_here(state.lock):
        reason = "reentrant"
    if reason is None:
        with state.lock:  # other threads wait; entered and left in one bytecode, so that no interrupt leaves it held
            loop = _Loop(state, model, input_ids, logits_processor, stopping_criteria, generation_config, streamer)
            with settling(model_kwargs[compat.CACHE], part):
                return loop.generate(part, model_kwargs)
    state.fall_back(reason)
    before, started = input_ids.shape[1], time.perf_counter()
    result = original(
        *(model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer),
        **model_kwargs,
    )
    sequences = result if isinstance(result, torch.Tensor) else result.sequences
    state.stats.generated(sequences.numel() - before * sequences.shape[0], started, reason)
    return result


@dataclass
class _Pending:
    """A step's tokens on their way from the device to the host.

    Attributes:
        length: of the sequences with them.
        tokens, unfinished: [batch] in host memory, valid once ``event`` has passed.
        chosen_by_plan: the host has not seen them in any other way.
    """

    length: int
    tokens: torch.Tensor
    unfinished: torch.Tensor
    event: torch.cuda.Event | None
    chosen_by_plan: bool = False


class _Loop:
    """One call of generate(): greedy search or sampling over a decode plan."""

    def __init__(self, state, model, input_ids, logits_processor, stopping_criteria, config, streamer):
        self.state, self.model, self.config = state, model, config
        self.processors, self.criteria, self.streamer = logits_processor, stopping_criteria, streamer
        self.device = input_ids.device
        self.batch, self.prompt_len = input_ids.shape
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.max_length = stopping_criteria.max_length
        #: of sampling that a plan can do
        self.settings = compat.sampling_settings(logits_processor) if config.do_sample else None
        self.ids = input_ids
        self.length = self.prompt_len  # of the sequences, tokens included that the device has chosen by itself
        self.chosen: list[torch.Tensor] = []  # those tokens, [batch] each, that follow ids
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self.unfinished = torch.ones(self.batch, dtype=torch.long, device=self.device)
        self.ahead = self._how_far_ahead()
        self.pending: deque[_Pending] = deque()
        self.offsets: dict[int, int] = {}
        self.finished_length: int | None = None  # where every row had ended, once the host knows

    def _how_far_ahead(self) -> int:
        """0 where the host must see every token before the next: on the CPU, and with the user's own objects."""
        if not all(map(compat.is_stock, self.criteria)):
            self.state.stats.note("custom_stopping_criteria")
            return 0
        if not all(map(compat.is_stock, self.processors)):
            self.state.stats.note("custom_logits_processor")
            return 0
        return MAX_AHEAD if self.device.type == "cuda" else 0

    def _plan_chooses(self) -> bool:
        """Whether the plan's own choice is this call's: no other processors, nothing else to stop for."""
        config = self.config
        if self.settings is None if config.do_sample else len(self.processors):
            return False
        if config.return_dict_in_generate and (config.output_scores or config.output_logits):
            return False
        return ends_by_length_or_token(self.criteria) and self._eos_tokens() is not _TOO_MANY

    def _eos_tokens(self) -> torch.Tensor | None:
        ends = end_tokens(self.criteria)
        if not ends:
            return None
        return torch.cat(ends) if sum(end.numel() for end in ends) <= MAX_EOS_TOKENS else _TOO_MANY

    def generate(self, part: ModelPart, model_kwargs: dict) -> Any:
        cache, position_ids = model_kwargs[compat.CACHE], model_kwargs["position_ids"]
        mask = model_kwargs.get("attention_mask")
        starts = None if mask is None else (mask == 0).sum(1)
        next_positions = position_ids[:, -1].expand(self.batch) + 1
        next_logits = prompt.read_text(self.state, self.model, part, self.ids, self.config, model_kwargs, starts)
        started, first = time.perf_counter(), True
        plan, plan_chooses = None, self._plan_chooses()
        sampled = plan_chooses and self.config.do_sample
        try:
            while True:
                if plan is None or not plan_chooses:
                    tokens = self._choose(next_logits)
                    done = self._finish_step(tokens)
                else:
                    done = self._follow_plan(plan, cache.get_seq_length())
                if done:
                    break
                if plan is None:
                    plan = self.state.plan(part, self.batch, cache, sampled)
                    end = self.has_eos and plan_chooses
                    eos = (self._eos_tokens(), compat.pad_token(self.config)) if end else (None, None)
                    plan.begin(cache, next_positions, starts, self.unfinished, *eos, self.settings)
                elif plan_chooses:
                    tokens = None
                if sampled:
                    self._note_offset()
                plan.follow_edits()
                next_logits = plan.step(tokens)
                if first:  # building and capturing the plan is not decoding speed
                    started, first = time.perf_counter(), False
            dropped = self._drain()
        finally:
            if plan is not None:
                plan.end()
        if self.chosen:
            self.ids = torch.cat((self.ids, torch.stack(self.chosen, dim=1).to(self.device)), dim=1)
            self.criteria(self.ids[:, :-1], None)  # warns, as at every step, of lengths the model was not made for
        if dropped:
            self._undo(dropped, cache)
        new_tokens = (self.length - self.prompt_len) * self.batch
        # the first token came out of the prompt, and the clock started with the step of the second
        self.state.stats.generated(new_tokens, started, timed=new_tokens - self.batch)
        if self.streamer is not None:
            self.streamer.end()
        return self._result(cache)

    def _choose(self, next_logits: torch.Tensor) -> torch.Tensor:
        """[batch] next tokens out of [batch, vocab_size] logits, exactly as transformers chooses them."""
        logits = next_logits.to(copy=True, dtype=torch.float32)
        scores = self.processors(self.ids, logits)
        if self.config.return_dict_in_generate:
            if self.config.output_scores:
                self.scores.append(scores)
            if self.config.output_logits:
                self.logits.append(logits)
        if self.config.do_sample:
            self._note_offset()
            probabilities = torch.nn.functional.softmax(scores, dim=-1)
            tokens = torch.multinomial(probabilities, num_samples=1).squeeze(1)
        else:
            tokens = torch.argmax(scores, dim=-1)
        if self.has_eos:
            tokens = tokens * self.unfinished + compat.pad_token(self.config).to(self.device) * (1 - self.unfinished)
        return tokens

    def _note_offset(self) -> None:
        """Remember where the generator stands before the next token is drawn, if that may have to be undone."""
        if self.ahead:
            self.offsets[self.length] = compat.philox_offset(self.device)

    def _finish_step(self, tokens: torch.Tensor) -> bool:
        """Append the tokens; say whether to stop."""
        self.ids = torch.cat((self.ids, tokens[:, None]), dim=1)
        self.length += 1
        done = self.criteria(self.ids, tuple(self.scores) if self.scores else None)
        self.unfinished = self.unfinished & ~done
        if not self.ahead:
            if self.streamer is not None:
                self.streamer.put(tokens.cpu())
            return not bool(self.unfinished.any())
        self._send(tokens)
        return self._look_back() or (self.max_length is not None and self.length >= self.max_length)

    def _follow_plan(self, plan: DecodePlan, cache_length: int) -> bool:
        """Take in the plan's own choice; say whether to stop."""
        self.length += 1
        event = self._event() if self.device.type == "cuda" else None
        self.pending.append(_Pending(self.length, *plan.choice(cache_length), event, chosen_by_plan=True))
        return self._look_back() or self.length >= self.max_length

    def _send(self, tokens: torch.Tensor) -> None:
        """Start copying this step's outcome to the host."""
        unfinished = torch.empty(self.batch, dtype=torch.long, device="cpu", pin_memory=True)
        unfinished.copy_(self.unfinished, non_blocking=True)
        on_host = torch.empty(self.batch, dtype=torch.long, device="cpu", pin_memory=True)
        if self.streamer is not None:
            on_host.copy_(tokens, non_blocking=True)
        self.pending.append(_Pending(self.length, on_host, unfinished, self._event()))

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _look_back(self, wait: bool = False) -> bool:
        """Take in what has arrived; wait only when the host is too far ahead. True once every row had finished."""
        while self.pending:
            oldest = self.pending[0]
            if oldest.event is not None:
                if not (wait or len(self.pending) > self.ahead or oldest.event.query()):
                    return False
                oldest.event.synchronize()
            self.pending.popleft()
            self.offsets.pop(oldest.length - 1, None)
            if oldest.chosen_by_plan:
                self.chosen.append(oldest.tokens.clone())
            if self.streamer is not None:
                self.streamer.put(oldest.tokens.clone())
            if not oldest.unfinished.numpy().any():
                self.finished_length = oldest.length
                return True
        return False

    def _drain(self) -> int:
        """Wait for the tokens on their way; returns how many steps past the end there were."""
        if self.finished_length is None:
            self._look_back(wait=True)
        return 0 if self.finished_length is None else self.length - self.finished_length

    def _undo(self, steps: int, cache: FastpathCache) -> None:
        """Take back ``steps`` tokens: sequences, scores, cache, and the random numbers they used."""
        self.length -= steps
        self.ids = self.ids[:, : self.length]  # what the plan chose past the end was never read
        for recorded in (self.scores, self.logits):
            del recorded[len(recorded) - steps if recorded else 0 :]
        cache.crop(-steps)
        if self.length in self.offsets:
            compat.set_philox_offset(self.device, self.offsets[self.length])

    def _result(self, cache: FastpathCache) -> Any:
        sequences = self.ids.contiguous()
        if not self.config.return_dict_in_generate:
            return sequences
        return compat.GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=tuple(self.scores) if self.config.output_scores else None,
            logits=tuple(self.logits) if self.config.output_logits else None,
            attentions=None,
            hidden_states=None,
            **{compat.CACHE: cache},
        )
