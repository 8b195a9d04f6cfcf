"""What patch() keeps about one model."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from . import compat, reasons
from .architecture import Architecture
from .cache import FastpathCache
from .decode import assisted, loop, structure
from .decode.draft_plan import WIDTHS, DraftPlan
from .decode.plan import DecodePlan
from .decode.prompt import PromptProgram
from .decode.snapshot import Snapshot
from .errors import FallbackError
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


#: methods of transformers' that our loops take the place of
LOOPS: dict[str, Loop] = {"_sample": loop.sample, "_assisted_decoding": assisted.decode}


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
        snapshot: the model as it was when a plan could last be made of it.
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
    snapshot: Snapshot | None = None
    lock: Any = field(default_factory=threading.RLock)

    def fall_back(self, reason: str) -> None:
        """Count a call of stock code.

        Raises:
            FallbackError: the model was patched with ``strict=True``, and the reason is not the user's own choice.
        """
        self.stats.note(reason)
        if self.options.strict and self.enabled and reason != "module_disabled":
            meaning, remedy = reasons.REASONS[reason]
            raise FallbackError(
                f"stock code would run ({reason}: {meaning}) and strict=True forbids it. What helps: {remedy}"
            )

    def plan(self, part: structure.ModelPart, batch: int, cache: FastpathCache, sampled: bool = False) -> DecodePlan:
        """The decode plan for this model, batch and cache, made anew if the model's parameters have moved."""
        key = batch, cache.layers[0].k_buffer.dtype, sampled, cache.page_sizes
        for plan in self._current_plans(self.fingerprint_of(part), DecodePlan):
            if (plan.batch, plan.kv_dtype, plan.sampled, plan.page_sizes) == key:
                return plan
        return self._kept(DecodePlan(part, *key), MAX_PLANS)

    def draft_plan(self, part: structure.ModelPart, cache: FastpathCache, width: int) -> DraftPlan:
        """As :meth:`plan`, for drafts of one sequence; ``width`` is one of ``draft_plan.WIDTHS``."""
        key = cache.layers[0].k_buffer.dtype, width, cache.page_sizes
        for plan in self._current_plans(self.fingerprint_of(part), DraftPlan):
            if (plan.kv_dtype, plan.query_len, plan.page_sizes) == key:
                return plan
        return self._kept(DraftPlan(part, *key), MAX_DRAFT_PLANS)

    def _current_plans(self, fingerprint: tuple, kind: type) -> list:
        """Plans of a kind; all that the model has moved away from are dropped."""
        self.plans = [plan for plan in self.plans if plan.fingerprint == fingerprint]
        return [plan for plan in self.plans if type(plan) is kind]

    def _kept(self, made: DecodePlan, most: int) -> Any:
        """``made``, put in front of the plans, of whose kind ``most`` stay."""
        alike = [plan for plan in self.plans if type(plan) is type(made)]
        self.plans = [made, *(plan for plan in self.plans if plan not in alike[most - 1 :])]
        return made

    def part_of(self, model: nn.Module) -> structure.ModelPart | None:
        """``model`` in its architecture's roles as it is now, or None if no architecture covers it."""
        if self.snapshot is not None and self.snapshot.part.module is model and self.snapshot.holds():
            return self.snapshot.part
        self.snapshot = None
        architecture = self.model_architecture
        return None if architecture is None else structure.model_part(architecture, model)

    def reason_of(self, part: structure.ModelPart) -> str | None:
        """``part.reason()`` for a part that :meth:`part_of` has just given."""
        if self._has_snapshot(part):
            return None
        reason = part.reason()
        if reason is None:
            self.snapshot = Snapshot(part)
        return reason

    def _has_snapshot(self, part: structure.ModelPart) -> bool:
        return self.snapshot is not None and self.snapshot.part is part

    def fingerprint_of(self, part: structure.ModelPart) -> tuple:
        """``structure.fingerprint(part)`` for a part that :meth:`part_of` has just given."""
        return self.snapshot.fingerprint if self._has_snapshot(part) else structure.fingerprint(part)

    def prompt_programs_of(self, part: structure.ModelPart) -> dict[tuple, PromptProgram]:
        """See ``prompt.read``; for a part that :meth:`part_of` has just given."""
        return self.snapshot.prompt_programs if self._has_snapshot(part) else {}

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
