"""Quantized weights in a recorded list: matrices without data stand for them, which passes treat as any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..decode.named_calls import Call, tensors_in
from ..decode.steps import joined, packed
from ..linears.packed_linear import PackedLinear
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

    def _rows(self, matrix: torch.Tensor) -> PackedLinear:
        """Return a layer of the rows that a matrix stands for, without bias."""
        whole = self._layers[_memory(matrix)].packed
        first = matrix.storage_offset() // whole.in_features
        _, rows, _ = whole.split([first, len(matrix), len(whole.quants) - first - len(matrix)])
        return PackedLinear(rows, None)

    def arguments(self, matrix: torch.Tensor) -> dict[str, Any]:
        """Return the weight that a matrix stands for as ``ops.packed_gemv`` takes it."""
        return packed(self._rows(matrix).op_weight())

    def together(self, matrices: Sequence[torch.Tensor]) -> dict[str, Any] | None:
        """Return weights that lie side by side in memory as one; None if they do not, or are not all quantized."""
        return joined(list(map(self._rows, matrices))) if all(each in self for each in matrices) else None

    def check(self, call: Call) -> None:
        """Raise if a call reads a quantized weight otherwise than by a product.

        Raises:
            Unrecordable: it does.
        """
        if call.op not in _OF_PRODUCTS and any(each in self for each in tensors_in(call.arguments)):
            raise Unrecordable("a quantized weight that is read otherwise than by a product")


def _memory(matrix: torch.Tensor) -> int:
    return matrix.untyped_storage()._cdata
