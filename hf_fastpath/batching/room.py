"""The memory of slots: how much there may be, who waits for some, and who gives up a slot when texts have grown."""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from ..cache.buffers import CAPACITY_STEP
from ..cache.prefixes import PrefixStore
from ..decode.loops.call_scope import Cancelled
from ..decode.sources.step_source import StepSource
from .member import Member
from .slots import room_for, size_for, text_bytes

#: texts beside the slots for which there is memory at least: of a call whose prompt is read, and of one that waits for
#: its slot
BESIDE = 2
#: positions by which texts can grow, after a call has got slots, until one has to be given up
_GROWTH = 2 * CAPACITY_STEP
#: seconds after which a call that waits for room looks again, whoever has forgotten to wake it
_IDLE = 0.05
_ages = itertools.count()


@dataclass(eq=False)
class Ticket:
    """A call that is to have slots.

    Attributes:
        part: the model.
        kv_dtype: storage type of keys and values, None for the model's own.
        rows: of the call.
        length: tokens of each row when it gets its slots; or all that it may have, if it cannot give them up.
        age: calls that came earlier have a lower one.
    """

    part: StepSource
    kv_dtype: torch.dtype | None
    rows: int
    length: int
    age: int = field(default_factory=lambda: next(_ages))


class Room:
    """The memory of the slots of one model.

    All methods are called with the lock of ``sharing``, which they let go of while they wait.

    Args:
        sharing: the slots (:class:`.sharing.Sharing`).

    Attributes:
        kept: who keeps beginnings of texts in that memory -> where.
        limits: who has set a limit -> bytes that keys and values may take: of slots, and of the calls beside them.
    """

    def __init__(self, sharing: Any):
        self._sharing = sharing
        self.limits: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.kept: weakref.WeakKeyDictionary[Any, PrefixStore] = weakref.WeakKeyDictionary()
        self._changed = threading.Condition(sharing.lock)
        self._waiting: list[Ticket] = []
        self._inside: list[Ticket] = []  # their prompts are read, or wait for slots

    @property
    def num_waiting(self) -> int:
        """Calls that wait for room."""
        return len(self._waiting)

    @property
    def limit(self) -> int | None:
        """Bytes, or None if nobody has set a limit."""
        return min(self.limits.values(), default=None)

    # ---- for calls --------------------------------------------------------------------------------------------

    def enter(self, ticket: Ticket, scope: Any) -> None:
        """Wait until a call may read its text, behind those that came before; :meth:`leave` has to follow.

        Raises:
            Cancelled: the request of the call is cancelled.
        """
        if self.limit is None:
            return
        self._waiting.append(ticket)
        try:
            while not self._may_enter(ticket):
                if scope is not None and scope.is_cancelled:
                    raise Cancelled
                self._changed.wait(_IDLE)
            self._inside.append(ticket)
        finally:
            self._waiting.remove(ticket)
            self.note_change()

    def leave(self, ticket: Ticket | None) -> None:
        """Note that a call has slots, or needs none."""
        if ticket in self._inside:
            self._inside.remove(ticket)
            self.note_change()

    def note_change(self) -> None:
        """Let calls that wait look again."""
        if self._waiting:
            self._changed.notify_all()

    def _may_enter(self, ticket: Ticket) -> bool:
        if ticket is not min(self._waiting, key=lambda each: each.age):
            return False
        sharing = self._sharing
        if self.limit is None or not (sharing.members or sharing.joining or self._inside):
            return True
        rows = sum(each.rows for each in (ticket, *self._inside)) + sum(len(each.rows) for each in sharing.members)
        lengths = [each.length for each in (ticket, *self._inside)] + [each.floor for each in sharing.members]
        most = sharing.most(ticket.part)
        return rows <= most and self._fits(ticket, size_for(rows), room_for(max(lengths) + _GROWTH), beside=ticket.rows)

    # ---- for the leader ---------------------------------------------------------------------------------------

    def takes(self, member: Member, rows: int) -> bool:
        """Whether there is room for a member's text among so many rows."""
        slots = self._sharing.slots
        if self.limit is None:
            return True
        size, capacity = size_for(rows), max(slots.capacity, room_for(member.length))
        if size < len(slots.taken) and not self._fits(member, len(slots.taken), capacity):
            self._sharing.resize(size)
        return self._fits(member, size, capacity)

    def _fits(self, who: Ticket | Member, size: int, capacity: int, beside: int = 0) -> bool:
        """Whether the limit allows slots of such a size, and so many rows beside them and those that are there now."""
        limit = self.limit
        if limit is None:
            return True
        kv_dtype = who.kv_dtype if isinstance(who, Ticket) else who.cache.kv_dtype
        beside = max(BESIDE, beside + sum(each.rows for each in self._inside))
        needed = (size + beside) * text_bytes(who.part, kv_dtype, capacity)
        if needed <= limit < needed + self._kept_bytes():  # texts come before what is kept for others
            for store in self.kept.values():
                store.clear()
        return needed <= limit

    def _kept_bytes(self) -> int:
        return sum(store.num_bytes for store in self.kept.values())

    def spare(self) -> int:
        """Return bytes that texts do not need soon, of the memory that has a limit."""
        sharing = self._sharing
        whose = [*sharing.members, *sharing.joining, *self._inside]
        if self.limit is None or not whose:
            return 0
        count = sum(each.rows if isinstance(each, Ticket) else len(each.starts) for each in whose)
        longest = max(each.length for each in whose)
        part, slots = whose[0].part, sharing.slots
        kv_dtype = whose[0].kv_dtype if isinstance(whose[0], Ticket) else whose[0].cache.kv_dtype
        size = max(size_for(count), 0 if slots is None else len(slots.taken))
        capacity = max(room_for(longest + _GROWTH), 0 if slots is None else slots.capacity)
        return max(0, self.limit - (size + BESIDE) * text_bytes(part, kv_dtype, capacity) - self._kept_bytes())

    def make_room(self) -> None:
        """Let slots have room for the next token of each text; where memory does not suffice, the youngest calls that
        can read their texts again give up their slots."""
        sharing, slots = self._sharing, self._sharing.slots
        slots.is_limited = self.limit is not None
        needed = slots.plan.longest + 1
        if not slots.is_limited or needed <= slots.capacity or not slots.capacity:
            return
        anyone = sharing.members[0]
        for size in (len(slots.taken), size_for(slots.count)):
            for capacity in (room_for(needed + needed // 4), room_for(needed)):
                if self._fits(anyone, size, capacity):
                    if size < len(slots.taken):
                        sharing.resize(size)
                    return slots.widen(capacity)
        while len(sharing.members) > 1:
            able = [each for each in sharing.members if each.can_read_again()]
            if not able:
                break
            self._give_up(max(able, key=lambda each: each.age))
            size, needed = size_for(slots.count), slots.plan.longest + 1
            if self._fits(anyone, size, room_for(needed)):
                break
        sharing.resize(size)
        slots.widen(room_for(slots.plan.longest + 1))

    def _give_up(self, member: Member) -> None:
        sharing = self._sharing
        sharing.members.remove(member)
        sharing.slots.give_back(member.rows, None)
        member.rows, member.is_out = [], not member.has_ended
        sharing.stats.gave_up_slots()
        if member.is_waiting:
            member.ready.notify()
