"""The loop that takes the place of ``GenerationMixin._assisted_decoding`` for patched models.

Drafts come from a patched assistant's own decode plan, or else from transformers' candidate generators, which also say
how long drafts are. One :class:`..plans.draft_plan.DraftPlan` step reads a draft, and rejected tokens are
cropped from the cache. Greedy search without processors takes the most likely tokens that the plan finds; in every
other case :mod:`.acceptance` chooses from logits.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import torch

from ... import compat
from ...cache.encoder_decoder import for_stock
from ...cache.fastpath_cache import FastpathCache
from ...reasons import Cause
from ..plans.draft_plan import DraftReader, StockReader
from ..sources.step_source import StepSource
from . import acceptance, prompt
from .call_scope import alone
from .counted import by_stock
from .drafts import Draft, PlanDrafts, StockDrafts
from .eligibility import step_aside_reason, why_no_drafts
from .generate_calls import (
    CallWatch,
    agreed_reason,
    alike,
    end_tokens,
    ends_by_length_or_token,
    for_patched_models,
    note_nonfinite,
    position_ids_of,
    runs_users_code,
    settling,
)
from .patched import STATE_KEY, Patched


@for_patched_models
@alone(draws_by_default=True)
def decode(
    state: Patched,
    original: Any,
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    inputs_tensor: Any = None,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Do what ``GenerationMixin._assisted_decoding`` does, with its arguments, while a patched model is alive."""
    part = state.plans.part_in_call(model, generation_config, is_last=True)
    reason = why_no_drafts(state, part, input_ids, generation_config, synced_gpus, model_kwargs)
    generator, ranks = None, state.ranks if state.loop_reason is None else None
    if reason is None and ranks is not None and runs_users_code(logits_processor, stopping_criteria, streamer):
        reason = Cause("generation_mode", "drafts and code of the user's own, for a model spread over processes")
    longest = input_ids.shape[1] if stopping_criteria.max_length is None else stopping_criteria.max_length
    if reason is None and part is not None:
        reason = part.drafts_reason(min(input_ids.shape[1], longest) - 1, longest)
    if reason is None:
        known = assistant_tokenizer is None and input_ids.shape[0] == 1
        if known and stopping_criteria.max_length is not None:
            generator = compat.candidate_generator(
                model,
                generation_config=generation_config,
                input_ids=input_ids,
                inputs_tensor=inputs_tensor,
                assistant_model=assistant_model,
                logits_processor=logits_processor,
                target_tokenizer=tokenizer,
                assistant_tokenizer=assistant_tokenizer,
                model_kwargs=model_kwargs,
            )
        if generator is None:
            reason = Cause("generation_mode", _why_not_drafts(input_ids, stopping_criteria, assistant_tokenizer))
    reason = agreed_reason(ranks, reason, part, state.plans, len(input_ids))
    if reason is None:
        assert part is not None, "without one there is a reason"
        with state.plans.place() as is_free:
            if is_free:
                objects = logits_processor, stopping_criteria, generation_config, streamer, generator
                call = _AssistedLoop(state, model, input_ids, *objects)
                with settling(model_kwargs[compat.CACHE], part), alike(ranks, call, model_kwargs, False):
                    return call.generate(part, model_kwargs, assistant_model)
        reason = "busy"
    state.fall_back(reason)
    named = dict(logits_processor=logits_processor, stopping_criteria=stopping_criteria)
    named |= dict(generation_config=generation_config, synced_gpus=synced_gpus, streamer=streamer)
    named |= dict(inputs_tensor=inputs_tensor, assistant_model=assistant_model, assistant_tokenizer=assistant_tokenizer)
    # only the way to draft is not ours: the modules' forwards read such drafts, over our cache
    is_read_by_ours = reason == "generation_mode" and part is not None and part.modules_use_cache
    named |= dict(tokenizer=tokenizer, **(model_kwargs if is_read_by_ours else for_stock(model_kwargs)))
    return by_stock(state, input_ids, lambda: original(model, input_ids, **named), needs_modules=is_read_by_ours)


def _why_not_drafts(input_ids: torch.Tensor, criteria: Any, assistant_tokenizer: Any) -> str:
    """Return why our loop cannot take the drafts."""
    if assistant_tokenizer is not None:
        return "assistant_tokenizer"
    if input_ids.shape[0] > 1:
        return f"drafts for {input_ids.shape[0]} sequences"
    return "no max_length" if criteria.max_length is None else "another way to draft"


