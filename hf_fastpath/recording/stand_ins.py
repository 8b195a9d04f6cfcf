"""Matrices without data that stand for weights of several tensors, which passes treat as any other matrix.

A matrix stands for a quantized weight, or for a weight with adapters behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .. import compat
from ..decode.calls.named_calls import Call, tensors_in
from ..decode.model.weight import PlainWeight, Weight
from . import marks
from .errors import StandInRead
from .recorded_step import Recording

#: marks whose matrices may be stand-ins
_OF_PRODUCTS = (marks.linear, marks.gated, marks.projected_attention, marks.experts, marks.routed_experts)


class StandIns:
    """The weights that matrices of a recorded list stand for; ``in`` says whether a matrix is a stand-in, or rows of
    one."""

    def __init__(self, recording: Recording):
        self._weights = {compat.memory_of(matrix): weight for matrix, weight in recording.stand_ins}

    def __contains__(self, matrix: Any) -> bool:
        return isinstance(matrix, torch.Tensor) and matrix.is_meta and compat.memory_of(matrix) in self._weights

    def weight(self, matrix: torch.Tensor, transposed: bool = False) -> Weight:
        """Return what a matrix is, or the rows of a weight that it stands for."""
        if matrix not in self:
            return PlainWeight(matrix, transposed)
        whole = self._weights[compat.memory_of(matrix)]
        if transposed or len(matrix) == whole.out_features:
            return whole
        first = matrix.storage_offset() // matrix.shape[1]
        return whole.rows(first, len(matrix))

    def stack(self, matrices: torch.Tensor) -> torch.Tensor | Weight:
        """Return matrices of experts as they are, or the weight that they stand for, whose rows are all of theirs."""
        return self._weights[compat.memory_of(matrices)] if matrices in self else matrices

    def tensors_in(self, call: Call) -> Iterator[torch.Tensor]:
        """Yield the tensors that a call reads, in the place of stand-ins those of the weights that these stand for."""
        for each in tensors_in(call.arguments):
            yield from self._weights[compat.memory_of(each)].tensors if each in self else [each]

    def check(self, call: Call) -> None:
        """Raise if a call reads a stand-in otherwise than by a product.

        Raises:
            StandInRead: it does.
        """
        if call.op not in _OF_PRODUCTS and any(each in self for each in tensors_in(call.arguments)):
            raise StandInRead("a quantized weight, or one with adapters, that is read otherwise than by a product")
