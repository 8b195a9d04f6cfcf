"""The step of rows that know nothing of each other: each has a length of its own, and texts come and go."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...cache.fastpath_cache import FastpathCache
from ..run.to_host import OnItsWay
from .decode_plan import DecodePlan

#: numbers of slots: a plan is made for each that is needed, and its graph captured
SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
#: tokens after which a row without a text begins anew: until then the device counts on, and the host writes nothing
_IDLE_TOKENS = 64


class RowsPlan(DecodePlan):
    """A decode plan whose rows are slots for texts. Positions, lengths and left padding of a step are those of its row.

    A step computes every row. A row without a text, and a row that waits, have their key and value written into the
    slot behind what they hold, which the next token of the row overwrites. So does a step that a GPU begins before the
    host has seen what the step before has chosen, if it turns out that other tokens are to be read.

    Attributes:
        lengths: of each row, tokens that the cache holds of its text; of a row without a text, any number.
        chosen: of each row, the most likely token behind the last step.
    """

    lengths: list[int]
    chosen: list[int]

    def begin_rows(self, cache: FastpathCache) -> None:
        """Start over a cache whose rows hold no text."""
        self.begin(cache, torch.zeros(self.batch, dtype=torch.long), None)
        self.lengths, self._places, self._first = [0] * self.batch, [0] * self.batch, [0] * self.batch
        self._is_taken = [False] * self.batch
        self.chosen = self.tokens[:, 0].tolist()
        self._is_stale = True  # the device counts other lengths and positions than the host
        self._is_ahead = False  # the device is at the next step, of the tokens that it has chosen itself
        self._begun_on: torch.cuda.Stream | None = None  # where it is, or was, at such a step
        self._holds_chosen = True  # the device has the newest tokens that the host knows, or has read these since

    def seat(self, row: int, length: int, position: int, start: int = 0) -> None:
        """Let a row go on with a text that the cache holds there.

        Args:
            row: which has no text.
            length: tokens that the cache holds of it.
            position: position id of the next token, 0 to ``length``.
            start: left padding.
        """
        self.step_back()
        self.lengths[row], self._places[row], self._first[row] = length, position, start
        self._is_taken[row] = self._is_stale = True

    def clear(self, row: int) -> None:
        """Let go of a row's text."""
        self.step_back()
        self.lengths[row], self._places[row], self._first[row] = 0, 0, 0
        self._is_taken[row], self._is_stale = False, True

    def text_at(self, row: int) -> tuple[int, int, int]:
        """Return what :meth:`seat` would be given for a row as it is now: length, next position and left padding."""
        return self.lengths[row], self._places[row], self._first[row]

    def take_on_weights(self) -> None:
        """Take on weights that have changed since the plan began."""
        self.step_back()
        self._fill_values()
        self.program.renew()

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max((length for length, taken in zip(self.lengths, self._is_taken) if taken), default=0)

    def step_back(self) -> None:
        """Do not use a step that has begun already: rows, weights or memory are others than it knows."""
        self._wait_for_begun()
        if self._is_ahead:
            self._is_ahead, self._is_stale, self._holds_chosen = False, True, False

    def step_rows(self, tokens: Sequence[int | None], goes_on: bool = False) -> torch.Tensor:
        """Read the next token of some rows.

        Args:
            tokens: of each row, the token that the row reads; None for a row without a text, and for one that waits.
            goes_on: the next step is likely to read what this one chooses. A GPU begins it at once then, while the host
                looks at the tokens.

        Returns:
            [batch, vocab_size] logits, valid until the next step. If that has begun, they may be its own.
        """
        self._wait_for_begun()
        given = [token if token is not None else old for token, old in zip(tokens, self.chosen)]
        if self._is_stale or given != self.chosen:
            self.step_back()
        if given != self.chosen or not self._holds_chosen:
            self.tokens.copy_(torch.tensor(given, device="cpu")[:, None])
        was_ahead, self._is_ahead = self._is_ahead, False
        if not was_ahead:
            self._settle()
        self._is_stale, self._holds_chosen = True, False  # until the step is through: it may break off
        if not was_ahead:
            self.step()
        chosen = OnItsWay(self.tokens[:, 0])
        is_ahead = goes_on and self._may_begin()
        if is_ahead:
            self._begun_on = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
            self.step()
        self.chosen = chosen.wait()[0].tolist()
        self._is_stale, self._is_ahead, self._holds_chosen = False, is_ahead, True
        for row, token in enumerate(tokens):
            if token is None and self._is_taken[row]:
                self._is_stale = True
                continue
            self.lengths[row] += 1
            self._places[row] += 1
            if not self._is_taken[row] and self.lengths[row] >= min(_IDLE_TOKENS, self.longest):
                self.clear(row)
        return self.logits

    def _wait_for_begun(self) -> None:
        """Let what this thread starts wait for a step that another thread has begun on its own stream."""
        if self._begun_on is not None:
            current = torch.cuda.current_stream(self.device)
            if current != self._begun_on:
                current.wait_stream(self._begun_on)
            self._begun_on = None

    def _may_begin(self) -> bool:
        """Whether a step may begin before the host knows its tokens."""
        return self.graph is not None and self._has_room()

    def _has_room(self) -> bool:
        """Whether the cache has room for one token more, and the model knows its position."""
        layers = (layer for layer in self.cache.key_layers if layer.sliding_window is None)
        return self.has_positions() and all(layer.capacity > layer.cumulative_length for layer in layers)

    def _settle(self) -> None:
        """Let cache and device hold what the host knows of the rows."""
        longest = max(self.lengths)
        for layer in self.cache.key_layers:
            layer.hold_rows(longest)
        self._held = longest
        self._ahead = [place - longest for place in self._places]
        if not self._is_stale:
            return
        self._covered = range(0)
        positions = [place + shift for place, shift in zip(self._places, self._shifts)]
        for target, values in (
            (self.seq_lens, [length + 1 for length in self.lengths]),
            (self.positions, [[position] for position in positions]),
            (self.starts, self._first),
        ):
            target.copy_(torch.tensor(values, dtype=target.dtype, device="cpu"))
