"""The step of rows that have an adapter each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..model.weight import RowOwners
from ..sources.step_source import StepSource
from .decode_plan import DecodePlan


class AdapterRowsPlan(DecodePlan):
    """A decode plan of a model with several adapters, of which each row takes one or none.

    Which row takes which is in the plan's memory, so that one plan serves all calls of so many rows.

    Args:
        part, batch, given: as of a decode plan.
        numbers: address of each adapter's first matrix in a layer -> the adapter's number.
    """

    def __init__(self, part: StepSource, batch: int, *given: Any, numbers: dict[int, int]):
        device = part.embedding.weight.device
        with torch.inference_mode(False):
            self.owners = RowOwners(torch.full((batch,), -1, dtype=torch.int32, device=device), numbers)
        super().__init__(part, batch, *given)

    def seat(self, rows: Sequence[int]) -> None:
        """Give each row the adapter of a number; -1 for none."""
        self.owners.chosen.copy_(torch.tensor(rows, dtype=torch.int32, device="cpu"))
