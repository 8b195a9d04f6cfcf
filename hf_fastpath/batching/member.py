"""A call of ``generate()`` whose rows are slots: it stands where the call's decode plan would stand."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..cache.fastpath_cache import FastpathCache
from ..decode.loops.shared_calls import logprobs_of
from ..decode.sources.step_source import StepSource
from .choosing import Chooser

#: share of a new measurement in what is known of a member's callbacks
_NEWEST = 0.5


@dataclass(frozen=True)
class Chosen:
    """What a step has chosen for a member.

    Attributes:
        tokens: of each row.
        logprobs: float32 [rows] of these tokens, where they are asked for.
    """

    tokens: list[int]
    logprobs: torch.Tensor | None


@dataclass(eq=False)
class Member:
    """A call that shares steps.

    Attributes:
        sharing: where steps are shared (:class:`.sharing.Sharing`).
        part: the model.
        fingerprint: of the model, as a decode plan has it.
        cache: the call's own, which is empty while the member has slots.
        length: tokens of the call's rows, with padding and the newest ones.
        positions, starts: of each row, the next token's position id, and left padding.
        unfinished: of each row, whether it goes on.
        chooser: None if the call's thread chooses.
        most_ahead: tokens that the leader may choose before the thread has taken them; None for any number.
        scope: of the thread (``decode.loops.call_scope.CallScope``), or None.
        due: of each row, the token that the next step reads; None if the member waits for its thread, or has ended.
        rows: the slots, none while the member waits for them.
        logits: [rows, vocab_size] of the newest step, in memory of the member's own.
        has_ended: all rows have ended; the chooser sees that.
        error: what has ended the member, or None.
        is_waiting: its thread waits for the leader.
        is_out: it has given up its slots, and reads its text again before it goes on.
        floor: tokens of a row for which there has to be room: those that it has, or all that it may get if it cannot
            give up its slots.
        read_again: reads texts again, int64 [rows, seq_len] on the CPU, into the cache, which is empty; or None.
        text: int64 [rows, length - 1] on the CPU, what the rows held when the call joined; None if it is not known.
        ticket: of the call, see ``room.Ticket``; or None.
        think_s: seconds that the thread usually takes to give a token.
    """

    sharing: Any
    part: StepSource
    fingerprint: tuple
    cache: FastpathCache
    length: int
    positions: list[int]
    starts: list[int]
    unfinished: list[bool]
    chooser: Chooser | None
    most_ahead: int | None
    scope: Any
    due: list[int] | None = None
    rows: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None
    has_ended: bool = False
    error: BaseException | None = None
    is_waiting: bool = False
    has_left: bool = False
    think_s: float = 0.0
    is_out: bool = False
    read_again: Callable[[torch.Tensor], None] | None = None
    text: torch.Tensor | None = None
    ticket: Any = None

    def __post_init__(self) -> None:
        self.age = 0 if self.ticket is None else self.ticket.age
        self._read: list[list[int]] = []  # of each step, the tokens that the rows have read
        self.ready = threading.Condition(self.sharing.lock)
        self._chosen: deque[Chosen] = deque()
        self._has_begun = False  # the leader has the first tokens
        self._since = time.perf_counter()

    @property
    def max_length(self) -> int | None:
        """Tokens that a row will have at most, as far as that is known."""
        return None if self.chooser is None else self.chooser.max_length

    @property
    def floor(self) -> int:
        return self.length if self.read_again is not None else max(self.length, self.max_length or 0)

    def can_read_again(self) -> bool:
        """Whether the member can give up its slots, and go on later."""
        if self.has_ended:
            return self.cache.is_dropped
        shape = len(self.starts), self.length - 1
        device, is_padded = self.part.embedding.weight.device, any(self.starts)
        return self.read_again is not None and self.part.prompts.form(device, shape, 0, is_padded) is not None

    def held_text(self) -> torch.Tensor:
        """Return int64 [rows, length - 1] on the CPU, what the slots hold of a member that can read it again."""
        assert self.text is not None, "it has read it"
        return torch.cat((self.text, torch.tensor(self._read, device="cpu").view(-1, len(self.starts)).T), dim=1)

    @property
    def ahead(self) -> int:
        """Tokens that the leader has chosen and the thread has not taken."""
        return len(self._chosen)

    @property
    def is_due(self) -> bool:
        """Whether the next step reads a token of each row."""
        may_go_on = self.most_ahead is None or self.ahead < self.most_ahead
        return self.due is not None and may_go_on and not self.is_cancelled

    @property
    def goes_on(self) -> bool:
        """Whether the step behind the next one reads what that chooses, if no token ends the rows; and nobody asks for
        logits."""
        if not self.is_due or self.chooser is None or self.chooser.settings is not None:
            return False
        if not all(self.unfinished):  # rows that have ended read what the host fills them up with
            return False
        if self.scope is not None and self.scope.wants_logprobs:
            return False
        is_last = self.max_length is not None and self.length + 1 >= self.max_length
        return not is_last and (self.most_ahead is None or self.ahead + 1 < self.most_ahead)

    @property
    def is_cancelled(self) -> bool:
        return self.scope is not None and self.scope.is_cancelled

    # ---- for the call's thread --------------------------------------------------------------------------------

    def step(self, tokens: torch.Tensor | None) -> torch.Tensor | None:
        """Read one token of each row.

        Args:
            tokens: int64 [rows]; where the leader chooses, only the first ones matter, as it goes on by itself.

        Returns:
            [rows, vocab_size] logits of the next token; None if the leader chooses, see :meth:`chosen`.

        Raises:
            what a step raises; ``Cancelled`` if the request of the call is cancelled.
        """
        if self.chooser is not None:
            if tokens is not None and not self._has_begun:
                self._has_begun = True
                self.sharing.give(self, tokens.tolist())
            return None
        assert tokens is not None, "the thread chooses"
        self.think_s += _NEWEST * (time.perf_counter() - self._since - self.think_s)
        self.sharing.give(self, tokens.tolist())
        self.sharing.wait(self, lambda: self.due is None)
        self._since = time.perf_counter()
        return self.logits

    def chosen(self) -> Chosen | None:
        """Return what the leader has chosen next; None once all rows have ended."""
        if not self._chosen:
            self.sharing.wait(self, lambda: bool(self._chosen) or self.has_ended)
        found = self._chosen.popleft() if self._chosen else None
        if self.most_ahead is not None:
            self.sharing.note_change()
        return found

    def all_chosen(self) -> Iterator[Chosen]:
        """Wait for the end; yield all that the leader has chosen."""
        self.sharing.wait(self, lambda: self.has_ended)
        while self._chosen:
            yield self._chosen.popleft()

    def follow_edits(self) -> None:
        """Before a step: take on weights that a callback of ``generate()`` has changed."""
        self.sharing.has_new_weights = True

    def has_positions(self) -> bool:
        """Whether the model knows the positions of the next step: a step raises an error if it does not."""
        return True

    def end(self) -> None:
        """Leave, at the end of the call; a cache that somebody reads gets the keys and values back."""
        self.sharing.leave(self, not self.cache.is_dropped)

    def go_back(self) -> None:
        """Leave, with keys and values for the call, which goes on alone."""
        self.sharing.leave(self, True)

    # ---- for the leader ---------------------------------------------------------------------------------------

    def take_logits(self, logits: torch.Tensor) -> None:
        """Take the logits of a step, [rows, vocab_size], valid until the next one: the member's thread chooses."""
        self._go_on(self.due)
        self.logits, self.due = logits.clone(), None

    def take_tokens(self, logits: torch.Tensor, tokens: list[int]) -> None:
        """Take what the leader has chosen, while others may look at the member.

        Args:
            logits: [rows, vocab_size] of which the tokens are chosen, valid until the next step.
            tokens: of each row.
        """
        assert self.chooser is not None, "the leader chooses"
        pad, ends = self.chooser.pad, self.chooser.end_tokens
        if ends:
            tokens = [token if goes_on else pad for token, goes_on in zip(tokens, self.unfinished)]
            self.unfinished = [on and token not in ends for token, on in zip(tokens, self.unfinished)]
        wants_logprobs = self.scope is not None and self.scope.wants_logprobs
        logprobs = logprobs_of(logits, torch.tensor(tokens, device=logits.device)) if wants_logprobs else None
        self._go_on(self.due)
        is_longest = self.max_length is not None and self.length >= self.max_length
        if is_longest or not any(self.unfinished):
            self.logits, self.due = logits.clone(), None
        else:
            self.due = tokens
        self._chosen.append(Chosen(tokens, logprobs))
        self.has_ended = self.due is None

    def _go_on(self, tokens: list[int] | None) -> None:
        if self.read_again is not None and tokens is not None:
            self._read.append(tokens)
        self.length += 1
        self.positions = [position + 1 for position in self.positions]
