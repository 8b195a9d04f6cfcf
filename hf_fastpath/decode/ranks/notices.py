"""What the processes of a spread model tell each other of their calls.

Notices go through the store of the process group, not through collectives. A rank that makes another call than the
others, or none, therefore never meets a collective of theirs, which may end the process; every wait has an end, and
each rank learns what the others do instead.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from ... import compat
from ...errors import RankError, RankMismatch

#: seconds between two looks at the store, at first and at most
_PAUSE, _LONGEST_PAUSE = 20e-6, 5e-3
#: the kind of a notice that says that a rank has left a call with an error
_FAILED = "failed"
#: what helps when ranks have lost each other
START_ANEW = "Look for the first error of all ranks, end all processes and start anew"
#: process group -> its notices: calls of all models that are spread over the same group are counted together
_of_groups: weakref.WeakKeyDictionary[Any, Notices] = weakref.WeakKeyDictionary()


class _CallOfRanks(NamedTuple):
    """A call that this rank is in; all ranks number their calls alike."""

    number: int
    what: str


def notices_of(group: Any) -> Notices:
    """Return the notices of a process group.

    Raises:
        RankError: the group has been destroyed, or has no store.
    """
    found = _of_groups.get(group)
    if found is None or compat.store_of(group) is None:
        store = compat.store_of(group)
        if store is None:
            raise RankError(f"the process group of a spread model was destroyed, or has no store. {START_ANEW}")
        found = _of_groups[group] = Notices(store, group.rank(), group.size())
    return found


class Notices:
    """The notices of a process group; each rank writes its own in order, and reads those of every other in order.

    Args:
        store: of the process group.
        rank, size: of this process, and of the group.

    Attributes:
        lost: why the ranks cannot go on together any more, or None.
    """

    def __init__(self, store: Any, rank: int, size: int):
        self._store, self.rank, self.size = store, rank, size
        self.lost: str | None = None
        #: the error of a rank that others have kept waiting
        self._waiting: RankError | None = None
        self._written, self._deleted, self._calls = 0, 0, 0
        self._read = [0] * size
        self._active: list[_CallOfRanks] = []
        self._lock = threading.RLock()

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    @contextmanager
    def call(self, what: str, seconds: float) -> Iterator[None]:
        """Note that this rank is in a call, for the length of a ``with`` block; tell the others if it fails.

        Raises:
            RankError: another thread of this process is in a call that goes over the same ranks.
        """
        if not self._lock.acquire(timeout=seconds):
            raise RankError(
                f"{what} on {self} has waited {seconds:.0f} s for another thread, whose call goes over the same ranks. "
                "Make such calls one behind the other, in the same order on all ranks"
            )
        try:
            self._calls += 1
            self._active.append(_CallOfRanks(self._calls, what))
            try:
                yield
            except BaseException as error:
                with suppress(RuntimeError):  # the store may be gone; the error that is on its way says more
                    facts = {"why": _first_line(error), "lost": self.lost, "has_waited": self.has_waited(error)}
                    self._write(_FAILED, facts)
                raise
            finally:
                self._active.pop()
        finally:
            self._lock.release()

    def exchange(self, kind: str, facts: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        """Tell the other ranks something, and return what each rank tells. Every rank has to call this method.

        Args:
            kind: what it is about, the same on all ranks.
            facts: values that JSON can hold.

        Raises:
            RankError: a rank has failed or does not come, or the ranks have lost each other before.
            RankMismatch: a rank makes another call.
        """
        if not self._active:
            with self.call("a look at the model", seconds):
                return self.exchange(kind, facts, seconds)
        self.check_lost()
        try:
            mine, end = self._write(kind, facts), time.monotonic() + seconds
            told = [mine if rank == self.rank else self._next_of(rank, kind, end) for rank in range(self.size)]
            for rank in range(self.size):
                if (given_up := self._failure_of(rank)) and given_up["facts"]["has_waited"]:
                    raise RankError(self._left(rank, given_up))
            self._forget(min(each["read"][self.rank] for rank, each in enumerate(told) if rank != self.rank))
        except RankError:
            raise
        except RuntimeError as error:
            raise self.now_lost(f"the store of the process group is gone: {_first_line(error)}") from error
        return [each["facts"] for each in told]

    def has_waited(self, error: BaseException) -> bool:
        """Whether an error says that this rank has waited for another one, which has not come."""
        return error is self._waiting

    def check_lost(self) -> None:
        """Raise if the ranks have lost each other in an earlier call."""
        if self.lost is not None:
            what = self._active[-1].what if self._active else "a call"
            raise RankError(f"{what} on {self}: the ranks have lost each other before: {self.lost}")

    def now_lost(self, why: str) -> RankError:
        """Note that the ranks cannot go on together, and return the error that says so. If another rank has told how
        it left the call, that is the reason, and else ``why``."""
        self.lost = self.lost or f"{self.failure() or why}. {START_ANEW}"
        return RankError(self.lost)

    def failure(self) -> str | None:
        """Return how another rank has left the call that this one is in, or None if none has."""
        with suppress(RuntimeError):  # what the store cannot say is no failure
            for rank in range(self.size):
                if (found := self._failure_of(rank)) is not None:
                    return self._left(rank, found)
        return None

    # ---- the store --------------------------------------------------------------------------------------------------

    def _key(self, rank: int, number: int) -> str:
        return f"hf_fastpath/{rank}/{number}"

    def _write(self, kind: str, facts: dict[str, Any]) -> dict[str, Any]:
        call = self._active[-1]
        notice = dict(call=call.number, what=call.what, kind=kind, facts=facts, read=self._read)
        text = json.dumps(notice)
        self._written += 1
        self._store.set(self._key(self.rank, self._written), text)
        return json.loads(text)

    def _forget(self, number: int) -> None:
        """Delete this rank's notices up to the one that all others have read."""
        while self._deleted < number:
            self._deleted += 1
            self._store.delete_key(self._key(self.rank, self._deleted))

    def _peek(self, rank: int, place: int = 1) -> dict[str, Any] | None:
        """Return a notice of another rank that was not read yet, or None if it is not there."""
        key = self._key(rank, self._read[rank] + place)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _next_of(self, rank: int, kind: str, end: float) -> dict[str, Any]:
        """Wait for another rank's notice of a kind in this call. Notices of calls that have ended are passed by."""
        call, pause = self._active[-1], _PAUSE
        while True:
            found = self._peek(rank)
            if found is None:
                if time.monotonic() > end:
                    raise self._waited(rank, call, kind)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            if found["kind"] == _FAILED:
                self._read[rank] += 1
                self._take_over(found)
                if found["call"] in (each.number for each in self._active):
                    raise RankError(self._left(rank, found))
                self.check_lost()
            elif found["call"] < call.number:
                self._read[rank] += 1
            elif found["call"] > call.number:  # its next call will meet our next
                raise self._other_call(rank, found)
            else:
                self._read[rank] += 1
                if (found["what"], found["kind"]) != (call.what, kind):
                    raise self._other_call(rank, found)
                return found

    def _failure_of(self, rank: int) -> dict[str, Any] | None:
        """Return the notice that another rank has left one of the calls that this one is in, or None."""
        active, place = [each.number for each in self._active], 1
        while rank != self.rank and (found := self._peek(rank, place)) is not None:
            if found["kind"] == _FAILED and found["call"] in active:
                self._take_over(found)
                return found
            place += 1
        return None

    def _take_over(self, found: dict[str, Any]) -> None:
        if found["facts"]["lost"]:
            self.lost = self.lost or found["facts"]["lost"]

    # ---- what is said -----------------------------------------------------------------------------------------------

    def _left(self, rank: int, found: dict[str, Any]) -> str:
        return (
            f"rank {rank} has left {found['what']} with an error: {found['facts']['why']}. A call is made on all "
            f"ranks or on none: see the error of rank {rank}"
        )

    def _waited(self, rank: int, call: _CallOfRanks, kind: str) -> RankError:
        why = (
            f"rank {rank} has not come to {call.what} (its {kind}) in time, while {self} waited. Call it on all ranks, "
            "in the same order and at about the same time"
        )
        # of patch() nothing is left behind, and it can be tried again
        self._waiting = RankError(why) if call.what == "patch()" else self.now_lost(why)
        return self._waiting

    def _other_call(self, rank: int, found: dict[str, Any]) -> RankError:
        if (given_up := self._failure_of(rank)) and given_up["facts"]["has_waited"]:
            return RankError(f"{self._left(rank, given_up)}. {START_ANEW}")
        call = self._active[-1]
        its = f"{found['what']} ({found['kind']}, call {found['call']})"
        return RankMismatch(
            f"rank {rank} is at {its}, and {self} at {call.what} (call {call.number}); expected the same calls in the "
            f"same order on all ranks: call {call.what} on every rank"
        )


def _first_line(error: BaseException) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:600]
