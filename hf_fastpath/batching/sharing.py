"""Who runs the steps that calls share: the thread that waits for a token, and nobody in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..cache.fastpath_cache import FastpathCache
from ..decode.loops.call_scope import CallScope, Cancelled
from ..decode.plans.plan_cache import PlanCache
from ..decode.sources.step_source import StepSource
from ..options import MAX_BATCH, Options
from ..stats import Stats
from .choosing import Chooser, choose
from .member import Member
from .prompt_turns import SharedTurns
from .room import Room, Ticket
from .slots import Slots

#: seconds that a step waits at least for members whose callbacks are at work; it waits no longer than a step takes, or
#: than this
_PATIENCE = 0.002
#: seconds after which a leader without work looks again
_IDLE = 0.05
_NOT_FINITE = "no token can be drawn: probabilities are NaN or infinite, see the model's logits"


class Sharing:
    """The calls of one model that share steps.

    All that the lock guards is done in a moment; while a step runs, the lock is free, and :attr:`leader` keeps others
    from the slots.

    Args:
        options: as given to ``patch()``.
        plans: of the model.
        stats: counts rows and steps.

    Attributes:
        members: the calls that have slots.
        joining: the calls that wait for slots, in the order in which they came.
        slots: the present ones, or None.
        prompts: gives prompts their turns beside the steps.
        room: the memory of slots.
        has_new_weights: a callback has changed the model since the last step.
    """

    def __init__(self, options: Options, plans: PlanCache, stats: Stats):
        self.options, self.plans, self.stats = options, plans, stats
        self.forget_other_threads()

    def forget_other_threads(self) -> None:
        """Forget what threads hold: in the child of a fork, these threads do not exist."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # a leader waits for tokens and for slots
        self.prompts, self.room = SharedTurns(self), Room(self)
        self.calls = 0
        self.leader: int | None = None  # the thread that leads
        self.members: list[Member] = []
        self.joining: list[Member] = []
        self.leaving: list[tuple[Member, bool]] = []
        self.slots: Slots | None = None
        self.has_new_weights = False
        self._step_s = 0.0

    # ---- for calls --------------------------------------------------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[None]:
        """Be a call that may share steps, for the length of a ``with`` block."""
        with self.lock:
            self.calls += 1
        try:
            yield
        finally:
            with self.lock:
                self.calls -= 1

    def enter(
        self, part: StepSource, kv_dtype: torch.dtype | None, rows: int, length: int, scope: CallScope | None
    ) -> Ticket:
        """Wait until there is room for a call that has not read its prompt; :meth:`leave_room` has to follow.

        Args:
            part: the model.
            kv_dtype: storage type of the call's keys and values, None for the model's own.
            rows, length: of the call, see ``room.Ticket``.
            scope: of the call, or None.

        Raises:
            Cancelled: the request of the call is cancelled.
        """
        ticket = Ticket(part, kv_dtype, rows, length)
        with self.lock:
            self.room.enter(ticket, scope)
        return ticket

    def leave_room(self, ticket: Ticket) -> None:
        with self.lock:
            self.room.leave(ticket)

    def member(self, part: StepSource, cache: FastpathCache, scope: CallScope | None, **given: Any) -> Member:
        """Make a member of a call, which has no slots yet.

        Args:
            part: the model, without a reason against sharing.
            cache: of the call.
            scope: of the call, or None.
            given: ``length``, ``positions``, ``starts``, ``unfinished``, ``most_ahead``, ``ticket``, ``text``,
                ``read_again``, and the fields of ``chooser`` or None.
        """
        chooser = given.pop("chooser")
        made = None if chooser is None else Chooser(**chooser)
        return Member(self, part, self.plans.fingerprint_of(part), cache, scope=scope, chooser=made, **given)

    def fits(self, fingerprint: tuple, kv_dtype: torch.dtype | None) -> bool:
        """Whether a call of a model as it is now can share steps with those that do."""
        slots = self.slots
        is_other = slots is not None and (slots.fingerprint, slots.kv_dtype) != (fingerprint, kv_dtype)
        return not (is_other and (self.members or self.joining))

    def join(self, member: Member) -> Member:
        """Wait for slots."""
        if member.cache.key_layers and (buffer := member.cache.key_layers[0].k_buffer) is not None and buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()  # another thread's stream reads the cache
        with self.lock:
            self.joining.append(member)
            self.changed.notify_all()
        return member

    def give(self, member: Member, tokens: list[int]) -> None:
        """Let the next step read a token of each of a member's rows."""
        with self.lock:
            member.due = tokens
            self.changed.notify_all()

    def wait(self, member: Member, is_ready: Callable[[], bool]) -> None:
        """Wait until something is so that steps bring about; lead meanwhile if nobody else does.

        Raises:
            what a step has raised, or ``Cancelled``.
        """
        here = threading.get_ident()
        with self.lock:
            try:
                while not is_ready():
                    if member.error is not None:
                        raise member.error
                    if member.is_cancelled:
                        raise Cancelled
                    if member.is_out:
                        self._come_back(member)
                        continue
                    if self.leader is not None:
                        self._stand_by(member)
                        continue
                    self.leader = here
                    try:
                        self._turn()
                    finally:
                        self.leader = None
            finally:
                self._hand_over()

    def _stand_by(self, member: Member) -> None:
        member.is_waiting = True
        try:
            member.ready.wait()
        finally:
            member.is_waiting = False

    def _come_back(self, member: Member, dropped: int = 0) -> None:
        """Read the text of a member that has given up its slots again, once there is room, and let it join.

        Args:
            dropped: newest tokens that are not wanted.
        """
        assert member.read_again is not None and member.ticket is not None, "else it keeps its slots"
        self._hand_over()
        member.ticket.length = member.floor
        self.room.enter(member.ticket, member.scope)
        text = member.held_text()[:, : member.length - 1 - dropped]
        self.lock.release()
        try:
            member.read_again(text)
        finally:
            self.lock.acquire()
        member.is_out = False
        self.joining.append(member)
        self.changed.notify_all()

    def _hand_over(self) -> None:
        """Wake a thread that has to lead now."""
        if self.leader is not None:
            return
        everybody = [*self.members, *self.joining, *(member for member, _ in self.leaving)]
        if (found := next((each for each in everybody if each.is_waiting), None)) is not None:
            found.ready.notify()

    def leave(self, member: Member, wants_cache: bool) -> None:
        """Give back a member's slots.

        Args:
            member: which is not used afterwards.
            wants_cache: its cache gets the keys and values.
        """
        with self.lock:
            if member.has_left:
                return
            if wants_cache and member.is_out:
                self._come_back(member, member.ahead)
            self.room.leave(member.ticket)
            if member in self.joining:
                self.joining.remove(member)
                member.has_left = True
            else:
                self.leaving.append((member, wants_cache))
            self.changed.notify_all()
            while not member.has_left:
                if self.leader is None:
                    self._let_out()
                else:
                    self._stand_by(member)
            self._hand_over()

    def note_change(self) -> None:
        """Let a leader that waits look again."""
        with self.lock:
            self.changed.notify_all()

    def wake(self) -> None:
        """Let all members look whether they are cancelled."""
        with self.lock:
            for member in (*self.members, *self.joining):
                member.ready.notify()
            self.changed.notify_all()

    # ---- for the leader ---------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Run a step, or wait for something to do. The caller holds the lock, and leads."""
        self._let_out()
        self._let_in()
        if self.slots is not None and self.members:
            self.room.make_room()
        due = [member for member in self.members if member.is_due]
        if not due:
            self.changed.wait(_IDLE)
        if not due or self._wait_for_callbacks():
            return  # perhaps others have come or gone
        due, slots = [member for member in self.members if member.is_due], self.slots
        assert slots is not None, "members have slots"
        tokens = {row: token for member in due for row, token in zip(member.rows, member.due or ())}
        for member in self.members:  # an interrupt may have come between a step and its members
            slots.align(member.rows, member.length - 1, member.positions, member.starts)
        if self.has_new_weights:
            self.has_new_weights = False
            slots.take_on_weights()
        try:
            self.prompts.begin_step()
            goes_on = self._goes_on()
            self.lock.release()
            try:
                failed = self._step(slots, due, tokens, goes_on)
            finally:
                self.lock.acquire()
        finally:
            self.prompts.end_step(self._step_s)
        for member in due:
            if failed is not None:
                member.error, member.due = failed, None
            if member.is_waiting:
                member.ready.notify()

    def _goes_on(self) -> bool:
        """Whether the step behind the next one is for the same calls, as far as that is known."""
        come_or_go = self.joining or self.leaving or self.prompts.calls
        return not come_or_go and all(member.goes_on for member in self.members)

    def _step(self, slots: Slots, due: list[Member], tokens: dict[int, int], goes_on: bool) -> Exception | None:
        """Run a step without the lock, and let members take what it has computed; return what it has raised."""
        started = time.perf_counter()
        try:
            with torch.inference_mode(False), torch.no_grad():
                logits = slots.step(tokens, goes_on)
                self._hand_on(slots, due, logits)
        except Exception as error:
            return error
        self._step_s = time.perf_counter() - started
        self.stats.shared_step(len(tokens))
        return None

    @staticmethod
    def _hand_on(slots: Slots, due: list[Member], logits: torch.Tensor) -> None:
        """Choose tokens, and let members take them or their logits."""
        choosing = [(member, member.chooser) for member in due if member.chooser is not None]
        wanted = [(chooser, member.rows) for member, chooser in choosing]
        found = {member: tokens for (member, _), tokens in zip(choosing, choose(logits, slots.chosen, wanted))}
        for member in due:
            rows = member.rows
            is_run = rows[-1] - rows[0] + 1 == len(rows)  # a view then
            own = logits[rows[0] : rows[-1] + 1] if is_run else logits[rows]
            if member.chooser is None:
                member.take_logits(own)
            elif (tokens := found[member]) is not None:
                member.take_tokens(own, tokens)
            else:
                member.error, member.due = RuntimeError(_NOT_FINITE), None

    def _wait_for_callbacks(self) -> bool:
        """Wait a moment for members whose threads are about to give a token; return whether anyone comes or goes."""
        patience = max(_PATIENCE, self._step_s)
        until, before = time.perf_counter() + patience, (len(self.joining), len(self.leaving))
        while any(self._is_thinking(member, patience) for member in self.members):
            if (left := until - time.perf_counter()) <= 0:
                break
            self.changed.wait(left)
            if (len(self.joining), len(self.leaving)) != before:
                return True
        return False

    @staticmethod
    def _is_thinking(member: Member, patience: float) -> bool:
        is_thinking = member.chooser is None and member.due is None and member.error is None
        return is_thinking and member.think_s <= patience

    def _let_out(self) -> None:
        if have_gone := bool(self.leaving):
            self.room.note_change()
        for member, wants_cache in self.leaving:
            if member in self.members:
                self.members.remove(member)
                if self.slots is not None:
                    self.slots.give_back(member.rows, member.cache if wants_cache else None, member.ahead)
            member.has_left = True
            member.ready.notify()
        self.leaving.clear()
        if self.slots is None:
            return
        if not self.members:
            self.slots.end()
            self.slots = None
            return
        if have_gone and not self.joining:
            needed = 1 if self.room.limit is not None else min(self.calls, self.most(self.slots.part))
            self._move(self.slots.shrink(needed))
            self.slots.give_up_room(max(member.max_length or member.length for member in self.members))

    def resize(self, size: int) -> None:
        """Go on with so many slots, of which all that are taken have to fit."""
        assert self.slots is not None
        self._move(self.slots.resize(size))

    def _move(self, places: dict[int, int]) -> None:
        for member in self.members if places else ():
            member.rows = [places[row] for row in member.rows]

    def _let_in(self) -> None:
        """Give slots to the calls that wait for them, as many as there is room for, the first ones first."""
        while self.joining and self._has_room(member := self.joining[0]):
            try:
                is_limited = self.room.limit is not None
                others = 0 if is_limited else min(self.calls, self.most(member.part))  # which read their prompts
                if self.slots is None:
                    needed = max(len(member.starts), others)
                    self.slots = Slots(self.plans, member.part, member.cache.kv_dtype, needed, is_limited)
                self.slots.is_limited = is_limited
                if member.max_length is not None:
                    self.slots.expect(member.max_length)
                self.slots.grow(max(self.slots.count + len(member.starts), others))
                held = member.length - 1
                member.rows = self.slots.take(member.cache, held, member.positions, member.starts)
            except Exception as error:  # memory, for one: those who have slots go on
                member.error = error
            self.joining.pop(0)
            self.room.leave(member.ticket)
            self.members += [member] * (member.error is None)
            if member.error is None and member.cache.is_dropped:
                for layer in member.cache.key_layers:
                    layer.forget()
            if member.error is not None and member.is_waiting:
                member.ready.notify()

    def _has_room(self, member: Member) -> bool:
        """Whether a member can have slots now. Alone, it can."""
        if self.slots is None or not self.members:
            return True
        if (self.slots.fingerprint, self.slots.kv_dtype) != (member.fingerprint, member.cache.kv_dtype):
            return False  # the model has changed while others run
        rows = self.slots.count + len(member.starts)
        return rows <= self.most(member.part) and self.room.takes(member, rows)

    def most(self, part: StepSource) -> int:
        """Return how many slots there may be."""
        return min(self.options.max_batch_size, part.max_batch, MAX_BATCH)
