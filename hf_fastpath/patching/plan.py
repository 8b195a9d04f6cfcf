"""What ``patch()`` decides about a model before it touches the model: plain data, which :mod:`.apply`, the self-test,
``report`` and ``explain`` read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from ..architecture import Architecture
from ..decode.model.parts import Part
from ..decode.plans.plan_cache import Family
from ..decode.ranks.process_group import Ranks
from ..options import Options
from ..reasons import Cause
from ..recording.family import Recorded
from ..replacing.quantizing import Replacement


@dataclass(frozen=True)
class Binding:
    """A module that gets one of our forwards.

    Attributes:
        kind: which forward, a key of ``forwards.FORWARDS``.
        part: the module in its role.
    """

    kind: str
    part: Part


class Declined(NamedTuple):
    """A module of a listed family that keeps its stock forward.

    Attributes:
        name: where it is in the model.
        kind: part of the architecture.
        reason: why, with the argument or module that the reason is about.
    """

    name: str
    kind: str
    reason: Cause


@dataclass(frozen=True)
class PatchPlan:
    """What is to be done to a model.

    Attributes:
        model: the model.
        options: the options of ``patch()``.
        architecture: the architecture of its modules, or None.
        by_structure: the architecture without a file that the model's structure suggested, or None.
        family: gives the whole model in its roles, or None if only modules are patched.
        bindings: in the order in which they are to be made.
        patched: part of an architecture -> number of its modules that get one of our forwards.
        declined: every module that was recognized and keeps its stock forward.
        loop_reason: why generate() always uses transformers' loop on this model, or None.
        generates: whether the model's generate() passes through our code, even if only to be counted.
        replacements: layers that quantized layers are to replace.
        refusal: why no layer can be replaced although ``weights`` asks for it, or None.
        ranks: the processes over which the model is spread, or None.
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
    ranks: Ranks | None = None

    @property
    def recorded(self) -> Recorded | None:
        """The family of a model whose step is recorded from its own forward, or None."""
        return self.family if isinstance(self.family, Recorded) else None
