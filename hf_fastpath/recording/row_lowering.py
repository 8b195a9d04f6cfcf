"""A recorded step whose rows are the tokens of a prompt, see :mod:`.token_rows`, as calls of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..decode.calls.named_calls import Call
from ..decode.lower import composed
from .lowering import Lowering
from .token_rows import ROWS, last_rows

_aten = torch.ops.aten


class RowLowering(Lowering):
    """One walk over such a list. From some call on, it goes over the last token of each sequence alone.

    Args:
        batch: sequences of the prompt.
        size: as of :class:`.lowering.Lowering`; a formula is given the tokens of a sequence as ``ROWS``.
        others: as of :class:`.lowering.Lowering`.
    """

    rows_are_tokens = True

    def __init__(self, *others: Any, batch: int, size: Callable[[Any], Any], **named: Any):
        super().__init__(*others, **named, size=self._size_of)  # type: ignore[misc]
        self._batch, self._size_of_text, self._is_at_end = batch, size, False
        self._end, self._carried = last_rows(self.recording)
        for register in (self.recording.tokens, self.recording.positions):
            rows = self.emit(_aten.reshape.default, self._values[register.index], [-1, 1])
            self._values[register.index] = rows

    def _size_of(self, formula: Any) -> Any:
        if self._is_at_end:
            return int(formula.xreplace({ROWS: self._batch}))
        return self._size_of_text(formula.xreplace({ROWS: self._batch * ROWS}))

    def _come_to(self, place: int) -> None:
        if place != self._end:
            return
        self._is_at_end = True
        for register in self._carried:
            if (value := self._values.get(register.index)) is not None:
                self._values[register.index] = self.emit(composed.last_rows, x=value, batch=self._batch)

    def _is_of_last_token(self, call: Call) -> bool:
        return self._is_at_end

    @property
    def _shape(self) -> list[Any]:
        return [self._batch, self._size_of_text(ROWS)]

    def _by_text(self, x: Any) -> Any:
        return None if x is None else self.emit(composed.by_text, x=x, batch=self._batch)

    def by_head(self, x: Any) -> Any:
        by_text = self._by_text(self.emit(_aten.transpose.int, x, 1, 2))
        return self.emit(_aten.transpose.int, by_text, 1, 2)

    def by_row(self, x: Any) -> Any:
        return self.emit(composed.by_row, x=x)

    def _in_turn(self) -> dict[str, Any]:
        return {"tokens": self._shape[1]}

    def attention(self, *given: Any, **others: Any) -> Any:
        return self.by_row(super().attention(*given, **others))
