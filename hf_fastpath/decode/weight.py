"""The matrix of a product as a value of calls: plain or quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..quantization import PackedWeight
from .modules import is_packed, is_transposed, weight_and_bias


@dataclass(frozen=True)
class PlainWeight:
    """A matrix of floats, as a model holds it.

    Attributes:
        matrix: [out_features, in_features], or [in_features, out_features] if ``transposed``.
        transposed: whether the matrix is stored as GPT-2's are.
    """

    matrix: torch.Tensor
    transposed: bool = False

    @property
    def device(self) -> torch.device:
        return self.matrix.device


Weight = PlainWeight | PackedWeight


def weight_of(linear: nn.Module) -> tuple[Weight, torch.Tensor | None]:
    """Return the weight of a projection, and its bias or None."""
    matrix, bias = weight_and_bias(linear)
    return linear.packed if is_packed(linear) else PlainWeight(matrix, is_transposed(linear)), bias


def joined(weights: Sequence[Weight]) -> PackedWeight | None:
    """Return quantized weights that lie side by side in memory as one; None if they do not, or one is plain."""
    packed = [each for each in weights if isinstance(each, PackedWeight)]
    return PackedWeight.joined(packed) if len(packed) == len(weights) else None


def halves(weight: Weight) -> list[Weight]:
    """Return the first and the last half of the output features, as views."""
    if isinstance(weight, PackedWeight):
        return list(weight.split([weight.out_features // 2] * 2))
    parts = weight.matrix.chunk(2, dim=1 if weight.transposed else 0)
    return [PlainWeight(each, weight.transposed) for each in parts]
