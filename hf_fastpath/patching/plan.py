"""What ``patch()`` decides of a model before it touches it: plain data, which :mod:`.apply`, the self-test, ``report``
and ``explain`` read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from ..architecture import Architecture
from ..decode.parts import Part
from ..decode.plan_cache import Family
from ..options import Options
from ..quantization.replacing import Replacement
from ..reasons import Cause
from ..recording.part import Recorded


@dataclass(frozen=True)
class Binding:
    """A module that gets a forward of ours.

    Attributes:
        kind: which: a key of ``forwards.FORWARDS``.
        part: the module in its role.
    """

    kind: str
    part: Part


class Declined(NamedTuple):
    """A module of a listed family that keeps its stock forward.

    Attributes:
        name: where it is in the model.
        kind: part of the architecture.
        reason: why, with what it speaks of.
    """

    name: str
    kind: str
    reason: Cause


@dataclass(frozen=True)
class PatchPlan:
    """What is to be done to a model.

    Attributes:
        model: the model.
        options: of ``patch()``.
        architecture: the one that its modules are of, or None.
        by_structure: the one without a file that was looked for because of the model's structure, or None.
        family: gives the whole model in its roles, or None if only modules are patched.
        bindings: in the order in which they are to be made.
        patched: part of an architecture -> how many modules of it get a forward of ours.
        declined: all that was recognized and keeps its stock forward.
        loop_reason: why generate() always uses transformers' loop on this model, or None.
        generates: whether the model's generate() passes through us, be it only to be counted.
        replacements: layers that quantized ones are to stand for.
        refusal: why there can be none though ``weights`` asks for them, or None.
    """

    model: nn.Module
    options: Options
    architecture: Architecture | None
    by_structure: Architecture | None
    family: Family | None
    bindings: tuple[Binding, ...]
    patched: dict[str, int]
    declined: tuple[Declined, ...]
    loop_reason: str | None
    generates: bool
    replacements: tuple[Replacement, ...] = ()
    refusal: str | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether the model's step is recorded from its own forward."""
        return isinstance(self.family, Recorded)
