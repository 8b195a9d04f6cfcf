"""The module that replaces a table of embeddings whose weight is quantized."""

from __future__ import annotations

import torch

from ..choices import PackedFormat
from ..quantization.formats import PackedWeight
from .packed_linear import PackedLinear


def packed_rows(
    tokens: torch.Tensor,
    quants: torch.Tensor,
    scales: torch.Tensor,
    format: PackedFormat,
    multiplier: float,
    width: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return rows of a quantized weight, [*tokens.shape, width], rounded to ``dtype``.

    Args:
        tokens: int64, rows of the weight.
        quants, scales, format, multiplier: the weight.

    Raises:
        IndexError: on the CPU, a row is not there.
    """
    at = tokens.reshape(-1)
    rows = PackedWeight.of_parts(
        width, quants.index_select(0, at), scales.index_select(0, at), None, multiplier, format
    )
    return rows.dequantize(dtype).view(*tokens.shape, width)


class PackedEmbedding(PackedLinear):
    """A table of embeddings whose rows are quantized; a call dequantizes the rows that it looks up.

    Args:
        weight: the quantized weight, a row for each token.
        dtype: type of the embeddings, which a cast of the module changes.
    """

    padding_idx, max_norm = None, None

    def __init__(self, weight: PackedWeight, dtype: torch.dtype):
        super().__init__(weight, None, dtype)

    @property
    def num_embeddings(self) -> int:
        return self.out_features

    @property
    def embedding_dim(self) -> int:
        return self.in_features

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of token ids, [..., embedding_dim]."""
        weight = self.in_order
        return packed_rows(
            input, weight.quants, weight.scales, weight.number, weight.multiplier, self.in_features, self.dtype
        )

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format.name}"
