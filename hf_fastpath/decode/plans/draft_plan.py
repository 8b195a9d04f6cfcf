"""Plans that read several tokens of one sequence at once and give the token after each of them, to verify drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ...cache.fastpath_cache import FastpathCache
from ...ops.decode_attention import MAX_QUERY_LEN
from ..calls.named_calls import Register
from ..sources.step_source import StepSource
from .decode_plan import DecodePlan, _aten

#: tokens that a plan may read; fewer tokens take the next wider plan, because any plan reads the weights just once
WIDTHS = (1, 2, 4, 8, MAX_QUERY_LEN)


class DraftPlan(DecodePlan):
    """A plan that reads up to ``width`` new tokens of one sequence and gives the most likely token after each.

    Args:
        part: the model.
        kv_dtype: as for :class:`DecodePlan`.
        width: one of :data:`WIDTHS`.
        page_sizes: as for :class:`DecodePlan`.

    Attributes:
        best: int64 [1, width] on the device, the most likely tokens, overwritten by the next read.
        logits: [1, width, vocab_size] in the model's dtype, overwritten by the next read.
    """

    def __init__(
        self, part: StepSource, kv_dtype: torch.dtype | None, width: int, page_sizes: tuple[int | None, ...] = ()
    ):
        self.query_len = width
        kind: dict[str, Any] = {"device": "cpu", "pin_memory": part.embedding.weight.device.type == "cuda"}
        with torch.inference_mode(False):  # buffers that the program copies from and to
            self._given = torch.zeros(2, 1, width, dtype=torch.long, **kind)  # tokens, positions
            self._length = torch.zeros(1, dtype=torch.int32, **kind)
            self._choices = torch.zeros(1, width, dtype=torch.long, **kind)
        self._done = torch.cuda.Event() if kind["pin_memory"] else None
        self._ranks = part.ranks
        super().__init__(part, 1, kv_dtype, page_sizes=page_sizes)

    def _record(self, part: StepSource) -> Register:
        emit = self.program.emit
        for target, source in zip((self.tokens, self.positions, self.seq_lens), (*self._given, self._length)):
            emit(_aten.copy_.default, target, source, True)
        logits, step = self._record_forward(part)
        self.program.move_to(self.device)
        logits = self.program.keep(emit(_aten.alias.default, logits))
        self._best = self.program.keep(emit(_aten.argmax.default, logits, -1))
        emit(_aten.copy_.default, self._choices, self._best, True)
        self.program.optimize(step)
        return logits

    @property
    def best(self) -> torch.Tensor:
        return self.program.values[self._best.index]

    def read(self, tokens: Sequence[int]) -> list[int]:
        """Append tokens to the cache; the host waits for the device.

        Args:
            tokens: the 1 to ``width`` tokens that follow what the cache holds.

        Returns:
            The most likely token after each of them.
        """
        self.prepare(tokens, len(tokens))
        self.start()
        return self.finish(len(tokens))

    def prepare(self, tokens: Sequence[int], count: int) -> None:
        """Set what is to be appended: ``count`` tokens that begin with ``tokens``; :meth:`take` sets the others."""
        if self._done is not None:
            self._done.synchronize()  # the device has read what was set before
        cache, width = self.cache, self.query_len
        if cache.reserve(width):
            self.bind()
        length = cache.get_seq_length()
        self._cover(count)
        first = length + self._ahead[0] + self._shifts[0]
        # The last token at the last position fills the rest of the plan's width: the model has that position, and
        # nothing reads the result.
        given, positions = self._given.numpy()[:, 0], range(first, first + count)
        for row, values in zip(given, (tokens, positions)):
            row[: len(values)], row[len(values) :] = values, values[-1]
        self._length.fill_(length + width)

    def take(self, place: int, token: torch.Tensor) -> None:
        """Take the token at ``place``, int64 [1, 1], from the device, which may still have to write it."""
        self._given[0, :, place : place + 1].copy_(token, non_blocking=True)

    def taken(self, count: int) -> list[int]:
        """Return the tokens at places 1 to ``count``. The caller knows that the device has written them."""
        return self._given[0, 0, 1 : 1 + count].tolist()

    def start(self) -> None:
        """Begin to read without waiting for the device. The cache holds the tokens only after :meth:`finish`."""
        self._run()
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self.device))

    def finish(self, count: int) -> list[int]:
        """Wait for the ``count`` tokens that were begun with, and return what :meth:`read` returns."""
        if self._done is not None:
            self._done.synchronize() if self._ranks is None else self._ranks.wait(self._done)
        self.cache.advance(self.query_len)
        if self.query_len > count:
            self.cache.crop(count - self.query_len)
        return self._choices[0, :count].tolist()


class UnseenDrafts(Protocol):
    """Drafts that go from the assistant to the model without passing the host."""

    def draft(self, count: int, take: Callable[[int, torch.Tensor], object]) -> int:
        """Make at most ``count`` drafts, and return how many were made.

        If fewer are made, the device has passed them when this returns.

        Args:
            take: is called with the place of each draft behind the text's last token, from 1 on, and the draft.
        """

    def go_on(self, after: torch.Tensor) -> None:
        """Start work for the device to do while the host looks at which drafts were accepted.

        Args:
            after: int64 [1, 1] on the device; when that work runs, it holds the model's token after the last draft.
        """

    def settled(self, tokens: list[int]) -> list[int]:
        """Return the drafts up to an end token. The device has passed all of them."""


def moves_windows(part: StepSource, past: int) -> bool:
    """Whether reading by a plan behind ``past`` tokens may move a window on: the plan fills up its width with tokens,
    and crops the surplus."""
    return any(window is not None and past + MAX_QUERY_LEN > window for window in part.windows)


class DraftReader:
    """Plans of all widths over one cache: drafts of any length are verified without a new capture.

    Args:
        plan_of: makes or finds the plan of a width.
        cache: holds the text but its last token.
        position: int64 [1], position id of that last token.
        starts: [1], left padding, or None.
        logits: receives the float32 [tokens, vocab_size] logits that :meth:`verify` took its tokens from; or None.
    """

    def __init__(
        self,
        plan_of: Callable[[int], DraftPlan],
        cache: FastpathCache,
        position: torch.Tensor,
        starts: torch.Tensor | None,
        logits: Callable[[torch.Tensor], None] | None = None,
    ):
        self._plan_of, self._cache, self._logits = plan_of, cache, logits
        self._place = position, starts
        self._plans: dict[int, DraftPlan] = {}
        self._newest: DraftPlan | None = None
        self._ahead = int(position) - cache.get_seq_length()

    def _plan(self, count: int) -> DraftPlan:
        width = next(width for width in WIDTHS if width >= count)
        if self._cache.reserve(MAX_QUERY_LEN):
            for plan in self._plans.values():
                plan.bind()
        if width not in self._plans:
            plan = self._plans[width] = self._plan_of(width)
            _, starts = self._place
            position = torch.full_like(self._place[0], self._cache.get_seq_length() + self._ahead)
            plan.begin(self._cache, position, starts)
        self._newest = self._plans[width]
        return self._newest

    @property
    def logits(self) -> torch.Tensor | None:
        """[tokens, vocab_size] of the newest read, some rows perhaps twice; None before the first read."""
        return None if self._newest is None else self._newest.logits[0]

    def verify(self, last: int, drafts: Sequence[int]) -> list[int]:
        """Return the most likely tokens after ``last``, the text's last token: as many drafts as agree, and one more.

        The cache then holds all of the text and these tokens but the last.
        """
        tokens, found = [last, *drafts], []
        while True:
            piece, tokens = tokens[:MAX_QUERY_LEN], tokens[MAX_QUERY_LEN:]
            plan = self._plan(len(piece))
            expected = [*piece[1:], *tokens[:1]]
            taken = self._agreed(plan, plan.read(piece), expected)
            found += taken
            if not tokens or taken != expected:
                self._crop(len(piece) - len(taken))
                return found

    def verify_unseen(self, last: int, count: int, drafts: UnseenDrafts) -> tuple[list[int], list[int]]:
        """Do as :meth:`verify` for ``count`` drafts, at most MAX_QUERY_LEN - 1, that the host has not seen.

        Returns:
            The tokens, and the drafts.
        """
        plan = self._plan(1 + count)
        plan.prepare([last], 1 + count)
        made = drafts.draft(count, plan.take)
        if made < count:
            proposed = drafts.settled(plan.taken(made))
            return self.verify(last, proposed), proposed
        plan.start()
        drafts.go_on(plan.best[:, count : count + 1])
        choices = plan.finish(1 + count)
        proposed = drafts.settled(plan.taken(count))
        taken = self._agreed(plan, choices, proposed)
        self._crop(1 + count - len(taken))
        return taken, proposed

    def _agreed(self, plan: DraftPlan, choices: list[int], expected: Sequence[int]) -> list[int]:
        """Return ``choices`` up to and including the first that differs from what was ``expected``."""
        agree = 0
        while agree < len(expected) and choices[agree] == expected[agree]:
            agree += 1
        taken = choices[: agree + 1]
        if self._logits is not None:
            self._logits(plan.logits[0, : len(taken)].to(torch.float32, copy=True))
        return taken

    def _crop(self, count: int) -> None:
        if count:
            self._cache.crop(-count)

    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append tokens to the cache.

        Returns:
            float32 [tokens, vocab_size], logits of the token that follows each.
        """
        pieces = [tokens[first : first + MAX_QUERY_LEN] for first in range(0, len(tokens), MAX_QUERY_LEN)]
        return torch.cat([self.read_piece(piece).to(torch.float32, copy=True) for piece in pieces])

    def read_piece(self, tokens: Sequence[int]) -> torch.Tensor:
        """Do as :meth:`read` for at most MAX_QUERY_LEN tokens.

        The logits are in the model's dtype, and the next read overwrites them.
        """
        plan = self._plan(len(tokens))
        plan.read(tokens)
        return plan.logits[0, : len(tokens)]

    def end(self) -> None:
        """Let go of the cache."""
        while self._plans:
            self._plans.popitem()[1].end()


