"""Plans that read several tokens of one sequence at once and say what follows each of them: drafts are verified so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..cache import FastpathCache
from ..ops.decode_attention import MAX_QUERY_LEN
from .plan import DecodePlan, Register, _aten
from .structure import ModelPart

#: tokens of the plans there are: fewer take the next larger one, which reads the weights once all the same
WIDTHS = (1, 2, 4, 8, MAX_QUERY_LEN)


class DraftPlan(DecodePlan):
    """Up to ``width`` new tokens of one sequence, and the most likely token after each.

    Args:
        part: the model.
        kv_dtype: storage type of the caches it will serve.
        width: one of :data:`WIDTHS`.
        page_sizes: as :class:`DecodePlan`'s.

    Attributes:
        logits: [1, width, vocab_size] in the model's dtype, overwritten by the next read.
    """

    def __init__(self, part: ModelPart, kv_dtype: torch.dtype, width: int, page_sizes: tuple[int | None, ...] = ()):
        self.query_len = width
        kind = {"device": "cpu", "pin_memory": part.embedding.weight.device.type == "cuda"}
        with torch.inference_mode(False):  # what the program copies in and out
            self._given = torch.zeros(2, 1, width, dtype=torch.long, **kind)  # tokens, positions
            self._length = torch.zeros(1, dtype=torch.int32, **kind)
            self._choices = torch.zeros(1, width, dtype=torch.long, **kind)
        super().__init__(part, 1, kv_dtype, page_sizes=page_sizes)

    def _record(self, part: ModelPart) -> Register:
        emit = self.program.emit
        for target, source in zip((self.tokens, self.positions, self.seq_lens), (*self._given, self._length)):
            emit(_aten.copy_.default, target, source, True)
        logits, overlap = self._record_forward(part)
        emit(_aten.copy_.default, self._choices, emit(_aten.argmax.default, logits, -1), True)
        if overlap:
            self.program.announce_weights()
        return logits

    def read(self, tokens: Sequence[int]) -> list[int]:
        """Append tokens to the cache; waits for the device.

        Args:
            tokens: 1 to ``width`` that follow what the cache holds.

        Returns:
            The most likely token after each of them.
        """
        cache, count, width = self.cache, len(tokens), self.query_len
        if cache.reserve(width):
            self.bind()
        length = cache.get_seq_length()
        first = length + self._ahead - 1
        self._reserve_angles(first + count)
        # The plan is filled up with the last token at its position, which the model has; nothing reads what it gives.
        given, positions = self._given.numpy()[:, 0], range(first, first + count)
        for row, values in zip(given, (tokens, positions)):
            row[:count], row[count:] = values, values[-1]
        self._length.fill_(length + width)
        self._run()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        cache.advance(width)
        if width > count:
            cache.crop(count - width)
        return self._choices[0, :count].tolist()


class DraftReader:
    """Plans of all widths over one cache: drafts of any length are verified without a new capture.

    Args:
        plan_of: makes or finds the plan of a width.
        cache: holds the text but its last token.
        position: int64 [1], position id of that token.
        starts: [1], left padding, or None.
        logits: receives float32 [tokens, vocab_size], those that :meth:`verify` took its tokens from; or None.
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
        return self._plans[width]

    def verify(self, last: int, drafts: Sequence[int]) -> list[int]:
        """The most likely tokens after ``last``, the text's last token: those of ``drafts`` up to the first that is not
        one of them, and one more. The cache then holds all but the last of them."""
        tokens, found = [last, *drafts], []
        while True:
            piece, tokens = tokens[:MAX_QUERY_LEN], tokens[MAX_QUERY_LEN:]
            plan = self._plan(len(piece))
            choices = plan.read(piece)
            expected = [*piece[1:], *tokens[:1]]
            agree = 0
            while agree < len(expected) and choices[agree] == expected[agree]:
                agree += 1
            taken = choices[: agree + 1]
            found += taken
            if self._logits is not None:
                self._logits(plan.logits[0, : len(taken)].to(torch.float32, copy=True))
            if agree < len(piece):
                if len(taken) < len(piece):
                    self._cache.crop(len(taken) - len(piece))
                return found

    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append tokens to the cache.

        Returns:
            float32 [tokens, vocab_size], logits of what follows each.
        """
        pieces = [tokens[first : first + MAX_QUERY_LEN] for first in range(0, len(tokens), MAX_QUERY_LEN)]
        return torch.cat([self.read_piece(piece).to(torch.float32, copy=True) for piece in pieces])

    def read_piece(self, tokens: Sequence[int]) -> torch.Tensor:
        """As :meth:`read`, at most MAX_QUERY_LEN tokens; in the model's dtype, overwritten by the next read."""
        plan = self._plan(len(tokens))
        plan.read(tokens)
        return plan.logits[0, : len(tokens)]

    def end(self) -> None:
        """Let go of the cache."""
        for plan in self._plans.values():
            plan.end()
