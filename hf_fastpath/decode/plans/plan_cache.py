"""The decode plans of one model that wait for a call, and how the model was when they were made."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from torch import nn

from ...cache.fastpath_cache import FastpathCache
from ...reasons import Cause
from ..sources.step_source import StepSource
from ..state.snapshot import Snapshot, walk_of
from .adapter_rows_plan import AdapterRowsPlan
from .decode_plan import DecodePlan
from .draft_plan import WIDTHS, DraftPlan
from .plan_by_length import AnyPlan, PlanByLength
from .rows_plan import SIZES, RowsPlan

#: decode plans kept for one state of a model; they differ in batch size, KV type and the way to choose tokens
MAX_PLANS = 4
#: plans that verify drafts: all widths for two KV types
MAX_DRAFT_PLANS = 2 * len(WIDTHS)
#: and of slots for texts: one for each number of them
MAX_ROWS_PLANS = len(SIZES)
#: recordings of one model that are kept, each of other Python values that it was made with
MAX_RECORDINGS = 8
#: looks that each find another model, behind which the model as it is found is noted at every ``LOOK_AGAIN``-th alone
MOST_IN_VAIN, LOOK_AGAIN = 3, 16
#: calls of generate() that our loops serve at once: each has plans of its own, which take tens of megabytes on a GPU
MAX_CALLS = 4

Plan = TypeVar("Plan", bound=DecodePlan)


class Family(Protocol):
    """A family of models, which finds the roles inside a model: a described architecture, or the recorder."""

    @property
    def module(self) -> str:
        """Name of the transformers module that defines the model's class."""

    def model_part(self, model: nn.Module) -> StepSource | None:
        """Return ``model`` in its roles as it is now, or None if it does not belong to the family."""

    def take_reason(self) -> tuple[StepSource, str | None] | None:
        """Return the part that was given last and the reason against it, if that was asked for on the way, and forget
        them."""


def _noted(part: StepSource, reason: str | None) -> Snapshot | None:
    """Return a snapshot of a model with the reason against it, or None: what is in such a model may be anything."""
    try:
        made = Snapshot(part, part.held)
    except Exception:
        if reason is None:
            raise
        return None
    made.reason = reason
    return made


class _Place:
    """A place that a running call holds."""


