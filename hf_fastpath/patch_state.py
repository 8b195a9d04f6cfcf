"""What patch() keeps about one model."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from . import compat, reasons
from .architecture import Architecture
from .cache import FastpathCache
from .decode import assisted, calls, loop, structure
from .decode.draft_plan import WIDTHS, DraftPlan
from .decode.plan import DecodePlan
from .decode.prompt import PromptProgram
from .decode.snapshot import Snapshot
from .errors import FallbackError
from .forks import after_fork
from .forwards import STATE_KEY
from .loops import Loop, install_loops
from .options import Options
from .quantization.repacking import RemovedHooks
from .quantization.replacing import Replaced
from .stats import Stats

#: decode plans kept for one model: one a batch size, KV type and way to choose in turn
MAX_PLANS = 4
#: plans that verify drafts: all widths of two KV types
MAX_DRAFT_PLANS = 2 * len(WIDTHS)
#: calls of generate() that our loops serve at once: each has plans of its own, on a GPU tens of megabytes
MAX_CALLS = 4

Plan = TypeVar("Plan", bound=DecodePlan)


class _Place:
    """What a running call holds."""


_states: weakref.WeakSet[PatchState] = weakref.WeakSet()


@after_fork
def _forget_other_threads() -> None:
    for state in list(_states):
        state.forget_other_threads()


#: methods of transformers' that our loops take the place of
LOOPS: dict[str, Loop] = {
    "_sample": loop.sample,
    "_assisted_decoding": assisted.decode,
    "_beam_search": calls.run_stock,
}


@dataclass(eq=False)
class PatchState:
    """Everything ``patch()`` keeps about one model; it lives in the model's ``__dict__``, and in its modules' patches.

    Attributes:
        options: as given to ``patch()``.
        known: the architectures whose classes are looked for: the listed ones, or the model's own, found by structure.
        model_architecture: the one that covers the whole model, or None if only modules are patched.
        bindings: (module, attribute, what its ``__dict__`` held before, if anything), in the order they were made.
        declined: (module name, part, reason code) of everything recognized that kept its stock forward.
        loop_reason: why generate() always uses transformers' loop on this model, or None.
        generates: whether the model's generate() passes through us, be it only to be counted.
        enabled: False while ``verify`` compares with stock code.
        huge_page_bytes: of the parameters in host memory, what was moved into pages of 2 MB.
        replaced: layers that quantized ones stand for.
        removed_hooks: hooks of a checkpoint's package that has none of its layers left.
        plans: those that no call uses; a call takes what it needs for itself, and each comes back at its ``end()``.
        running: what :meth:`place` has given to calls of our loops.
        snapshot: the model as it was when a plan could last be made of it.
        lock: of plans and places, held for a moment.
        door: where calls of ``generate()`` come in; patch() and unpatch() close it to change the model.
        waiting: threads at the door, which are not in yet.
        lost: why ``unpatch()`` cannot bring the model's own weights back, or None.
    """

    options: Options
    known: tuple[Architecture, ...] = ()
    model_architecture: Architecture | None = None
    bindings: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    patched: dict[str, int] = field(default_factory=dict)
    declined: list[tuple[str, str, str]] = field(default_factory=list)
    architecture: str = ""
    loop_reason: str | None = None
    generates: bool = False
    enabled: bool = True
    huge_page_bytes: int = 0
    stats: Stats = field(default_factory=Stats)
    replaced: list[Replaced] = field(default_factory=list)
    removed_hooks: list[RemovedHooks] = field(default_factory=list)
    lost: str | None = None
    plans: list[DecodePlan] = field(default_factory=list)
    running: weakref.WeakSet = field(default_factory=weakref.WeakSet)
    snapshot: Snapshot | None = None
    lock: Any = field(default_factory=threading.RLock)
    door: Any = field(default_factory=threading.RLock)
    waiting: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        _states.add(self)

    def fall_back(self, reason: str) -> None:
        """Count a call of stock code.

        Raises:
            FallbackError: the model was patched with ``strict=True``, and the reason is not the user's own choice.
        """
        self.stats.note(reason, self.model)
        if self.options.strict and self.enabled and reason != "module_disabled":
            meaning, remedy = reasons.REASONS[reason]
            what = reasons.named(reason, self.model).what
            what = f" ({what})" if what else ""
            raise FallbackError(
                f"stock code would run, {reason}{what}: {meaning}; strict=True forbids it. What helps: {remedy}"
            )

    def come_in(self) -> None:
        """Wait for another thread that is at patch() or unpatch()."""
        here = threading.get_ident()
        self.waiting.add(here)
        try:
            with self.door:
                self.waiting.discard(here)  # whoever closes the door next sees that this one is in
        finally:
            self.waiting.discard(here)

    @contextmanager
    def place(self) -> Iterator[bool]:
        """One of the MAX_CALLS places for calls that run at once, for the length of a ``with`` block; False if there is
        none."""
        mine = _Place()  # whatever breaks the call off, nothing counts that is not alive
        try:
            with self.lock:
                is_free = len(self.running) < MAX_CALLS
                if is_free:
                    self.running.add(mine)
            yield is_free
        finally:
            with self.lock:
                self.running.discard(mine)

    @property
    def model(self) -> nn.Module | None:
        """The model that was given to ``patch()``: the first that something was bound to."""
        return self.bindings[0][0] if self.bindings else None

    def plan(self, part: structure.ModelPart, batch: int, cache: FastpathCache, sampled: bool = False) -> DecodePlan:
        """A decode plan for this model, batch and cache that is the caller's until it ends it; made anew if the model's
        parameters have moved, or others use those there are."""
        key = batch, cache.layers[0].k_buffer.dtype, sampled, cache.page_sizes
        fits = lambda plan: (plan.batch, plan.kv_dtype, plan.sampled, plan.page_sizes) == key  # noqa: E731
        return self._taken(part, DecodePlan, fits, lambda: DecodePlan(part, *key))

    def draft_plan(self, part: structure.ModelPart, cache: FastpathCache, width: int) -> DraftPlan:
        """As :meth:`plan`, for drafts of one sequence; ``width`` is one of ``draft_plan.WIDTHS``."""
        key = cache.layers[0].k_buffer.dtype, width, cache.page_sizes
        fits = lambda plan: (plan.kv_dtype, plan.query_len, plan.page_sizes) == key  # noqa: E731
        return self._taken(part, DraftPlan, fits, lambda: DraftPlan(part, *key))

    def _taken(
        self, part: structure.ModelPart, kind: type[Plan], fits: Callable[[Any], bool], make: Callable[[], Plan]
    ) -> Plan:
        """A plan of a kind, out of those that wait or made; all that the model has moved away from are dropped."""
        fingerprint = self.fingerprint_of(part)
        with self.lock:
            waiting = [plan for plan in self.plans if plan.fingerprint == fingerprint]
            found = next((plan for plan in waiting if type(plan) is kind and fits(plan)), None)
            self.plans = [plan for plan in waiting if plan is not found]
        taken = make() if found is None else found
        taken.on_end = self._take_back
        return taken

    def _take_back(self, plan: DecodePlan) -> None:
        """Put a plan in front of those that wait, of whose kind a few stay."""
        most = MAX_DRAFT_PLANS if type(plan) is DraftPlan else MAX_PLANS
        with self.lock:
            alike = [each for each in self.plans if type(each) is type(plan)]
            self.plans = [plan, *(each for each in self.plans if each not in alike[most - 1 :])]

    def part_of(self, model: nn.Module) -> structure.ModelPart | None:
        """``model`` in its architecture's roles as it is now, or None if no architecture covers it."""
        snapshot = self.snapshot
        if snapshot is not None and snapshot.part.module is model and snapshot.holds():
            return snapshot.part
        self.snapshot = None
        architecture = self.model_architecture
        return None if architecture is None else structure.model_part(architecture, model)

    def reason_of(self, part: structure.ModelPart) -> str | None:
        """``part.reason()`` for a part that :meth:`part_of` has just given."""
        if self._snapshot_with(part) is not None:
            return None
        reason = part.reason()
        if reason is None:
            self.snapshot = Snapshot(part)
        return reason

    def _snapshot_with(self, part: structure.ModelPart) -> Snapshot | None:
        snapshot = self.snapshot  # another thread may replace it at any time
        return snapshot if snapshot is not None and snapshot.part is part else None

    def snapshot_of(self, part: structure.ModelPart) -> Snapshot:
        """The model as it is now, for a part without a reason that :meth:`part_of` has just given."""
        return self._snapshot_with(part) or Snapshot(part)

    def fingerprint_of(self, part: structure.ModelPart) -> tuple:
        """``structure.fingerprint(part)`` for a part that :meth:`part_of` has just given."""
        snapshot = self._snapshot_with(part)
        return structure.fingerprint(part) if snapshot is None else snapshot.fingerprint

    def prompt_programs_of(self, part: structure.ModelPart) -> dict[tuple, PromptProgram]:
        """See ``prompt.read``; for a part that :meth:`part_of` has just given."""
        snapshot = self._snapshot_with(part)
        return {} if snapshot is None else snapshot.prompt_programs

    def forget_other_threads(self) -> None:
        """Forget what threads held and did that are none of this process."""
        self.lock, self.door = threading.RLock(), threading.RLock()
        self.running, self.waiting = weakref.WeakSet(), set()
        self.stats.renew_lock()

    def copy_into(self, made: PatchState, memo: dict) -> None:
        """Fill the state of a deep copy of the model: its own modules, no shared plans or counts."""
        names = (
            "replaced",
            "removed_hooks",
            "lost",
            "known",
            "model_architecture",
            "bindings",
            "patched",
            "declined",
            "architecture",
            "loop_reason",
        )
        for name in (*names, "generates"):
            setattr(made, name, copy.deepcopy(getattr(self, name), memo))
        if made.generates:
            install_loops(made, LOOPS)


def patched_model(model: nn.Module) -> nn.Module:
    """``model`` if it was given to ``patch()`` itself, else the model inside it that generates."""
    return model if state_of(model) is not None else compat.generating_model(model)


def state_of(model: nn.Module) -> PatchState | None:
    """The patch state of ``model``, or None if it is not patched."""
    return vars(model).get(STATE_KEY) if isinstance(model, nn.Module) else None
