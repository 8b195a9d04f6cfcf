"""The loop that takes the place of ``GenerationMixin._assisted_decoding`` for greedy search on patched models.

Drafts come from a patched assistant's own decode plan, or else from transformers' candidate generators, which also say
how long they are. One :class:`~hf_fastpath.decode.draft_plan.DraftPlan` step reads a draft, and the cache is cropped.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import torch

from .. import compat
from ..cache import FastpathCache
from ..forwards import STATE_KEY
from . import prompt
from .calls import end_tokens, ends_by_length_or_token, for_patched_models, settling, step_aside_reason
from .draft_plan import DraftReader
from .plan import RECORD_SLOTS
from .structure import fingerprint

if TYPE_CHECKING:
    from ..patch_state import PatchState
    from .plan import DecodePlan
    from .structure import ModelPart


@for_patched_models
def decode(
    state: PatchState,
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
    """What ``GenerationMixin._assisted_decoding`` does while a patched model is alive, with its arguments."""
    part = state.part_of(model)
    reason = step_aside_reason(state, part, input_ids, generation_config, synced_gpus, model_kwargs)
    generator = None
    if reason is None:
        others = assistant_tokenizer is not None or len(logits_processor) > 0 or input_ids.shape[0] != 1
        if not (others or generation_config.do_sample) and ends_by_length_or_token(stopping_criteria):
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
            reason = "generation_mode"
        elif compat.is_held_here(state.lock):
            reason = "reentrant"
    if reason is None:
        with state.lock:
            call = _Call(state, model, input_ids, stopping_criteria, generation_config, streamer, generator)
            with settling(model_kwargs["past_key_values"], part):
                return call.generate(part, model_kwargs, assistant_model)
    state.fall_back(reason)
    return original(
        *(model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer),
        **dict(inputs_tensor=inputs_tensor, assistant_model=assistant_model, assistant_tokenizer=assistant_tokenizer),
        **dict(tokenizer=tokenizer, **model_kwargs),
    )


class _StockDrafts:
    """Drafts of transformers' own candidate generator.

    Args:
        generator: of a prompt lookup, or of an assistant that is not patched.
        device: where it takes the text: a lookup is the host's.
    """

    def __init__(self, generator: Any, device: torch.device):
        self.lock = contextlib.nullcontext()
        self._generator = generator
        self._device = torch.device("cpu") if compat.looks_up_drafts(generator) else device

    def propose(self, text: torch.Tensor) -> list[int]:
        """Tokens that may follow ``text``, int64 [1, length] on the host."""
        found, _ = self._generator.get_candidates(text.to(self._device))
        return found[0, text.shape[1] :].tolist()

    def end(self) -> None:
        """Nothing to let go of."""


class _PlanDrafts:
    """Drafts of a patched assistant, token by token of its decode plan.

    Args:
        generator: transformers' own for this assistant: length of drafts, and the confidence that ends them.
        state, part: of the assistant.
        cache: of the assistant, empty.
        given: the prompt.
        ends: end tokens, which end a draft.
        limit: tokens of the whole text.
    """

    def __init__(
        self,
        generator: Any,
        state: PatchState,
        part: ModelPart,
        cache: FastpathCache,
        given: prompt.Prompt,
        ends: frozenset[int],
        limit: int,
    ):
        self.lock = state.lock
        self._generator, self._state, self._part, self._cache = generator, state, part, cache
        self._given, self._ends, self._limit = given, ends, limit
        self._plan: DecodePlan | None = None

    def propose(self, text: torch.Tensor) -> list[int]:
        """As of :class:`_StockDrafts`."""
        most = min(int(self._generator.num_assistant_tokens), self._limit - text.shape[1] - 1)
        if most <= 0:
            return []
        plan, cache = self._follow(text), self._cache
        threshold = self._generator.assistant_generation_config.assistant_confidence_threshold
        drafts: list[int] = []
        lengths: list[int] = []  # of the cache, after steps whose choices are on the device
        while True:
            lengths.append(cache.get_seq_length())
            is_last = len(drafts) + len(lengths) == most
            if threshold:
                confidence = torch.softmax(plan.logits.float(), dim=-1).amax().item()
                compat.note_confidence(self._generator, confidence)
                is_last |= confidence < threshold
            if is_last or threshold or len(lengths) == RECORD_SLOTS // 2:
                if plan.device.type == "cuda":
                    torch.cuda.current_stream(plan.device).synchronize()
                drafts += [int(plan.choice(length)[0][0]) for length in lengths]
                lengths = []
                ended = next((place for place, token in enumerate(drafts, 1) if token in self._ends), None)
                if is_last or ended:
                    return drafts[:ended]
            plan.step()

    def _follow(self, text: torch.Tensor) -> DecodePlan:
        """The plan behind a step of the text's last token."""
        cache, length = self._cache, text.shape[1]
        if self._plan is None:
            with compat.below_autograd():
                prompt.read(self._part, cache, self._given)
            self._plan = self._state.plan(self._part, 1, cache)
            self._plan.begin(cache, self._given.positions[:, -1] + 1, self._given.starts)
        elif (surplus := cache.get_seq_length() - (length - 1)) > 0:
            cache.crop(-surplus)
        self._plan.rewind()
        for place in range(cache.get_seq_length(), length):
            self._plan.step(text[:, place].to(self._plan.device))
        return self._plan

    def end(self) -> None:
        """Let go of the cache."""
        if self._plan is not None:
            self._plan.end()


