"""The decode plans of one model that wait for a call, and how the model was when they were made."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from torch import nn

from ..cache.fastpath_cache import FastpathCache
from . import structure
from .draft_plan import WIDTHS, DraftPlan
from .plan import DecodePlan
from .snapshot import Snapshot

#: decode plans kept for one model; they differ in batch size, KV type and the way to choose tokens
MAX_PLANS = 4
#: plans that verify drafts: all widths for two KV types
MAX_DRAFT_PLANS = 2 * len(WIDTHS)
#: calls of generate() that our loops serve at once: each has plans of its own, which take tens of megabytes on a GPU
MAX_CALLS = 4

Plan = TypeVar("Plan", bound=DecodePlan)


class Family(Protocol):
    """A family of models, which finds the roles inside a model: a described architecture, or the recorder."""

    @property
    def module(self) -> str:
        """Name of the transformers module that defines the model's class."""

    def model_part(self, model: nn.Module) -> Any:
        """Return ``model`` in its roles as it is now, or None if it does not belong to the family."""


class _Place:
    """A place that a running call holds."""


class PlanCache:
    """Decode plans, draft plans and prompt programs of one model; iterating gives the plans that no call uses.

    A call takes the plans that it needs for itself, and each plan comes back when it ends.

    Attributes:
        family: gives the model in its roles, or None if only modules are patched.
        running: the places that :meth:`place` has given to calls of our loops.
        snapshot: the model as it was when a plan could last be made of it.
        lock: guards plans and places; it is held only for a moment.
    """

    def __init__(self) -> None:
        self.family: Family | None = None
        self.snapshot: Snapshot | None = None
        self._looked_at: Snapshot | None = None
        self._declined: tuple[structure.ModelPart, str] | None = None
        self._waiting: list[DecodePlan] = []
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
        self.snapshot = self._looked_at = self._declined = None

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

    def decode_plan(
        self, part: structure.ModelPart, batch: int, cache: FastpathCache, sampled: bool = False
    ) -> DecodePlan:
        """Take a decode plan for this model, batch and cache; it is the caller's until the caller ends it.

        A plan is made if other calls use those that fit, or the model's parameters have moved since.
        """
        key = batch, cache.stored_dtype, sampled, cache.page_sizes
        fits = lambda plan: (plan.batch, plan.kv_dtype, plan.sampled, plan.page_sizes) == key  # noqa: E731
        return self._taken(part, DecodePlan, fits, lambda: DecodePlan(part, *key))

    def draft_plan(self, part: structure.ModelPart, cache: FastpathCache, width: int) -> DraftPlan:
        """Do as :meth:`decode_plan` for drafts of one sequence; ``width`` is one of ``draft_plan.WIDTHS``."""
        key = cache.stored_dtype, width, cache.page_sizes
        fits = lambda plan: (plan.kv_dtype, plan.query_len, plan.page_sizes) == key  # noqa: E731
        return self._taken(part, DraftPlan, fits, lambda: DraftPlan(part, *key))

    def _taken(
        self, part: structure.ModelPart, kind: type[Plan], fits: Callable[[Any], bool], make: Callable[[], Plan]
    ) -> Plan:
        """Take or make a plan of a kind; waiting plans whose model has changed are dropped."""
        fingerprint = self.fingerprint_of(part)
        with self.lock:
            waiting = [plan for plan in self._waiting if plan.fingerprint == fingerprint]
            found = next((plan for plan in waiting if type(plan) is kind and fits(plan)), None)
            self._waiting = [plan for plan in waiting if plan is not found]
        taken = make() if found is None else found
        taken.on_end = self._take_back
        return taken

    def _take_back(self, plan: DecodePlan) -> None:
        """Put a plan in front of those that wait; of each kind, only the newest stay."""
        most = MAX_DRAFT_PLANS if type(plan) is DraftPlan else MAX_PLANS
        with self.lock:
            alike = [each for each in self._waiting if type(each) is type(plan)]
            self._waiting = [plan, *(each for each in self._waiting if each not in alike[most - 1 :])]

    # ---- the model as it is now -------------------------------------------------------------------------------

    def part_of(self, model: nn.Module) -> structure.ModelPart | None:
        """Return ``model`` in its roles as it is now, or None if it is of no family."""
        for snapshot in (self.snapshot, self._looked_at):
            if snapshot is not None and snapshot.part.source is model and snapshot.holds():
                return snapshot.part
        self.snapshot = self._looked_at = None
        part = None if self.family is None else self.family.model_part(model)
        if part is not None and part.is_recorded:  # else calls that nobody asks for a reason record it anew each time
            self._looked_at = Snapshot(part)
        return part

    def reason_of(self, part: structure.ModelPart) -> str | None:
        """Return ``part.reason()`` for a part of the model as it is now. Without a reason, :meth:`part_of` gives the
        same part as long as the model stays so."""
        if self._snapshot_with(part) is not None:
            return None
        reason = part.reason()
        self._declined = None if reason is None else (part, reason)
        if reason is None:
            made = Snapshot(part)
            with self.lock:  # what plans of the model as it was hold of the host's memory is needed now
                self._waiting = [plan for plan in self._waiting if plan.fingerprint == made.fingerprint]
            self.snapshot = made
        return reason

    def known_reason_of(self, part: structure.ModelPart) -> str | None:
        """Do as :meth:`reason_of`, but of a recorded model return only what has been found before: nothing is recorded
        for a call that stock code makes in any case."""
        if not part.is_recorded:
            return self.reason_of(part)
        declined = self._declined  # another thread may replace it at any time
        return declined[1] if declined is not None and declined[0] is part else None

    def _snapshot_with(self, part: structure.ModelPart) -> Snapshot | None:
        snapshot = self.snapshot  # another thread may replace it at any time
        return snapshot if snapshot is not None and snapshot.part is part else None

    def snapshot_of(self, part: structure.ModelPart) -> Snapshot:
        """Return the model as it is now, for a part without a reason that :meth:`part_of` has just given."""
        return self._snapshot_with(part) or Snapshot(part)

    def fingerprint_of(self, part: structure.ModelPart) -> tuple:
        """Return ``structure.fingerprint(part)`` for a part that :meth:`part_of` has just given."""
        snapshot = self._snapshot_with(part)
        return part.fingerprint() if snapshot is None else snapshot.fingerprint

    def prompt_programs_of(self, part: structure.ModelPart) -> dict[tuple, Any]:
        """Return the programs for ``prompt.read``, for a part that :meth:`part_of` has just given."""
        snapshot = self._snapshot_with(part)
        return {} if snapshot is None else snapshot.prompt_programs
