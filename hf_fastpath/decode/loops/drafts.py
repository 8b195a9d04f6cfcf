"""Where drafts come from: a patched assistant's own decode plan, or else transformers' candidate generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ... import compat
from ...cache.fastpath_cache import FastpathCache
from ...ops.decode_attention import MAX_QUERY_LEN
from ..plans.draft_plan import DraftPlan
from ..plans.plan_by_length import AnyPlan
from ..sources.step_source import StepSource
from . import prompt
from .generate_calls import CallWatch
from .patched import Patched


class Draft(NamedTuple):
    """The draft of one round.

    Attributes:
        tokens: the drafted tokens that leave room for one token more.
        scores: [tokens, vocab_size] that the tokens were chosen from, or None if there are none.
        dropped: number of drafted tokens that had no room.
        ends: the stopping criteria end the text behind the draft, and nothing follows if all of it is accepted.
    """

    tokens: list[int]
    scores: torch.Tensor | None
    dropped: int
    ends: bool


class StockDrafts:
    """Drafts of transformers' own candidate generator.

    Args:
        generator: the candidate generator of a prompt lookup, or of an assistant that is not patched.
        device: where the generator takes the text; a prompt lookup without processors takes it on the host.
    """

    def __init__(self, generator: Any, device: torch.device):
        self._generator = generator
        on_host = compat.looks_up_drafts(generator) and not generator.logits_processor
        self._device = torch.device("cpu") if on_host else device

    def propose(self, text: torch.Tensor) -> tuple[list[int], torch.Tensor | None]:
        """Propose tokens to follow the text.

        Args:
            text: int64 [1, length] on the host.

        Returns:
            The tokens, and the scores [tokens, vocab_size] that they were chosen from, or None if there are none.
        """
        found, scores = self._generator.get_candidates(text.to(self._device))
        return found[0, text.shape[1] :].tolist(), None if scores is None else scores[0]

    def are_stale(self) -> bool:
        """Whether the source of drafts has changed. An assistant that generates looks at itself, so this is False."""
        return False

    def end(self) -> None:
        """Do nothing: there is nothing to let go of."""


def _on_its_way(value: torch.Tensor) -> Callable[[], float]:
    """Start copying one number to the host.

    Returns:
        A function that waits for the copy, and for nothing that is begun later.
    """
    if value.device.type == "cpu":
        return value.item
    place = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
    place.copy_(value, non_blocking=True)
    passed = torch.cuda.Event()
    passed.record(torch.cuda.current_stream(value.device))

    def wait() -> float:
        passed.synchronize()
        return place.item()

    return wait


class PlanDrafts:
    """Drafts that the decode plan of a patched assistant makes token by token.

    Args:
        generator: transformers' own for this assistant; it says how long drafts are, and which confidence ends them.
        state, part: of the assistant.
        cache: of the assistant, empty.
        given: the prompt.
        ends: end tokens, which end a draft.
        limit: tokens of the whole text.
        goes_on: whether the device reads the likely next tokens while the host looks at which drafts were accepted.
    """

    def __init__(
        self,
        generator: Any,
        state: Patched,
        part: StepSource,
        cache: FastpathCache,
        given: prompt.Prompt,
        ends: frozenset[int],
        limit: int,
        goes_on: bool,
    ):
        self._generator, self._state, self._part, self._cache = generator, state, part, cache
        self._watch = CallWatch(state, part)
        self._given, self._ends, self._limit = given, ends, limit
        self._goes_on, self._prompt_len = goes_on, given.tokens.shape[1]
        self._plan: AnyPlan | None = None
        self._pair: DraftPlan | None = None  # if drafts go on: reads a draft's last token and the model's next token
        self._pair_place = 0  # address of the cache's first buffer when the pair was bound
        self._is_ahead = False  # the pair has read, and the plan has read what follows
        self._end: torch.Tensor | None = None  # the draft's last token
        self._read = 0  # tokens of the text and the draft in front of the draft's last token
        self._confidences: list[Callable[[], float]] = []  # of drafts that the host has not waited for

    @property
    def _threshold(self) -> float | None:
        return self._generator.assistant_generation_config.assistant_confidence_threshold

    def _most(self, text: torch.Tensor) -> int:
        return max(0, min(int(self._generator.num_assistant_tokens), self._limit - text.shape[1] - 1))

    def unseen(self, text: torch.Tensor) -> int:
        """Begin a draft behind ``text`` that one step can verify before the host sees it.

        Returns:
            How many tokens the draft has at most; 0 if there can be no such draft.
        """
        most = self._most(text)
        if not 0 < most < MAX_QUERY_LEN:
            return 0
        self._follow(text)
        return most

    def draft(self, count: int, take: Callable[[int, torch.Tensor], object]) -> int:
        """Do as :meth:`UnseenDrafts.draft`, behind the text that was followed."""
        plan, self._confidences = self._plan, []
        assert plan is not None
        on_device, is_ahead, self._is_ahead = plan.device.type == "cuda", self._is_ahead, False
        self._read = self._cache.get_seq_length() - is_ahead + count - 1
        for place in range(1, count + 1):
            pair = self._pair if is_ahead and place == 1 else None  # which the draft follows
            self._end = plan.tokens if pair is None else pair.best[:, 1:]
            take(place, self._end)
            if self._threshold:
                self._confidences.append(self._confidence(plan.logits if pair is None else pair.logits[:, 1]))
            if place == count:
                break
            if on_device and pair is None:  # the device goes on while the host waits for the confidence
                plan.step()
            if self._threshold and self._note_confidence() < self._threshold:
                return place
            if not on_device:
                if int(plan.tokens) in self._ends:
                    return place
                plan.step()
        return count

    def go_on(self, after: torch.Tensor) -> None:
        """Do as :meth:`UnseenDrafts.go_on`: a step reads the last draft and the next token, another what follows."""
        plan, cache, end = self._plan, self._cache, self._end
        if not self._goes_on or self._read + 3 > self._limit:
            return
        assert plan is not None and end is not None
        if (surplus := cache.get_seq_length() - self._read) > 0:  # read before, when the model had accepted all drafts
            cache.crop(-surplus)
        if cache.reserve(3):
            plan.bind()
        pair, place = self._pair, cache.layers[0].k_buffer.data_ptr()
        if pair is None:
            pair = self._pair = self._state.plans.draft_plan(self._part, cache, 2)
            pair.begin(cache, self._given.positions[:, -1] + (1 + self._read - self._prompt_len), self._given.starts)
        elif place != self._pair_place:
            pair.bind()
        self._pair_place = place
        pair.prepare([0], 2)
        pair.take(0, end)
        pair.take(1, after)
        pair.start()
        cache.advance(2)
        plan.rewind()
        plan.step(pair.best[:, 1])
        self._is_ahead = True

    def settled(self, tokens: list[int]) -> list[int]:
        """Do as :meth:`UnseenDrafts.settled`."""
        while self._confidences:
            self._note_confidence()
        ended = next((place for place, token in enumerate(tokens, 1) if token in self._ends), None)
        return tokens[:ended]

    def _confidence(self, logits: torch.Tensor) -> Callable[[], float]:
        """Start to compute the probability of the most likely token."""
        return _on_its_way(torch.softmax(logits.float(), dim=-1).amax())

    def _note_confidence(self) -> float:
        """Wait for the oldest confidence that the host has not waited for, and note it."""
        likely = self._confidences.pop(0)()
        compat.note_confidence(self._generator, likely)
        return likely

    def propose(self, text: torch.Tensor) -> tuple[list[int], None]:
        """Do as :meth:`StockDrafts.propose`."""
        most = self._most(text)
        if not most:
            return [], None
        plan = self._follow(text)
        on_device = plan.device.type == "cuda"
        found = torch.empty(most, 1, 1, dtype=torch.long, device="cpu", pin_memory=on_device)
        made = self.draft(most, lambda place, token: found[place - 1].copy_(token, non_blocking=True))
        if on_device and not self._threshold:
            torch.cuda.current_stream(plan.device).synchronize()
        return self.settled(found[:made].flatten().tolist()), None

    def _follow(self, text: torch.Tensor) -> AnyPlan:
        """Return the plan after it has read the text's last token, and if it is ahead the token after that."""
        cache, length, plan = self._cache, text.shape[1], self._plan
        self._is_ahead = self._is_ahead and cache.get_seq_length() == length + 1  # else the model rejected the draft
        if plan is None:
            with compat.below_autograd():
                prompt.read(self._part, cache, self._given, self._state.plans.prompt_programs_of(self._part))
            plan = self._plan = self._state.plans.decode_plan(self._part, 1, cache)
            plan.begin(cache, self._given.positions[:, -1] + 1, self._given.starts)
        elif self._is_ahead:
            return plan
        elif (surplus := cache.get_seq_length() - (length - 1)) > 0:
            cache.crop(-surplus)
            plan.rewind()
        for place in range(cache.get_seq_length(), length):
            plan.step(text[:, place].to(plan.device, non_blocking=True))
        return plan

    def are_stale(self) -> bool:
        """Do as :meth:`StockDrafts.are_stale`."""
        return self._watch.has_changed(self._given.tokens.device)

    def end(self) -> None:
        """Let go of the cache."""
        plans, self._plan, self._pair = (self._plan, self._pair), None, None
        for plan in plans:
            if plan is not None:
                plan.end()
