"""Recordings of one model, each of other lengths of the text: what a model asks of a length decides what it calls."""

from __future__ import annotations

import copy
import functools
from typing import Any

from ..decode.plans.draft_plan import WIDTHS
from ..decode.plans.plan_cache import PlanCache
from ..ops.decode_attention import MAX_QUERY_LEN
from ..reasons import Cause
from .proof import reason_against
from .recorded_step import Unrecordable

#: recordings of one model for texts of different lengths
_MOST = 8


class ByLength:
    """The parts that stand for one model at one time, each with recordings for other lengths.

    Args:
        first: the part that was made first.
    """

    def __init__(self, first: Any):
        self._parts = [first]

    def is_bounded(self, batch: int, query_len: int = 1) -> bool:
        """Whether the first part's steps are not those of any text."""
        return not self._parts[0].recording(batch, query_len).served.is_all

    def fingerprints(self) -> list[tuple]:
        """Return what decode plans bake in, of all parts but the first."""
        return [each.fingerprint() for each in self._parts[1:]]

    def part_for(self, past: int, encoded: int | None, batch: int, longest: int | None = None) -> Any:
        """Return the part whose step is the model's, behind ``past`` tokens in the cache.

        Args:
            encoded: places that an encoder has read, or None.
            batch: number of sequences.
            longest: the same part should serve so many tokens, too, if it can.

        Raises:
            Unrecordable: there is no such step.
        """
        for part in self._parts:
            if part.recording(batch, 1).served.serves(past, encoded):
                return part
        lines = self._parts[0].recording(batch, 1).served.lines
        if len(self._parts) == _MOST:
            raise Unrecordable(f"texts of so many lengths take different ways, at {lines}")
        for length in dict.fromkeys((past if longest is None else longest, past)):
            made = _of_length(self._parts[0], length, encoded)
            if (served := made.recording(batch, 1).served).serves(past, encoded):
                self._parts.append(made)
                return made
        raise Unrecordable(f"a number that is made of the length of the text, at {served.lines}")

    def reason(self, plans: PlanCache, batch: int, first: int, end: int, encoded: int | None) -> Cause | None:
        """Return why there are no steps behind ``first`` to ``end - 1`` tokens in the cache, or None."""
        if not self.is_bounded(batch):
            return None
        model, served = self._parts[0].module, self._parts[0].recording(batch, 1).served
        if self._parts[0].ranks is not None and not bool(served.among(first, end, encoded).all()):
            return Cause("text_length", f"{first} to {end} tokens of a model over ranks, at {served.lines}", model)
        try:
            past = first
            while past < end:
                part = self.part_for(past, encoded, batch, end - 1)
                if part is not self._parts[0] and (reason := reason_against(part, plans)) is not None:
                    return reason
                unserved = _served_by_some(self._parts, batch, past, end, encoded).logical_not().nonzero()
                past = past + int(unserved[0]) if len(unserved) else end
        except Exception as error:  # nobody has tried this code: anything may be raised
            what = str(error) if isinstance(error, Unrecordable) else f"{type(error).__name__}: {error}"
            return Cause("text_length", f"{first} to {end} tokens: {what}", model)
        return None

    def drafts_reason(self, first: int, end: int) -> Cause | None:
        """Return why drafts cannot be verified behind ``first`` to ``end - 1`` tokens in the cache, or None."""
        if not self.is_bounded(1, MAX_QUERY_LEN) and not self.is_bounded(1):
            return None
        part = self._parts[0]
        for served in (part.recording(1, width).served for width in WIDTHS):
            if not bool(served.among(first, max(end, first + 1)).all()):
                return Cause("text_length", f"{first} to {end} tokens with drafts, at {served.lines}", part.module)
        return None


def _served_by_some(parts: list[Any], batch: int, first: int, end: int, encoded: int | None) -> Any:
    found = (each.recording(batch, 1).served.among(first, end, encoded) for each in parts)
    return functools.reduce(lambda one, other: one | other, found)


def _of_length(part: Any, past: int, encoded: int | None) -> Any:
    """Return a part like ``part`` that is recorded as if its cache held ``past`` tokens."""
    made = copy.copy(part)
    for name in {name for each in type(part).__mro__ for name, value in vars(each).items() if _is_cached(value)}:
        vars(made).pop(name, None)
    made.forget_recordings()
    made.lengths = past, encoded
    return made


def _is_cached(value: Any) -> bool:
    return isinstance(value, functools.cached_property)
