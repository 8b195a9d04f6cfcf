"""Quantized weights in a recorded list: matrices without data stand for them, which passes treat as any other."""

from __future__ import annotations

from typing import Any

import torch

from ..decode.named_calls import Call, tensors_in
from ..decode.weight import PlainWeight, Weight
from . import marks
from .recording import Recording, Unrecordable

#: marks whose matrices may stand for quantized weights
_OF_PRODUCTS = (marks.linear, marks.gated, marks.projected_attention)


class QuantizedWeights:
    """The quantized weights of a recorded list; ``in`` says whether a matrix stands for one, or for rows of one."""

    def __init__(self, recording: Recording):
        self._layers = {_memory(matrix): layer for matrix, layer in recording.quantized}

    def __contains__(self, matrix: Any) -> bool:
        return isinstance(matrix, torch.Tensor) and matrix.is_meta and _memory(matrix) in self._layers

    def weight(self, matrix: torch.Tensor, transposed: bool = False) -> Weight:
        """Return what a matrix is, or the rows of a quantized weight that it stands for."""
        if matrix not in self:
            return PlainWeight(matrix, transposed)
        whole = self._layers[_memory(matrix)].packed
        first = matrix.storage_offset() // whole.in_features
        return whole.split([first, len(matrix), len(whole.quants) - first - len(matrix)])[1]

    def check(self, call: Call) -> None:
        """Raise if a call reads a quantized weight otherwise than by a product.

        Raises:
            Unrecordable: it does.
        """
        if call.op not in _OF_PRODUCTS and any(each in self for each in tensors_in(call.arguments)):
            raise Unrecordable("a quantized weight that is read otherwise than by a product")


def _memory(matrix: torch.Tensor) -> int:
    return matrix.untyped_storage()._cdata
