"""The decode loop that takes the place of ``GenerationMixin._sample`` for patched models.

All that ``generate()`` does before and after the loop is transformers' own code. The prompt runs through the patched
modules; each new token is one step of a :class:`..plans.decode_plan.DecodePlan`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ... import compat
from ...cache.encoder_decoder import for_stock
from ..plans.decode_plan import MAX_EOS_TOKENS
from ..plans.encoded import Encoded
from ..plans.plan_by_length import AnyPlan
from ..ranks.process_group import Ranks
from ..sources.step_source import StepSource
from . import adapter_rows, prompt
from .call_scope import Cancelled, alone, scope_here
from .counted import by_stock
from .eligibility import asked_method, reason_of_call, step_aside_reason
from .generate_calls import (
    CallWatch,
    agreed_reason,
    alike,
    end_tokens,
    ends_by_length_or_token,
    for_patched_models,
    grammars_of,
    next_positions_of,
    note_nonfinite,
    runs_users_code,
    settling,
)
from .grammar_masks import MasksAhead, fills_masks_ahead
from .multimodal import Behind
from .patched import Patched
from .prompt_turns import ALONE
from .shared_calls import SharedCall, logprobs_of, to_tokens, with_request
from .stand_in import StandIn
from .tokens_ahead import Pending, TokensAhead

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
    ranks = state.ranks if state.loop_reason is None else None
    reason, part, rows, behind = state.loop_reason, None, None, Behind()
    if reason is None and ranks is None:
        reason = reason_of_call(generation_config, model_kwargs, state.plans.is_left(generation_config))
    if reason is None:
        with adapter_rows.looked_at(model) as rows:
            part = state.plans.part_in_call(model, generation_config, is_last=True)
            reason, behind = step_aside_reason(state, part, input_ids, generation_config, synced_gpus, model_kwargs)
            if rows is not None and reason is None and part is not None:
                reason = adapter_rows.reason_against(part, rows, len(input_ids))
    reason = agreed_reason(ranks, reason, part, state.plans, len(input_ids))
    if reason is None:
        assert part is not None, "without one there is a reason"
        asked, cache = asked_method(part), compat.text_cache(model_kwargs[compat.CACHE])
        if part.token_shape or asked:
            with alone(draws_by_default=True), state.plans.place() as is_free:
                if is_free:
                    return StandIn(state, part, behind, input_ids, given, model_kwargs, asked).run(original)
        else:
            loop = _Loop(state, model, input_ids, logits_processor, stopping_criteria, generation_config, streamer)
            loop.rows = rows
            whole = alike(part.ranks, loop, model_kwargs, loop.plan_chooses())
            with SharedCall.of(state, part, loop, cache) as loop.shared, loop.place() as is_free:
                if is_free:
                    with settling(cache, part), whole as together:
                        loop.follow(part.ranks, *together)
                        return loop.generate(part, model_kwargs, behind)
        reason = "busy"
    state.fall_back(reason)
    is_offloading = getattr(model_kwargs.get(compat.CACHE), "offloading", False)  # our forwards wait for its copies
    given = with_request(scope_here(), given)
    stock = lambda: original(model, input_ids, **given, **for_stock(model_kwargs))  # noqa: E731
    with alone(draws_by_default=True):
        return by_stock(state, input_ids, stock, needs_modules=is_offloading)


class _Loop(TokensAhead):
    """One call of generate() that decodes with a plan, by greedy search or by sampling."""

    def __init__(self, state, model, input_ids, logits_processor, stopping_criteria, config, streamer):
        self.state, self.model, self.config = state, model, config
        self.processors, self.criteria = logits_processor, stopping_criteria
        super().__init__(input_ids, stopping_criteria.max_length, streamer)
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        #: the token of rows that have ended, if tokens end the text
        self.pad = compat.pad_token(config).to(self.device) if self.has_eos else None
        #: the settings of sampling, if a plan can sample so
        self.settings = compat.sampling_settings(logits_processor) if config.do_sample else None
        self.unfinished = torch.ones(self.batch, dtype=torch.long, device=self.device)
        users, self.grammars = (
            runs_users_code(logits_processor, stopping_criteria, streamer, knows_grammars=True),
            grammars_of(logits_processor),
        )
        for code in (*users, *self.grammars):
            state.stats.note(code)
        self.runs_users_code = bool(users)
        #: 0 if the host must see every token before the next one: on the CPU, and with the user's own objects
        self.ahead = MAX_AHEAD if self.device.type == "cuda" and not (users or self.grammars) else 0
        self.masks: MasksAhead | None = None  # which the host fills while a step runs
        if self.grammars and not users and fills_masks_ahead(self.device):
            self.masks = MasksAhead(logits_processor, input_ids)
            self.processors = self.masks.processors
        self.left_at: int | None = None  # length of the sequences when stock code took over
        self.may_choose = True  # a plan may choose tokens, as far as ranks are asked
        self.have_own_code = False  # ranks could come to other tokens or ends
        self.rows: compat.RowAdapters | None = None  # an adapter for each
        self.shared: SharedCall | None = None  # steps that other calls may share
        self.scope = scope_here()
        self.generator = None if self.scope is None else self.scope.generator

    @contextmanager
    def place(self) -> Iterator[bool]:
        """Take a place for a plan of the call's own, unless the call may share steps."""
        if self.shared is not None:
            yield True
            return
        with alone(), self.state.plans.place() as is_free:
            yield is_free

    def follow(self, ranks: Ranks | None, own_code: bool, may_choose: bool) -> None:
        """Take on the ranks over which the model is spread, and what :func:`.generate_calls.alike`` has found."""
        self.ranks, self.have_own_code, self.may_choose = ranks, own_code, may_choose
        if own_code:
            self.ahead = 0

    def plan_chooses(self) -> bool:
        """Whether the plan may choose tokens: there are no other processors, and nothing else ends the text."""
        config = self.config
        if not self.may_choose or self.generator is not None or (self.scope is not None and self.scope.wants_logprobs):
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
        if self.shared is not None:
            self.shared.enter(part, cache, self)
        takes_turns = self.shared is not None or self.scope is not None
        prefixes = state.prefixes
        if prefixes is None and self.shared is not None and self.scope is not None:
            prefixes = self.scope.prefixes()
        may_wait = takes_turns and prefixes is None and self.rows is None
        mine = prompt.text_that_may_wait(part, self.ids, self.config, model_kwargs, starts) if may_wait else None
        with state.sharing.prompts.prompt(mine) if takes_turns else nullcontext(ALONE) as turns:
            next_logits, prefix = None if mine is None else mine.logits, None
            if next_logits is None:
                next_logits, prefix = prompt.read_text(state.plans, *given, prefixes, turns, self.rows is not None)
            if prefix is not None and self.shared is not None:
                prefix.keep_prompt()
        if state.prefixes is None:
            prefix = None  # the text is not kept at its end
        started, first = time.perf_counter(), True
        plan: AnyPlan | None = None
        plan_chooses = self.plan_chooses()
        sampled = plan_chooses and self.config.do_sample
        with adapter_rows.looked_at(self.model):
            watch = CallWatch(self.state, part) if self.runs_users_code else None
        now: StepSource | None = part  # the model as it is now; None if stock code has to go on
        try:
            while True:
                if self.scope is not None and self.scope.is_cancelled:
                    raise Cancelled
                if next_logits is None:  # whoever runs the steps that calls share has chosen
                    if self.shared.ends_itself(self):
                        next_logits = self._take_all(plan)
                        break
                    tokens = to_tokens(plan.chosen(), self, self.device)
                    done = self._finish_step(tokens)
                elif plan is None or not plan_chooses:
                    tokens = self._choose(next_logits)
                    done = self._finish_step(tokens)
                else:
                    tokens = None
                    done = self._follow_plan(plan, cache.get_seq_length())
                if done:
                    break
                if watch is not None and watch.has_changed(self.device):
                    watch.look_again(self.ids, cache, self.rows)
                    now, self.state = watch.part, watch.state
                    if plan is not None and (now is None or plan.fingerprint != self.state.plans.fingerprint_of(now)):
                        tokens, old, plan = self._tokens_of(plan, tokens), plan, None  # an interrupt ends no plan twice
                        old.go_back()
                if now is None:
                    next_logits = self._step_by_stock(model_kwargs)
                    continue
                if self.shared is not None and self.shared.is_due(now, cache):
                    if self._look_back(wait=True):
                        break
                    tokens = self._tokens_of(plan, tokens)
                    if plan is not None:
                        old, plan = plan, None
                        old.go_back()
                    positions = next_positions + (self.length - self.prompt_len - 1)
                    plan = self.shared.join(now, cache, self, positions, starts)
                    if plan is None:  # it never can
                        self.shared = None
                    else:
                        self.ahead, sampled, plan_chooses = 0, False, False
                if plan is None:
                    plan = self._plan_for(now, cache, sampled)
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
                if self.masks is not None and next_logits is not None:
                    self.masks.fill()
                if first:  # building and capturing the plan does not count as decoding
                    started, first = time.perf_counter(), False
            dropped = self._drain()
            self._settle()
            if next_logits is not None:
                note_nonfinite(self.state, next_logits)
        except RuntimeError:
            # A CPU may have failed to draw a token from such logits. After an error a GPU cannot be asked.
            if self.device.type == "cpu":
                newest = next_logits if plan is None or plan.logits is None else plan.logits
                if newest is not None:
                    note_nonfinite(self.state, newest)
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

    def _plan_for(self, part: StepSource, cache: Any, sampled: bool) -> AnyPlan:
        """Take a plan, in which each row has its adapter if the call names some."""
        plans = self.state.plans
        if self.rows is None:
            return plans.decode_plan(part, self.batch, cache, sampled)
        with adapter_rows.looked_at(self.model):
            plan = plans.adapter_rows_plan(part, self.batch, cache, sampled, self.rows.numbers or {})
        plan.seat(self.rows.rows)
        return plan

    def _tokens_of(self, plan: AnyPlan | None, tokens: torch.Tensor | None) -> torch.Tensor:
        """Return the tokens that are read next, which a plan may have chosen."""
        if tokens is None:
            assert plan is not None, "without a plan, the host chooses"
            tokens, self.unfinished = plan.tokens[:, 0].clone(), plan.unfinished.clone()
        if self.chosen:
            self._gather()
        return tokens

    def _take_all(self, plan: Any) -> torch.Tensor:
        """Take the tokens of a call whose steps choose them and see the end; return the last logits."""
        found = plan.all_chosen() if self.streamer is None else iter(plan.chosen, None)
        for each in found:
            self.chosen.append(to_tokens(each, self, "cpu"))  # which go to the device together
            self.length += 1
            if self.streamer is not None:
                self.streamer.put(self.chosen[-1])
        return plan.logits

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
            draw = functools.partial(torch.multinomial, num_samples=1, generator=self.generator)
            tokens = self._draw(draw, probabilities).squeeze(1)
        else:
            tokens = torch.argmax(scores, dim=-1)
        if self.ranks is not None and self.have_own_code:
            tokens = self.ranks.same(tokens)
        if self.pad is not None:
            tokens = tokens * self.unfinished + self.pad * (1 - self.unfinished)
        if self.scope is not None and self.scope.wants_logprobs:
            self.scope.logprobs.append(logprobs_of(next_logits, tokens))
        return tokens

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
            if self.masks is not None:
                self.masks.take(tokens)
            return not bool(self.unfinished.any())
        self._send(tokens)
        return self._look_back() or (self.max_length is not None and self.length >= self.max_length)

    def _follow_plan(self, plan: AnyPlan, cache_length: int) -> bool:
        """Take on the tokens that the plan has chosen; return whether to stop."""
        self.length += 1
        event = self._event() if self.device.type == "cuda" else None
        tokens, unfinished = plan.choice(cache_length)
        self.pending.append(Pending(self.length, tokens, unfinished, event, chosen_by_plan=True))
        return self._look_back() or self.length >= self.max_length

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
