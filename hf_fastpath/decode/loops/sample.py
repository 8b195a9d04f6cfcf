"""The decode loop that takes the place of ``GenerationMixin._sample`` for patched models.

All that ``generate()`` does before and after the loop is transformers' own code. The prompt runs through the patched
modules; each new token is one step of a :class:`..plans.decode_plan.DecodePlan`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ... import compat
from ...cache.encoder_decoder import for_stock
from ...cache.fastpath_cache import FastpathCache
from ..plans.decode_plan import MAX_EOS_TOKENS
from ..plans.encoded import Encoded
from ..plans.plan_by_length import AnyPlan
from ..ranks.process_group import Ranks
from ..run.graph import random_numbers_in_turn
from ..sources.step_source import StepSource
from . import prompt
from .counted import by_stock
from .eligibility import asked_method, step_aside_reason
from .generate_calls import (
    CallWatch,
    agreed_reason,
    alike,
    end_tokens,
    ends_by_length_or_token,
    for_patched_models,
    next_positions_of,
    note_nonfinite,
    runs_users_code,
    settling,
)
from .multimodal import Behind
from .patched import Patched
from .stand_in import StandIn

#: number of tokens that the host may be ahead of the device: enough to hide the host's work, few enough to waste little
#: when the text ends
MAX_AHEAD = 8
_TOO_MANY = torch.empty(0)  # stands for more end tokens than a plan compares with


@for_patched_models
def sample(
    state: Patched,
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
    """Do what ``GenerationMixin._sample`` does, with its arguments, while a patched model is alive."""
    state.stats.new_call()
    given = dict(logits_processor=logits_processor, stopping_criteria=stopping_criteria)
    given |= dict(generation_config=generation_config, synced_gpus=synced_gpus, streamer=streamer)
    part = state.plans.part_in_call(model, generation_config, is_last=True)
    reason, behind = step_aside_reason(state, part, input_ids, generation_config, synced_gpus, model_kwargs)
    ranks = state.ranks if state.loop_reason is None else None
    reason = agreed_reason(ranks, reason, part, state.plans, len(input_ids))
    if reason is None:
        assert part is not None, "without one there is a reason"
        with state.plans.place() as is_free:
            asked = asked_method(part)
            if is_free and (part.token_shape or asked):
                return StandIn(state, part, behind, input_ids, given, model_kwargs, asked).run(original)
            if is_free:
                loop = _Loop(state, model, input_ids, logits_processor, stopping_criteria, generation_config, streamer)
                whole = alike(part.ranks, loop, model_kwargs, loop.plan_chooses())
                with settling(compat.text_cache(model_kwargs[compat.CACHE]), part), whole as together:
                    loop.follow(part.ranks, *together)
                    return loop.generate(part, model_kwargs, behind)
        reason = "busy"
    state.fall_back(reason)
    is_offloading = getattr(model_kwargs.get(compat.CACHE), "offloading", False)  # our forwards wait for its copies
    stock = lambda: original(model, input_ids, **given, **for_stock(model_kwargs))  # noqa: E731
    return by_stock(state, input_ids, stock, needs_modules=is_offloading)


@dataclass
class _Pending:
    """The tokens of a step, on their way from the device to the host.

    Attributes:
        length: length of the sequences with these tokens.
        tokens, unfinished: [batch] in host memory, valid once ``event`` has passed.
        chosen_by_plan: the plan has chosen the tokens, and the host has not seen them in any other way.
    """

    length: int
    tokens: torch.Tensor
    unfinished: torch.Tensor
    event: torch.cuda.Event | None
    chosen_by_plan: bool = False


class _Loop:
    """One call of generate() that decodes with a plan, by greedy search or by sampling."""

    def __init__(self, state, model, input_ids, logits_processor, stopping_criteria, config, streamer):
        self.state, self.model, self.config = state, model, config
        self.processors, self.criteria, self.streamer = logits_processor, stopping_criteria, streamer
        self.device = input_ids.device
        self.batch, self.prompt_len = input_ids.shape
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        #: the token of rows that have ended, if tokens end the text
        self.pad = compat.pad_token(config).to(self.device) if self.has_eos else None
        self.max_length = stopping_criteria.max_length
        #: the settings of sampling, if a plan can sample so
        self.settings = compat.sampling_settings(logits_processor) if config.do_sample else None
        self.ids = input_ids
        self.length = self.prompt_len  # length of the sequences, with the tokens that the device has chosen by itself
        self.chosen: list[torch.Tensor] = []  # the tokens that the device has chosen, [batch] each, which follow ids
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self.unfinished = torch.ones(self.batch, dtype=torch.long, device=self.device)
        users = runs_users_code(logits_processor, stopping_criteria, streamer)
        for code in users:
            state.stats.note(code)
        self.runs_users_code = bool(users)
        #: 0 if the host must see every token before the next one: on the CPU, and with the user's own objects
        self.ahead = MAX_AHEAD if self.device.type == "cuda" and not users else 0
        self.pending: deque[_Pending] = deque()
        self.offsets: dict[int, int] = {}
        self.drawn_to: int | None = None  # the generator's offset after the last number that was drawn here
        self.finished_length: int | None = None  # length at which every row had ended, once the host knows
        self.left_at: int | None = None  # length of the sequences when stock code took over
        self.ranks: Ranks | None = None  # the processes over which the model is spread
        self.may_choose = True  # a plan may choose tokens, as far as ranks are asked
        self.have_own_code = False  # ranks could come to other tokens or ends

    def follow(self, ranks: Ranks | None, own_code: bool, may_choose: bool) -> None:
        """Take on the ranks over which the model is spread, and what :func:`.generate_calls.alike`` has found."""
        self.ranks, self.have_own_code, self.may_choose = ranks, own_code, may_choose
        if own_code:
            self.ahead = 0

    def plan_chooses(self) -> bool:
        """Whether the plan may choose tokens: there are no other processors, and nothing else ends the text."""
        config = self.config
        if not self.may_choose:
            return False
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

    def generate(self, part: StepSource, model_kwargs: dict, behind: Behind) -> Any:
        text, given_cache = compat.text_arguments(model_kwargs), model_kwargs[compat.CACHE]
        cache = text[compat.CACHE]
        if cache.state_layers and not cache.is_dropped:
            self.ahead = 0  # a token that was read behind the end could not be taken back
        mask = text.get("attention_mask")
        starts = None if mask is None else (mask == 0).sum(1)
        next_positions, seen = next_positions_of(behind, self.ids, self.config, model_kwargs), behind.seen
        state, given = self.state, (self.model, part, self.ids, self.config, model_kwargs, starts)
        next_logits, prefix = prompt.read_text(state.plans, *given, state.prefixes)
        started, first = time.perf_counter(), True
        plan: AnyPlan | None = None
        plan_chooses = self.plan_chooses()
        sampled = plan_chooses and self.config.do_sample
        watch = CallWatch(self.state, part) if self.runs_users_code else None
        now: StepSource | None = part  # the model as it is now; None if stock code has to go on
        try:
            while True:
                if plan is None or not plan_chooses:
                    tokens = self._choose(next_logits)
                    done = self._finish_step(tokens)
                else:
                    tokens = None
                    done = self._follow_plan(plan, cache.get_seq_length())
                if done:
                    break
                if watch is not None and watch.has_changed(self.device):
                    watch.look_again(self.ids, cache)
                    now, self.state = watch.part, watch.state
                    if plan is not None and (now is None or plan.fingerprint != self.state.plans.fingerprint_of(now)):
                        if plan_chooses:
                            tokens, self.unfinished = plan.tokens[:, 0].clone(), plan.unfinished.clone()
                        old, plan = plan, None  # set to None first, so that an interrupt cannot make the plan end twice
                        old.end()
                if now is None:
                    next_logits = self._step_by_stock(model_kwargs)
                    continue
                if plan is None:
                    plan = self.state.plans.decode_plan(now, self.batch, cache, sampled)
                    for note in plan.program.notes:
                        self.state.stats.note(note)
                    end = self.has_eos and plan_chooses
                    eos = (self._eos_tokens(), compat.pad_token(self.config)) if end else (None, None)
                    self._settle(self.ids.numel())
                    positions = next_positions + (self.length - self.prompt_len - 1)
                    read = None if seen is None else Encoded.of(given_cache, seen)
                    plan.begin(cache, positions, starts, self.unfinished, *eos, self.settings, read)
                if watch is not None:
                    plan.follow_edits()
                if not plan.has_positions() and self._look_back(wait=True):
                    break  # all rows had ended, and the host was ahead
                next_logits = self._draw(plan.step, tokens) if sampled else plan.step(tokens)
                if first:  # building and capturing the plan does not count as decoding
                    started, first = time.perf_counter(), False
            dropped = self._drain()
            self._settle()
            note_nonfinite(self.state, next_logits)
        except RuntimeError:
            # A CPU may have failed to draw a token from such logits. After an error a GPU cannot be asked.
            if self.device.type == "cpu":
                note_nonfinite(self.state, next_logits if plan is None or plan.logits is None else plan.logits)
            raise
        finally:
            if plan is not None:
                plan.end()
        if self.chosen:
            self._gather()
            self.criteria(self.ids[:, :-1], None)  # warns, as at every step, of lengths that the model was not made for
        if dropped:
            self._undo(dropped, cache)
        if prefix is not None and self.left_at is None:
            prefix.keep(self.ids, self.runs_users_code)
        new_tokens = (self.length - self.prompt_len) * self.batch
        by_stock = 0 if self.left_at is None else (self.length - self.left_at) * self.batch
        self.state.stats.generated(by_stock, started, stock=True, timed=0)
        # The first token came out of the prompt, and the clock started with the step of the second.
        self.state.stats.generated(new_tokens - by_stock, started, timed=new_tokens - self.batch)
        if self.streamer is not None:
            self.streamer.end()
        return self._result(given_cache)

    def _gather(self) -> None:
        """Append the tokens that the plan has chosen to the sequences."""
        self.ids = torch.cat((self.ids, torch.stack(self.chosen, dim=1).to(self.device)), dim=1)
        self.chosen = []

    def _step_by_stock(self, model_kwargs: dict) -> torch.Tensor:
        """Run the newest tokens through the model's own forward; return logits as ``DecodePlan.step`` does."""
        if self.left_at is None:
            self.left_at = self.length
        if self.chosen:
            self._gather()
        return compat.following_logits(self.model, self.ids, 1, self.prompt_len, model_kwargs)[:, -1]

    def _choose(self, next_logits: torch.Tensor) -> torch.Tensor:
        """Choose [batch] next tokens from [batch, vocab_size] logits, exactly as transformers chooses them."""
        logits = next_logits.to(copy=True, dtype=torch.float32)
        scores = self.processors(self.ids, logits)
        if self.config.return_dict_in_generate:
            if self.config.output_scores:
                self.scores.append(scores)
            if self.config.output_logits:
                self.logits.append(logits)
        if self.config.do_sample:
            probabilities = torch.nn.functional.softmax(scores, dim=-1)
            tokens = self._draw(torch.multinomial, probabilities, 1).squeeze(1)
        else:
            tokens = torch.argmax(scores, dim=-1)
        if self.ranks is not None and self.have_own_code:
            tokens = self.ranks.same(tokens)
        if self.pad is not None:
            tokens = tokens * self.unfinished + self.pad * (1 - self.unfinished)
        return tokens

    def _draw(self, function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        """Return ``function(*arguments)``, which draws the next tokens.

        The generator's offset before the draw is remembered if the draw may have to be undone.
        """
        with random_numbers_in_turn(self.device):
            if not self.ahead:
                return function(*arguments)
            offset = compat.philox_offset(self.device)
            if offset != self.drawn_to:  # another thread has drawn; its numbers cannot be given back
                self.offsets.clear()
            self.offsets[self.length] = offset
            drawn = function(*arguments)
            self.drawn_to = compat.philox_offset(self.device)
            return drawn

    def _finish_step(self, tokens: torch.Tensor) -> bool:
        """Append the tokens; return whether to stop."""
        self.ids = torch.cat((self.ids, tokens[:, None]), dim=1)
        self.length += 1
        done = self.criteria(self.ids, tuple(self.scores) if self.scores else None)
        if self.ranks is not None and self.have_own_code:
            done = self.ranks.any_of(done)
        self.unfinished = self.unfinished & ~done
        if not self.ahead:
            self._settle()
            if self.streamer is not None:
                self.streamer.put(tokens.cpu())
            return not bool(self.unfinished.any())
        self._send(tokens)
        return self._look_back() or (self.max_length is not None and self.length >= self.max_length)

    def _follow_plan(self, plan: AnyPlan, cache_length: int) -> bool:
        """Take on the tokens that the plan has chosen; return whether to stop."""
        self.length += 1
        event = self._event() if self.device.type == "cuda" else None
        tokens, unfinished = plan.choice(cache_length)
        self.pending.append(_Pending(self.length, tokens, unfinished, event, chosen_by_plan=True))
        return self._look_back() or self.length >= self.max_length

    def _send(self, tokens: torch.Tensor) -> None:
        """Start copying this step's tokens to the host."""
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
        """Take in the tokens that have arrived, and wait only if the host is too far ahead.

        Returns:
            Whether every row has ended.
        """
        while self.pending:
            oldest = self.pending[0]
            if oldest.event is not None:
                if not (wait or len(self.pending) > self.ahead or self._has_passed(oldest.event)):
                    return False
                oldest.event.synchronize() if self.ranks is None else self.ranks.wait(oldest.event)
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

    def _settle(self, tokens: int = 1) -> None:
        """Before the host looks at what the device computes: do not wait forever if that needs other ranks."""
        if self.ranks is not None:
            self.ranks.settle(self.device, tokens)

    def _has_passed(self, event: torch.cuda.Event) -> bool:
        """Whether a device has passed an event. Ranks pass it at other times, and all have to run equally far ahead."""
        return self.ranks is None and event.query()

    def _drain(self) -> int:
        """Wait for the tokens on their way; return how many steps were run past the end."""
        if self.finished_length is None:
            self._look_back(wait=True)
        return 0 if self.finished_length is None else self.length - self.finished_length

    def _undo(self, steps: int, cache: FastpathCache) -> None:
        """Take back ``steps`` tokens from sequences, scores and cache, and the random numbers that they used."""
        self.length -= steps
        self.ids = self.ids[:, : self.length]  # the plan's tokens past the end were never appended
        for recorded in (self.scores, self.logits):
            del recorded[len(recorded) - steps if recorded else 0 :]
        if cache.state_layers:
            cache.reset()  # nothing can be taken back from states, and nobody reads them: see generate()
        else:
            cache.crop(-steps)
        if self.length in self.offsets:
            with random_numbers_in_turn(self.device):
                if compat.philox_offset(self.device) == self.drawn_to:
                    compat.set_philox_offset(self.device, self.offsets[self.length])

    def _result(self, cache: Any) -> Any:
        sequences = self.ids.contiguous()
        if not self.config.return_dict_in_generate:
            return sequences
        kind: Any = compat.GenerateDecoderOnlyOutput
        if isinstance(cache, compat.EncoderDecoderCache):
            kind = compat.GenerateEncoderDecoderOutput
        return kind(
            sequences=sequences,
            scores=tuple(self.scores) if self.config.output_scores else None,
            logits=tuple(self.logits) if self.config.output_logits else None,
            **{compat.CACHE: cache},
        )