class _AssistedLoop:
    """One call of generate() that decodes with drafts, by greedy search or by sampling."""

    def __init__(self, state, model, input_ids, processors, stopping_criteria, config, streamer, generator):
        self.state, self.model, self.config, self.generator = state, model, config, generator
        self.processors, self.criteria, self.streamer = processors, stopping_criteria, streamer
        self.plain = not config.do_sample and not len(processors)  # every token is the most likely one
        self.runs_users_code = bool(runs_users_code(processors, stopping_criteria, streamer))
        self.grammars = ()  # a grammar's processor that is asked about drafts is like the user's own
        self.device, self.prompt_len = input_ids.device, input_ids.shape[1]
        self.max_length = stopping_criteria.max_length
        self.ids = input_ids
        # The memory is pinned, so that tokens go to the device while the host goes on; no token is written twice.
        place = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        self.text = torch.zeros(1, max(self.max_length, self.prompt_len), dtype=torch.long, **place)
        self.text[:, : self.prompt_len] = input_ids
        self.length = self.prompt_len
        self.held = self.prompt_len  # tokens of the text that the cache holds when a round begins
        self.left_at: int | None = None  # length of the text when stock code took over from the plans
        self.prefix: prompt.PrefixCall | None = None
        self.told = 0  # tokens behind the prompt that the generator knows of
        self.ends = frozenset(token for ends in end_tokens(stopping_criteria) for token in ends.tolist())
        self.ends_by_itself = ends_by_length_or_token(stopping_criteria)
        # Transformers begins with a draft behind the prompt. Our loop does so only if something depends on it: the
        # order in which random numbers are drawn, what the criteria see, or when the user's code is given what.
        at_end = compat.CRITERIA_SEE_DRAFTS and int(self.text[0, self.length - 1]) in self.ends
        self.begins_with_draft = not self.plain or self.runs_users_code or not self.ends_by_itself or at_end
        wants = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        self.logits: list[torch.Tensor] | None = [] if wants else None
        self.scores = self.logits if self.plain or not wants else []

    def generate(self, part: StepSource, model_kwargs: dict, assistant: Any) -> Any:
        cache, positions = (
            model_kwargs[compat.CACHE],
            position_ids_of(self.text[:, : self.prompt_len].to(self.device), self.config, model_kwargs),
        )
        self.next_position = positions[:, -1] + 1  # behind the prompt
        cache.activate_past_recording()
        mask = model_kwargs.get("attention_mask")
        starts = None if mask is None else (mask == 0).sum(1)
        keep = self._keep if self.plain and self.logits is not None else None
        drafts, watch = self._drafts(assistant, positions, starts), None
        reader: DraftReader | StockReader | None = None
        if self.runs_users_code or (isinstance(drafts, StockDrafts) and assistant is not None):  # it may have hooks
            watch = CallWatch(self.state, part)
        now: StepSource | None = part  # None if stock code has to go on
        try:
            draft = self._propose(drafts) if self.begins_with_draft else None
            if watch is not None and watch.has_changed(self.device):
                watch.look_again(self.ids, cache)
                now, self.state = watch.part, watch.state
            first = self._read_prompt(now, model_kwargs, starts)
            reader = self._reader_of(now, model_kwargs, starts, keep)
            done = self._begin(first.to(torch.float32, copy=True), draft, reader, cache)
            started, before = time.perf_counter(), self.length
            while not done:
                if watch is not None and drafts.are_stale():
                    drafts.end()
                    drafts = self._drafts(assistant, positions, starts)
                draft = None if self._goes_unseen(reader, drafts) else self._propose(drafts)
                # The user's code takes no part between a draft and the forward that reads it: look at the model here.
                if watch is not None and watch.has_changed(self.device):
                    reader.end()
                    watch.look_again(self.ids, cache)
                    self.state = watch.state
                    reader = self._reader_of(watch.part, model_kwargs, starts, keep)
                done = self._round(reader, draft, drafts, cache)
            note_nonfinite(self.state, first if reader.logits is None else reader.logits)
        finally:
            if reader is not None:
                reader.end()
            drafts.end()
        compat.keep_draft_length(self.generator)
        if self.prefix is not None and self.left_at is None:
            self.prefix.keep(self.text[:, : self.length], watch is not None)
        return self._result(cache, started, self.length - before)

    def _read_prompt(self, part: StepSource | None, model_kwargs: dict, starts: torch.Tensor | None) -> torch.Tensor:
        """Return [1, vocab_size] logits of the token behind the prompt. If ``part`` is None, stock code has to run."""
        if part is None:
            return compat.prefill(self.model, self.ids, self.config, model_kwargs).logits[:, -1]
        state, given = self.state, (self.model, part, self.ids, self.config, model_kwargs, starts)
        logits, self.prefix = prompt.read_text(state.plans, *given, state.prefixes)
        return logits

    def _reader_of(
        self, part: StepSource | None, model_kwargs: dict, starts: torch.Tensor | None, keep: Any
    ) -> DraftReader | StockReader:
        """Make the reader of drafts behind the text for the model as it is now.

        If ``part`` is None, stock code has to read them.
        """
        cache = model_kwargs[compat.CACHE]
        position = self.next_position + (self.held - self.prompt_len)
        if part is not None:
            plan_of = functools.partial(self.state.plans.draft_plan, part, cache)
            return DraftReader(plan_of, cache, position, starts, keep)
        self.left_at = self.length

        def logits_of(tokens: Sequence[int], count: int) -> torch.Tensor:
            text = self._followed_by(tokens, self.held)
            return compat.following_logits(self.model, text, count, self.prompt_len, model_kwargs)[0]

        return StockReader(logits_of, cache, keep)

    def _followed_by(self, tokens: Sequence[int], length: int) -> torch.Tensor:
        """Return [1, length + tokens] on the device: the first ``length`` tokens of the text, then ``tokens``."""
        behind = torch.tensor([tokens], dtype=torch.long, device="cpu")
        return torch.cat((self.text[:, :length], behind), dim=1).to(self.device)

    def _begin(
        self, first: torch.Tensor, draft: Draft | None, reader: DraftReader | StockReader, cache: FastpathCache
    ) -> bool:
        """Append the token behind the prompt and what a draft behind the prompt adds; return whether to stop.

        Args:
            first: [1, vocab_size] logits of the token behind the prompt.
        """
        if not self.plain:
            assert draft is not None, "such a call begins with a draft"
            return self._choose(first, draft, reader, cache)
        if self.logits is not None:
            self._keep(first)
        found = [int(first.argmax(-1))]
        if draft is None:
            return self._take(found)
        if draft.tokens[:1] == found:
            found += reader.verify(found[0], draft.tokens[1:])
        return self._settle(found, draft.tokens, draft.ends, cache)

    def _goes_unseen(self, reader: DraftReader | StockReader, drafts: Any) -> bool:
        """Whether the host need not see a draft before it is verified."""
        unasked = self.ends_by_itself or not compat.CRITERIA_SEE_DRAFTS
        return self.plain and unasked and isinstance(drafts, PlanDrafts) and isinstance(reader, DraftReader)

    def _round(self, reader: DraftReader | StockReader, draft: Draft | None, drafts: Any, cache: FastpathCache) -> bool:
        """Verify a draft and append what it gave; return whether to stop. A draft that may go unseen is None."""
        last, text = int(self.text[0, self.length - 1]), self.text[:, : self.length]
        if draft is None and isinstance(reader, DraftReader) and (count := drafts.unseen(text)):
            return self._settle(*reader.verify_unseen(last, count, drafts), False, cache)
        if draft is None:
            draft = self._propose(drafts)
        if not self.plain:
            return self._choose(None, draft, reader, cache)
        return self._settle(reader.verify(last, draft.tokens), draft.tokens, draft.ends, cache)

    def _choose(
        self, first: torch.Tensor | None, draft: Draft, reader: DraftReader | StockReader, cache: FastpathCache
    ) -> bool:
        """Do as :meth:`_round`, choosing from logits.

        Args:
            first: [1, vocab_size] logits of the token that follows the text; if None, the text's last token has not
                been read yet.
        """
        proposed, draft_scores, dropped, ends = draft
        count = len(proposed)
        unread = proposed if first is not None else [int(self.text[0, self.length - 1]), *proposed]
        rows = [] if first is None else [first]
        if unread:
            rows.append(reader.read(unread))
        logits, text = torch.cat(rows), self._followed_by(proposed, self.length)
        scores = acceptance.processed(logits, text, count, self.processors)
        if draft_scores is not None:
            draft_scores = draft_scores[:count].to(self.device)
        sampled = self.config.do_sample
        found = acceptance.accept(scores, text[0, self.length :], draft_scores, sampled, dropped, ends)
        valid = self._up_to_end(found.tolist())
        if len(valid) <= count:
            cache.crop(len(valid) - count - 1)
        if self.logits is not None and valid:
            self.logits += logits[: len(valid)].split(1)
            self.scores += scores[: len(valid)].split(1)
        return self._follow(valid, proposed)

    def _settle(self, found: list[int], proposed: list[int], ends: bool, cache: FastpathCache) -> bool:
        """Append the tokens ``found`` behind a draft, up to an end token.

        Args:
            ends: as of :class:`Draft`.
        """
        valid = self._up_to_end(found[: len(proposed)] if ends else found)
        if len(valid) < len(found):
            cache.crop(len(valid) - len(found))
            if self.logits is not None:
                del self.logits[len(valid) - len(found) :]
        return self._follow(valid, proposed)

    def _propose(self, drafts: Any) -> Draft:
        """Make the draft behind the text."""
        with self.state.stats.uncounted():  # the model may draft for itself
            tokens, scores = drafts.propose(self.text[:, : self.length])
        ends = compat.CRITERIA_SEE_DRAFTS and self._ends_behind(tokens)
        room = self.max_length - self.length - 1
        dropped = max(0, len(tokens) - room)
        return Draft(tokens[:room], scores, dropped, ends and not dropped)

    def _ends_behind(self, tokens: list[int]) -> bool:
        """Whether the stopping criteria end the text behind a draft."""
        if self.ends_by_itself:  # a draft that reaches the greatest length has tokens dropped, which tells as much
            return (tokens[-1] if tokens else int(self.text[0, self.length - 1])) in self.ends
        return bool(self.criteria(self._followed_by(tokens, self.length), None).all())

    def _follow(self, valid: list[int], proposed: list[int]) -> bool:
        """Append the tokens that a round gave; return whether to stop."""
        done = self._take(valid)
        compat.update_drafts(self.generator, self.text[:, : self.length], len(proposed), len(valid) - 1)
        return done

    def _drafts(self, assistant: Any, positions: torch.Tensor, starts: torch.Tensor | None) -> Any:
        """Make the source of drafts that follow the text, or follow the one token more that the loop begins with."""
        if compat.looks_up_drafts(self.generator):
            return StockDrafts(self.generator, self.device)
        behind = self.length - self.prompt_len or int(not self.begins_with_draft)
        compat.lengthen_draft_inputs(self.generator, behind - self.told)  # again each time the assistant changes
        self.told = behind
        state: Patched | None = None if assistant is None else vars(assistant).get(STATE_KEY)
        # a plan of the assistant gives no scores behind processors
        if not self.plain or state is None or not state.enabled:
            return StockDrafts(self.generator, self.device)
        part, cache = state.plans.part_of(assistant), FastpathCache(assistant.config, state.options.kv_dtype)
        count = self.prompt_len + behind - 1  # the plan's first step reads the last token
        ids, positions = self.text[:, :count].to(self.device), positions[:, : self.prompt_len]
        following = torch.arange(behind, device=self.device)[1:]
        positions = torch.cat((positions, positions[:, -1:] + following), dim=1)[:, :count]
        seen = {compat.CACHE: cache, "use_cache": True, "position_ids": positions}
        reason, _ = step_aside_reason(state, part, ids, self.config, False, seen)
        padding = starts if starts is not None and starts.any() else None
        given = prompt.Prompt(ids.long(), positions.long(), padding)
        if part is None or reason is not None or not prompt.is_readable(part, cache, given):
            return StockDrafts(self.generator, self.device)
        cache.activate_past_recording()
        cache.expect(self.max_length)
        # A model that drafts for itself has one plan of each width.
        goes_on = self.device.type == "cuda" and state is not vars(self.model).get(STATE_KEY)
        return PlanDrafts(self.generator, state, part, cache, given, self.ends, self.max_length, goes_on)

    def _keep(self, rows: torch.Tensor) -> None:
        self.logits += rows.split(1)

    def _up_to_end(self, tokens: list[int]) -> list[int]:
        place = next((place for place, token in enumerate(tokens) if token in self.ends), len(tokens))
        return tokens[: place + 1]

    def _take(self, tokens: list[int]) -> bool:
        """Append tokens; return whether to stop."""
        new = torch.tensor([tokens], dtype=torch.long, device="cpu")
        self.text[:, self.length : self.length + len(tokens)] = new
        self.length += len(tokens)
        self.held = self.length - 1
        if self.streamer is not None:
            self.streamer.put(new)
        if self.ends_by_itself:
            return self.length >= self.max_length or int(self.text[0, self.length - 1]) in self.ends
        wants_scores = self.config.return_dict_in_generate and self.config.output_scores
        scores = tuple(self.scores) if wants_scores else None
        return bool(self.criteria(self.text[:, : self.length].to(self.device), scores).all())

    def _result(self, cache: FastpathCache, started: float, timed: int) -> Any:
        new_tokens = self.length - self.prompt_len
        by_stock = 0 if self.left_at is None else self.length - self.left_at
        self.state.stats.generated(by_stock, started, stock=True, timed=0)
        self.state.stats.generated(new_tokens - by_stock, started, timed=timed)
        sequences = self.text[:, : self.length].to(self.device)
        if self.ends_by_itself:
            self.criteria(sequences[:, :-1], None)  # warns of lengths that the model was not made for
        if self.streamer is not None:
            self.streamer.end()
        if not self.config.return_dict_in_generate:
            return sequences
        logits, scores = (None if rows is None else tuple(rows) for rows in (self.logits, self.scores))
        return compat.GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=scores if self.config.output_scores else None,
            logits=logits if self.config.output_logits else None,
            attentions=None,
            hidden_states=None,
            **{compat.CACHE: cache},
        )
