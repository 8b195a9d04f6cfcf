"""Slots: the rows of a plan and a cache, each of which holds a text of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache.buffers import CAPACITY_STEP, RING_SLACK
from ..cache.fastpath_cache import FastpathCache
from ..decode.plans.plan_cache import PlanCache
from ..decode.plans.rows_plan import SIZES, RowsPlan
from ..decode.sources.step_source import StepSource
from ..ops.decode_attention import MAX_QUERY_LEN
from ..ops.kv_cache import SCALE_DTYPE, is_quantized

#: slots are given up once no more than one of so many is taken
_FREE_SHARE = 4
#: buffers are given up once they have so many times the room that texts need
_TOO_LARGE = 2


class Slots:
    """Rows of one plan, which texts take and leave.

    Args:
        plans: of the model.
        part: the model, without a reason against slots.
        kv_dtype: storage type of keys and values, None for the model's own.
        slots: how many there are at least.

    Attributes:
        fingerprint: of the model as it was when the slots were made.
        taken: of each slot, whether a text is there.
        is_limited: slots take no more memory than their texts need now.
    """

    plan: RowsPlan
    _cache: FastpathCache

    def __init__(
        self,
        plans: PlanCache,
        part: StepSource,
        kv_dtype: torch.dtype | None,
        slots: int = 1,
        is_limited: bool = False,
    ):
        self.fingerprint = plans.fingerprint_of(part)
        self.part, self.kv_dtype = part, kv_dtype
        self.taken: list[bool] = []
        self._plans, self._expected = plans, 0
        self.is_limited = is_limited
        self.resize(size_for(slots))

    @property
    def count(self) -> int:
        """Slots with a text."""
        return sum(self.taken)

    @property
    def chosen(self) -> list[int]:
        """Of each slot, the most likely token behind the last step."""
        return self.plan.chosen

    @property
    def capacity(self) -> int:
        """Positions that every slot has, of layers without a window; 0 if all have one."""
        layers = (layer for layer in self._cache.key_layers if layer.sliding_window is None)
        return max((layer.capacity for layer in layers), default=0)

    def give_up_room(self, length: int) -> None:
        """Go on with shorter slots if those that there are have twice the room for texts of ``length`` tokens."""
        if self.capacity >= _TOO_LARGE * capacity_for(length):
            self._expected = 0 if self.is_limited else length
            self.resize(len(self.taken))

    def expect(self, length: int) -> None:
        """Announce how many tokens a text will have at most."""
        if not self.is_limited:
            self._expected = max(length, self._expected)
            self._cache.expect(self._expected)

    def widen(self, capacity: int) -> None:
        """Have so many positions in every slot, of layers without a window."""
        self.plan.step_back()
        held = self.plan.longest
        for layer in self._cache.key_layers:
            layer.hold_rows(held)
        if any([layer.widen(capacity) for layer in self._cache.key_layers]):
            self.plan.bind()

    def grow(self, slots: int) -> None:
        """Have at least so many slots, where there are too few."""
        if slots > len(self.taken):
            self.resize(size_for(slots))

    def take(self, source: FastpathCache, length: int, positions: Sequence[int], starts: Sequence[int]) -> list[int]:
        """Put the texts of a call into free slots, of which there are enough.

        Args:
            source: the call's cache, whose rows are ``length`` tokens long.
            length: tokens that each row holds, with left padding.
            positions: of each row, the position id of the next token.
            starts: of each row, its left padding.

        Returns:
            The slot of each row.
        """
        rows = [slot for slot, taken in enumerate(self.taken) if not taken][: len(positions)]
        self._make_room(length)
        for own, its in zip(self._cache.key_layers, source.key_layers):
            own.put_rows(its, dict(enumerate(rows)), length)
        for row, position, start in zip(rows, positions, starts):
            self.plan.seat(row, length, position, start)
            self.taken[row] = True
        return rows

    def align(self, rows: Sequence[int], length: int, positions: Sequence[int], starts: Sequence[int]) -> None:
        """Let slots hold texts of a length, if steps have not left them so; see :meth:`take`."""
        for row, position, start in zip(rows, positions, starts):
            if self.plan.lengths[row] != length:
                self.plan.seat(row, length, position, start)

    def _make_room(self, length: int) -> None:
        """Let every slot have room for a text of ``length`` tokens, and one more."""
        self.plan.step_back()
        held = self.plan.longest
        for layer in self._cache.key_layers:
            layer.hold_rows(held)
        if self.is_limited:
            self.widen(room_for(length + 1))
        elif length >= held and self._cache.reserve(length + 1 - held):
            self.plan.bind()

    def give_back(self, rows: Sequence[int], target: FastpathCache | None, ahead: int = 0) -> None:
        """Free slots.

        Args:
            rows: the slots of a call.
            target: the call's cache, which gets what the slots hold of its texts; or None.
            ahead: the newest tokens of the slots, which the call has not taken and its cache does not get; no more than
                RING_SLACK if a layer has a window.
        """
        self.plan.step_back()
        if target is not None:
            held = self.plan.lengths[rows[0]]
            length = held - ahead
            self.part.prompts.prepare(target, len(rows))
            target.reserve(length - target.get_seq_length())
            for own, its in zip(self._cache.key_layers, target.key_layers):
                its.put_rows(own, {slot: row for row, slot in enumerate(rows)}, length)
                its.hold_rows(length, held - own.capacity)
        for row in rows:
            self.plan.clear(row)
            self.taken[row] = False

    def step(self, tokens: dict[int, int], goes_on: bool = False) -> torch.Tensor:
        """Read the next token of some slots; see ``RowsPlan.step_rows``."""
        return self.plan.step_rows([tokens.get(slot) for slot in range(len(self.taken))], goes_on)

    def shrink(self, slots: int) -> dict[int, int]:
        """Go on with fewer slots if most are free.

        Args:
            slots: that will be needed soon.

        Returns:
            Slot -> the slot where its text is now; empty if nothing has changed.
        """
        size = size_for(max(1, slots, self.count))
        return self.resize(size) if size * _FREE_SHARE <= len(self.taken) else {}

    def resize(self, size: int) -> dict[int, int]:
        """Go on with ``size`` slots; return slot -> the slot where its text is now."""
        rows = [slot for slot, taken in enumerate(self.taken) if taken]
        places = {slot: slot if size >= len(self.taken) else place for place, slot in enumerate(rows)}
        cache = FastpathCache.of_kinds(self.part.kinds, self.kv_dtype)
        self.part.prompts.prepare(cache, size)
        cache.expect(self._expected)
        texts = {}
        if self.taken:
            self.plan.step_back()
            texts = {place: self.plan.text_at(slot) for slot, place in places.items()}
            longest = self.plan.longest
            self.plan.end()  # it holds the buffers, of which one layer after the other is given up
            for own, its in zip(cache.key_layers, self._cache.key_layers):
                own.widen(room_for(longest + 1)) if self.is_limited else own.reserve(longest + 1)
                for slot, place in places.items():
                    own.put_rows(its, {slot: place}, texts[place][0])
                its.forget()
        self._cache, self.plan = cache, self._plans.rows_plan(self.part, size, cache)
        self.plan.begin_rows(cache)
        for place, text in texts.items():
            self.plan.seat(place, *text)
        self.taken = [slot in texts for slot in range(size)]
        return places

    def take_on_weights(self) -> None:
        """Take on weights that have changed since the slots were made."""
        self.plan.take_on_weights()

    def end(self) -> None:
        """Let go of plan and cache."""
        self.plan.step_back()
        self.plan.end()


def size_for(slots: int) -> int:
    """Return how many slots a plan has of which so many are needed."""
    return next(size for size in SIZES if size >= slots)


def room_for(length: int) -> int:
    """Return the positions of a slot that holds ``length`` tokens, if it is no larger than that takes."""
    return -(-length // CAPACITY_STEP) * CAPACITY_STEP


def capacity_for(length: int) -> int:
    """Return how many positions a slot of a text of ``length`` tokens has."""
    return -(-(length + MAX_QUERY_LEN) // CAPACITY_STEP) * CAPACITY_STEP


def text_bytes(part: StepSource, kv_dtype: torch.dtype | None, capacity: int) -> int:
    """Return the bytes of keys and values of one slot with so many positions.

    Args:
        part: the model.
        kv_dtype: storage type of keys and values, None for the model's own.
        capacity: of layers without a window.
    """
    dtype = kv_dtype or part.embedding.weight.dtype
    scales = 2 * SCALE_DTYPE.itemsize if is_quantized(dtype) else 0
    kinds = [kind for kind in part.kinds if kind.keys]
    total = 0
    for kind, attention in zip(kinds, part.attentions):
        (heads, width), (_, of_values) = attention.cache_shape, attention.value_shape
        kept = capacity if kind.window is None else min(capacity, kind.window + RING_SLACK)
        total += kept * heads * ((width + of_values) * dtype.itemsize + scales)
    return total