class PlanCache:
    """Decode plans, draft plans and prompt programs of one model; iterating gives the plans that no call uses.

    A call takes the plans that it needs for itself, and each plan comes back when it ends.

    Attributes:
        family: gives the model in its roles, or None if only modules are patched.
        running: the places that :meth:`place` has given to calls of our loops.
        snapshot: the model as it was when it was last looked at closely: when a plan could be made of it or, of a
            recorded model, also when there was a reason against that.
        lock: guards plans and places; it is held only for a moment.
    """

    def __init__(self) -> None:
        self.family: Family | None = None
        self.snapshot: Snapshot | None = None
        self._declined: tuple[StepSource, str] | None = None
        self._looked_at: Snapshot | None = None  # of a model that no plan was asked for
        self._waiting: list[DecodePlan] = []
        self._kept: list[Snapshot] = []  # of recorded models, the last used one first
        self._in_vain = 0  # looks at the model one after the other that each found another one
        self._misses = 0  # recordings that were made one after the other, with no call in between that one served
        self._call: tuple[Any, StepSource | None] | None = None  # see part_in_call()
        self._left: Any = None  # see leave()
        self.forget_other_threads()

    def forget_other_threads(self) -> None:
        """Forget what threads hold: in the child of a fork, these threads do not exist."""
        self.lock = threading.RLock()
        self.running: weakref.WeakSet[_Place] = weakref.WeakSet()

    def __iter__(self) -> Iterator[DecodePlan]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        """Forget all plans and programs."""
        self._waiting.clear()
        self._kept.clear()
        self.snapshot = self._looked_at = self._call = self._declined = None
        self._misses = 0

    def drop_plans(self) -> None:
        """Forget the plans that no call uses, but not what is known of the model."""
        with self.lock:
            self._waiting.clear()

    @contextmanager
    def place(self) -> Iterator[bool]:
        """Take one of the MAX_CALLS places for calls that run at once, for the length of a ``with`` block.

        Yields:
            Whether there was a free place.
        """
        mine = _Place()  # places are held weakly, so the place of a call that was broken off does not count
        try:
            with self.lock:
                is_free = len(self.running) < MAX_CALLS
                if is_free:
                    self.running.add(mine)
            yield is_free
        finally:
            with self.lock:
                self.running.discard(mine)

    # ---- plans ------------------------------------------------------------------------------------------------

    def decode_plan(self, part: StepSource, batch: int, cache: FastpathCache, sampled: bool = False) -> AnyPlan:
        """Take a decode plan for this model, batch and cache; it is the caller's until the caller ends it.

        A plan is made if other calls use those that fit, or the model's parameters have moved since.
        """
        if part.by_length.is_bounded(batch):
            make = lambda each: self.plan_of(each, batch, cache, sampled)  # noqa: E731
            return PlanByLength(part, self.fingerprint_of(part), batch, cache.get_seq_length(), make)
        return self.plan_of(part, batch, cache, sampled)

    def plan_of(self, part: StepSource, batch: int, cache: FastpathCache, sampled: bool = False) -> DecodePlan:
        """Do as :meth:`decode_plan`, for the lengths of the text that ``part`` serves."""
        cache.take()
        key = batch, cache.stored_dtype, sampled, cache.page_sizes
        fits = lambda plan: (plan.batch, plan.kv_dtype, plan.sampled, plan.page_sizes) == key  # noqa: E731
        return self._taken(part, DecodePlan, fits, lambda: DecodePlan(part, *key))

    def draft_plan(self, part: StepSource, cache: FastpathCache, width: int) -> DraftPlan:
        """Do as :meth:`decode_plan` for drafts of one sequence; ``width`` is one of ``draft_plan.WIDTHS``."""
        cache.take()
        key = cache.stored_dtype, width, cache.page_sizes
        fits = lambda plan: (plan.kv_dtype, plan.query_len, plan.page_sizes) == key  # noqa: E731
        return self._taken(part, DraftPlan, fits, lambda: DraftPlan(part, *key))

    def rows_plan(self, part: StepSource, batch: int, cache: FastpathCache) -> RowsPlan:
        """Do as :meth:`decode_plan` for rows that hold texts of different lengths."""
        key = batch, cache.stored_dtype, False, cache.page_sizes
        fits = lambda plan: (plan.batch, plan.kv_dtype, plan.sampled, plan.page_sizes) == key  # noqa: E731
        return self._taken(part, RowsPlan, fits, lambda: RowsPlan(part, *key))

    def adapter_rows_plan(
        self, part: StepSource, batch: int, cache: FastpathCache, sampled: bool, numbers: dict[int, int]
    ) -> AdapterRowsPlan:
        """Do as :meth:`plan_of` for rows that have an adapter each."""
        cache.take()
        key = batch, cache.stored_dtype, sampled, cache.page_sizes
        fits = lambda plan: (  # noqa: E731
            (plan.batch, plan.kv_dtype, plan.sampled, plan.page_sizes, plan.owners.numbers) == (*key, numbers)
        )
        make = lambda: AdapterRowsPlan(part, *key, numbers=numbers)  # noqa: E731
        return self._taken(part, AdapterRowsPlan, fits, make)

    def _taken(self, part: StepSource, kind: type[Plan], fits: Callable[[Any], bool], make: Callable[[], Plan]) -> Plan:
        """Take or make a plan of a kind; waiting plans whose model has changed are dropped."""
        fingerprint = self.fingerprint_of(part)
        with self.lock:
            waiting = [plan for plan in self._waiting if plan.fingerprint == fingerprint]
            found = next((plan for plan in waiting if type(plan) is kind and fits(plan)), None)
            self._drop_plans(fingerprint, taken=found)
        taken = make() if found is None else found
        taken.on_end = self._take_back
        return taken

    def _drop_plans(self, fingerprint: tuple, taken: DecodePlan | None = None) -> None:
        """Keep the waiting plans of the model as it is, but the one that is taken, and those of recordings that are
        kept; what other plans hold of the host's memory is needed now."""
        kept = [each for each in self._kept if not each.part.sources]
        of_lengths = (other for each in kept for other in each.part.by_length.fingerprints())
        fingerprints = {fingerprint, *(each.fingerprint for each in kept), *of_lengths}
        self._waiting = [plan for plan in self._waiting if plan.fingerprint in fingerprints and plan is not taken]

    def _take_back(self, plan: DecodePlan) -> None:
        """Put a plan in front of those that wait; of each kind, only the newest stay, and the newest of each state of
        the model, so that going from one adapter to the next makes no plan anew."""
        most = {DraftPlan: MAX_DRAFT_PLANS, RowsPlan: MAX_ROWS_PLANS}.get(type(plan), MAX_PLANS)
        with self.lock:
            alike = [plan, *(each for each in self._waiting if type(each) is type(plan))]
            newest = {each.fingerprint: each for each in reversed(alike)}
            gone = [each for each in alike[most:] if newest[each.fingerprint] is not each]
            self._waiting = [plan, *(each for each in self._waiting if each not in gone)]

    # ---- the model as it is now -------------------------------------------------------------------------------

    def part_of(self, model: nn.Module) -> StepSource | None:
        """Return ``model`` in its roles as it is now, or None if it is of no family."""
        last, looked_at = self.snapshot, self._looked_at
        with self.lock:
            kept = [each for each in self._kept if each is not last and each is not looked_at]
        for snapshot in (last, looked_at, *kept):  # the model may be again what it was
            if snapshot is None or snapshot.part.source is not model or snapshot.part.is_passing:
                continue
            if snapshot.holds():
                self._misses = 0 if snapshot is last or snapshot in kept else self._misses
                if snapshot in kept:
                    self._come_back(snapshot)
                self._in_vain = 0 if snapshot is looked_at else self._in_vain
                snapshot.part.look_again()
                return snapshot.part
        self.snapshot = self._looked_at = None
        if self.family is None:
            return None
        made = self.family.model_part(model)
        asked = self.family.take_reason()
        reason = asked[1] if asked is not None and asked[0] is made else None
        if made is not None and reason is not None:
            self._declined = made, reason
        found = None if made is None else self._kept_like(made, last)
        if found is None:
            self._in_vain += 1
            is_often_other = self._in_vain > MOST_IN_VAIN and self._in_vain % LOOK_AGAIN != 0
            is_known = asked is not None and asked[0] is made and not is_often_other
            if made is not None and (made.held is not None or is_known):  # else each call looks at the model
                self._looked_at = _noted(made, reason)
            return made
        self._misses, self.snapshot = 0, found
        found.part.look_again()
        return found.part

    def _come_back(self, snapshot: Snapshot) -> None:
        """Note that the model is as a kept snapshot has it."""
        self.snapshot, self._looked_at = snapshot, None
        with self.lock:
            if self._kept:
                self._kept = [snapshot, *(each for each in self._kept if each is not snapshot)]

    def part_in_call(self, model: nn.Module, call: Any, is_last: bool = False) -> StepSource | None:
        """Do as :meth:`part_of`, which looks at the model once in a call of ``generate()``.

        Args:
            call: the call's own configuration, which no other call has.
            is_last: whether the call does not ask again.
        """
        asked, self._call = self._call, None
        part = asked[1] if asked is not None and asked[0] is call else self.part_of(model)
        if not is_last:
            self._call = call, part
        return part

    def leave(self, call: Any) -> None:
        """Note that a call of ``generate()`` has a cache that no plan serves, so that nobody looks at the model for it.

        Args:
            call: see :meth:`part_in_call`.
        """
        self._left = call

    def is_left(self, call: Any) -> bool:
        """Whether the newest call that was left is this one."""
        left, self._left = self._left, None
        return left is call

    def _kept_like(self, made: StepSource, last: Snapshot | None) -> Snapshot | None:
        """Return what is known of a model whose values are those that ``made`` has just found, or differ from these in
        adapters alone; or None.

        Args:
            last: the snapshot of the model before, which may differ in objects that are equal.
        """
        with self.lock:
            kept = self._kept or [each for each in (last,) if each is not None]
        if not kept:
            return None
        walk = walk_of(made) if made.held is None else made.held
        others: list[tuple[Snapshot, list[str]]] = []
        for snapshot in kept:
            if snapshot.part.source is not made.source or type(snapshot.part) is not type(made):
                continue
            if differs := snapshot.what_differs(walk):
                others.append((snapshot, differs))
            else:
                snapshot.renew(walk)
                self._come_back(snapshot)
                return snapshot
        return self._adopted(made, others)

    def _adopted(self, made: StepSource, kept: list[tuple[Snapshot, list[str]]]) -> Snapshot | None:
        """Return what is known of a model that differs from a kept one in its adapters alone, or None.

        Args:
            kept: snapshots, each with the places where the model's values were others.
        """
        for snapshot, differs in kept if made.held is not None else ():
            if snapshot.reason is None and made.adopt(snapshot.part, differs):
                found = Snapshot(made, made.held)
                with self.lock:
                    self._keep(found)
                return found
        return None

    def reason_of(self, part: StepSource) -> str | None:
        """Return ``part.reason()`` for a part of the model as it is now. Without a reason or if it is recorded,
        :meth:`part_of` gives the same part as long as the model stays so."""
        if (snapshot := self._snapshot_with(part)) is not None:
            return snapshot.reason
        declined, looked = self._declined, self._looked_at  # another thread may replace them at any time
        if looked is not None and looked.part is part:
            if looked.reason is not None and not part.takes_long:
                return looked.reason
        elif declined is not None and declined[0] is part and not part.takes_long:
            return declined[1]  # in this call, as the next one gets a part of its own
        is_changing = part.takes_long and self._misses >= MAX_RECORDINGS
        reason = self._changing(part) if is_changing else part.reason()
        self._declined = None if reason is None else (part, reason)
        if is_changing or part.is_passing:
            self._looked_at = None
            return reason
        if reason is None or part.takes_long:
            made = looked if looked is not None and looked.part is part else Snapshot(part)
            made.reason = reason
            with self.lock:
                if part.takes_long:
                    self._keep(made)
                self._drop_plans(made.fingerprint)
            self.snapshot = made
            self._misses += 1
        return reason

    def _keep(self, snapshot: Snapshot) -> None:
        """Put a snapshot in front of those that are kept; of weights that are gone nothing is kept."""
        kept = [each for each in self._kept if each.part.source is snapshot.part.source]
        self._kept = [snapshot, *(each for each in kept if each.tensors <= snapshot.tensors)][:MAX_RECORDINGS]

    def _changing(self, part: StepSource) -> Cause:
        """Return a reason for a model whose Python values are others in every call."""
        found = self._kept[0].what_differs(walk_of(part)) if self._kept else []
        return Cause("changing_values", ", ".join(found[:3]), part.source)

    def known_reason_of(self, part: StepSource) -> str | None:
        """Do as :meth:`reason_of`, but if that takes long, return only what has been found before, as for a call that
        stock code makes in any case."""
        if not part.takes_long:
            return self.reason_of(part)
        declined = self._declined  # another thread may replace it at any time
        return declined[1] if declined is not None and declined[0] is part else None

    def _snapshot_with(self, part: StepSource) -> Snapshot | None:
        snapshot = self.snapshot  # another thread may replace it at any time
        return snapshot if snapshot is not None and snapshot.part is part else None

    def snapshot_of(self, part: StepSource) -> Snapshot:
        """Return the model as it is now, for a part without a reason that :meth:`part_of` has just given."""
        return self._snapshot_with(part) or Snapshot(part)

    def fingerprint_of(self, part: StepSource) -> tuple:
        """Return ``part.fingerprint()`` for a part that :meth:`part_of` has just given."""
        snapshot = self._snapshot_with(part)
        return part.fingerprint() if snapshot is None else snapshot.fingerprint

    def prompt_programs_of(self, part: StepSource) -> dict[tuple, Any]:
        """Return the programs for ``prompt.read``, for a part that :meth:`part_of` has just given."""
        snapshot = self._snapshot_with(part)
        return {} if snapshot is None else snapshot.prompt_programs