class StockReader:
    """A reader that verifies drafts as :class:`DraftReader` does, with the model's own forward.

    Args:
        logits_of: called with the tokens behind what the cache held when the round began, and a count; appends the last
            ``count`` of them and gives [count, vocab_size] logits of what follows each.
        cache: holds the text but its last token.
        logits: as of :class:`DraftReader`.
    """

    def __init__(
        self,
        logits_of: Callable[[Sequence[int], int], torch.Tensor],
        cache: FastpathCache,
        logits: Callable[[torch.Tensor], None] | None = None,
    ):
        self._logits_of, self._cache, self._logits = logits_of, cache, logits
        self.logits: torch.Tensor | None = None  # as of DraftReader

    def verify(self, last: int, drafts: Sequence[int]) -> list[int]:
        """Do as :meth:`DraftReader.verify`."""
        tokens = [last, *drafts]
        rows = self.read(tokens)
        choices, agree = rows.argmax(-1).tolist(), 0
        while agree + 1 < len(tokens) and choices[agree] == tokens[agree + 1]:
            agree += 1
        if agree + 1 < len(tokens):
            self._cache.crop(agree + 1 - len(tokens))
        if self._logits is not None:
            self._logits(rows[: agree + 1])
        return choices[: agree + 1]

    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        """Do as :meth:`DraftReader.read`."""
        ends = [*range(MAX_QUERY_LEN, len(tokens), MAX_QUERY_LEN), len(tokens)]
        rows = [self._logits_of(tokens[:end], (end - 1) % MAX_QUERY_LEN + 1) for end in ends]
        self.logits = rows[-1]
        return torch.cat([row.to(torch.float32, copy=True) for row in rows])

    def end(self) -> None:
        """Do nothing: there is nothing to let go of."""
