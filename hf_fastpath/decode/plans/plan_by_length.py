"""A decode plan of a model whose steps differ with the length of the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..sources.step_source import StepSource
from .decode_plan import DecodePlan


class PlanByLength:
    """Decode plans that follow one another as a text grows; used as :class:`.decode_plan.DecodePlan`` is.

    Args:
        part: the model; its ``by_length`` gives the parts for other lengths.
        fingerprint: of the model.
        batch: number of sequences.
        length: tokens that the cache holds.
        make: takes or makes the plan of a part.
    """

    def __init__(
        self, part: StepSource, fingerprint: tuple, batch: int, length: int, make: Callable[[Any], DecodePlan]
    ):
        self.fingerprint, self.batch = fingerprint, batch
        self._first, self._make = part, make
        self._encoded: int | None = None
        self._part = self._part_for(length)
        self._plan: DecodePlan = make(self._part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def _part_for(self, length: int) -> StepSource:
        return self._first.by_length.part_for(length, self._encoded, self.batch)

    def begin(
        self, cache: Any, positions: torch.Tensor, starts: Any, unfinished: Any = None, *others: Any, **named: Any
    ) -> None:
        """Do as :meth:`.decode_plan.DecodePlan.begin``."""
        encoded = named.get("encoded", others[3] if len(others) > 3 else None)
        self._encoded = None if encoded is None else encoded.layers[0].k.shape[2]
        self._given = starts, others, named
        if (part := self._part_for(cache.get_seq_length())) is not self._part:
            self._take(part)
        self._plan.begin(cache, positions, starts, unfinished, *others, **named)

    def _take(self, part: StepSource) -> None:
        """Let the plan of a part take the place of the plan in hand."""
        old, self._part, self._plan = self._plan, part, self._make(part)
        old.end()

    def step(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Do as :meth:`.decode_plan.DecodePlan.step``."""
        plan, cache = self._plan, self._plan.cache
        length = cache.get_seq_length()
        if (part := self._part_for(length)) is not self._part:
            starts, others, named = self._given
            tokens = plan.inputs[:, 0].clone() if tokens is None else tokens
            unfinished, positions = plan.unfinished.clone(), plan.next_positions()
            self._take(part)
            self._plan.begin(cache, positions, starts, unfinished, *others, **named)
        return self._plan.step(tokens)


#: what serves a call of ``generate()``, whichever texts its steps are the model's for
AnyPlan = DecodePlan | PlanByLength