class _Call:
    """One call of generate(): greedy search by drafts."""

    def __init__(self, state, model, input_ids, stopping_criteria, config, streamer, generator):
        self.state, self.model, self.config, self.generator = state, model, config, generator
        self.criteria, self.streamer = stopping_criteria, streamer
        self.device, self.prompt_len = input_ids.device, input_ids.shape[1]
        self.max_length = stopping_criteria.max_length
        self.ids = input_ids
        self.text = torch.zeros(1, max(self.max_length, self.prompt_len), dtype=torch.long, device="cpu")
        self.text[:, : self.prompt_len] = input_ids
        self.length = self.prompt_len
        self.ends = frozenset(token for ends in end_tokens(stopping_criteria) for token in ends.tolist())
        wants = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        self.logits: list[torch.Tensor] | None = [] if wants else None

    def generate(self, part: ModelPart, model_kwargs: dict, assistant: Any) -> Any:
        cache, positions = model_kwargs["past_key_values"], model_kwargs["position_ids"]
        cache.activate_past_recording()
        mask = model_kwargs.get("attention_mask")
        starts = None if mask is None else (mask == 0).sum(1)
        first = prompt.read_text(self.model, part, self.ids, self.config, model_kwargs, starts)
        if self.logits is not None:
            self._keep(first.to(torch.float32, copy=True))
        done = self._take([int(first.argmax(-1))])
        started = time.perf_counter()
        if done:
            return self._result(cache, started)
        current = fingerprint(part)
        reader = DraftReader(
            lambda width: self.state.draft_plan(part, cache, width, current),
            *(cache, positions[:, -1] + 1, starts, None if self.logits is None else self._keep),
        )
        drafts = self._drafts(assistant, positions, starts)
        with drafts.lock:
            try:
                while not done:
                    done = self._round(reader, drafts, cache)
            finally:
                reader.end()
                drafts.end()
        compat.keep_draft_length(self.generator)
        return self._result(cache, started)

    def _round(self, reader: DraftReader, drafts: Any, cache: FastpathCache) -> bool:
        """A draft, and what the model says to it; says whether to stop."""
        text = self.text[:, : self.length]
        proposed = drafts.propose(text)[: self.max_length - self.length - 1]
        found = reader.verify(int(text[0, -1]), proposed)
        valid = self._up_to_end(found)
        if len(valid) < len(found):
            cache.crop(len(valid) - len(found))
        done = self._take(valid)
        compat.update_drafts(self.generator, self.text[:, : self.length], len(proposed), len(valid) - 1)
        return done

    def _drafts(self, assistant: Any, positions: torch.Tensor, starts: torch.Tensor | None) -> Any:
        """Where drafts come from."""
        state: PatchState | None = None if assistant is None else vars(assistant).get(STATE_KEY)
        if state is None or not state.enabled or compat.looks_up_drafts(self.generator):
            return _StockDrafts(self.generator, self.device)
        part, cache = state.part_of(assistant), FastpathCache(assistant.config, state.options.kv_dtype)
        seen = {"past_key_values": cache, "use_cache": True, "position_ids": positions[:, : self.prompt_len]}
        reason = step_aside_reason(state, part, self.ids, self.config, False, seen)
        padding = starts if starts is not None and starts.any() else None
        given = prompt.Prompt(self.ids, positions[:, : self.prompt_len], padding)
        held = state is not self.state and compat.is_held_here(state.lock)
        if reason is not None or held or not prompt.is_readable(part, cache, given):
            return _StockDrafts(self.generator, self.device)
        cache.activate_past_recording()
        cache.expect(self.max_length)
        return _PlanDrafts(self.generator, state, part, cache, given, self.ends, self.max_length)

    def _keep(self, rows: torch.Tensor) -> None:
        self.logits += rows.split(1)

    def _up_to_end(self, tokens: list[int]) -> list[int]:
        place = next((place for place, token in enumerate(tokens) if token in self.ends), len(tokens))
        return tokens[: place + 1]

    def _take(self, tokens: list[int]) -> bool:
        """Append tokens; say whether to stop."""
        new = torch.tensor([tokens], device="cpu")
        self.text[:, self.length : self.length + len(tokens)] = new
        self.length += len(tokens)
        if self.streamer is not None:
            self.streamer.put(new)
        return tokens[-1] in self.ends or self.length >= self.max_length

    def _result(self, cache: FastpathCache, started: float) -> Any:
        new_tokens = self.length - self.prompt_len
        self.state.stats.generated(new_tokens, started, timed=new_tokens - 1)
        sequences = self.text[:, : self.length].to(self.device)
        self.criteria(sequences[:, :-1], None)  # warns of lengths the model was not made for
        if self.streamer is not None:
            self.streamer.end()
        if not self.config.return_dict_in_generate:
            return sequences
        rows = tuple(self.logits[:new_tokens]) if self.logits is not None else None
        return compat.GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=rows if self.config.output_scores else None,
            logits=rows if self.config.output_logits else None,
            attentions=None,
            hidden_states=None,
            past_key_values=cache,
        )
