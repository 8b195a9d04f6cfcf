"""A model as it was when it was looked at closely, and whether it still is.

Every ``generate()`` has to know that nothing was put into the model since it was patched, and what a decode plan would
record. To ask every module takes milliseconds; to see that all modules hold what they held takes a fraction of one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import torch

from ... import compat
from ..sources.fingerprint import angle_facts
from ..sources.step_source import StepSource
from .python_state import Walk
from .watch import Watch

_ABSENT = object()


def _facts_of(part: StepSource) -> tuple:
    """Return what the angles of positions depend on, and what stands behind parameters on "meta"."""
    try:
        rotary = part.rotary
    except AttributeError:  # another module is where the decoder was
        rotary = None
    return (None if rotary is None else angle_facts(rotary), *part.sources)


def walk_of(part: StepSource) -> Walk:
    """Go through all that a step of a model depends on."""
    model = part.source
    device = next((each.device.type for each in model.parameters() if not each.is_meta), "cpu")
    walk = Walk(are_brought=bool(part.sources), host_numbers=device != "cpu")
    walk.enter(model)
    walk.classes()
    configs = walk.configs()
    walk.identities("functions of the configuration", lambda: compat.functions_of_configs(configs))
    if part.code is None:
        space = vars(sys.modules[part.architecture.module])
        walk.namespaces.append(space)
        walk.values |= {f"{part.architecture.module}.{name}": ("is", id(value)) for name, value in list(space.items())}
    return walk


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return where values of two walks differ."""
    if before == now:
        return []
    return [where for where in {**before, **now} if before.get(where, _ABSENT) != now.get(where, _ABSENT)]


class Snapshot:
    """What :meth:`StepSource.reason` and :func:`fingerprint.fingerprint` depend on, as it was at one time.

    Everything that a module holds is known by its identity and, where Python can change it in place, by its value, so
    that a replaced module, parameter, hook, method, class or setting is noticed, and an entry of a list that is another
    one. Of tensors the snapshot also knows where their data are.

    Args:
        part: a model.
        walk: through the model as it is, if there is one already.

    Attributes:
        part: see above.
        reason: against a decode plan of the model, or None.
        tensors: ids of all tensors that modules hold.
        prompt_programs: the programs that ``prompt.read`` keeps while the model is as it was.
    """

    def __init__(self, part: StepSource, walk: Walk | None = None):
        self.part = part
        self.reason: str | None = None
        self.prompt_programs: dict[tuple, Any] = {}
        self._restless: set[tuple[int, str]] = set()
        self._facts = _facts_of(part)
        self._take(walk_of(part) if walk is None else walk)
        self._values: Mapping[str, Any] = self._walk.values if part.held is None else part.held.values

    def _take(self, walk: Walk) -> None:
        """Know the model by the identities of all that a walk has met."""
        self._walk, self._watch = walk, Watch(walk, partial(_facts_of, self.part), self._restless)
        self.tensors = frozenset(walk.tensors)

    def holds(self) -> bool:
        """Whether everything is as it was, for certain."""
        return self._watch.holds() and (self.part.code is None or self.part.code.holds())

    def what_differs(self, walk: Walk) -> list[str]:
        """Return where values differ from what they were; nothing if only objects were replaced by equal ones.

        Args:
            walk: through the model as it is now.
        """
        found, code = differences(self._values, walk.values), self.part.code
        if _facts_of(self.part) != self._facts:
            return ["angles of positions, or weights behind hooks"]
        return found if code is None else [*code.that_matter(found, walk.modules), *code.what_differs()]

    def renew(self, walk: Walk) -> None:
        """Know the model by the objects that it holds now, whose values are what they were."""
        self._restless |= walk.attributes(differences(self._values, walk.values))  # which do not matter
        self._take(walk)
        before = vars(self).pop("fingerprint", None)
        if self.fingerprint != before:  # what programs read is elsewhere
            self.prompt_programs = {}

    def held_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that modules hold."""
        return list(self._walk.tensors.values())

    @cached_property
    def fingerprint(self) -> tuple:
        """:func:`fingerprint.fingerprint` of the model."""
        return self.part.fingerprint()
