"""Products with weights whose inputs lie in another order: the input is gathered in it first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...quantization import ReorderedWeight
from ..calls.named_calls import Norm
from ..model.weight import Weight, order_of
from .formulas import Product


def in_one_order(
    to: Any, x: Any, weights: Sequence[Weight], norm: Norm | None
) -> tuple[Any, Sequence[Weight], Norm | None]:
    """Return the input, weights and norm of products of one input.

    If the weights share one order, the input is gathered once, behind its norm, and they are returned without it.

    Args:
        to: a ``which_op.Lower``.
    """
    if (found := order_of(weights)) is None:
        return x, weights, norm
    return to.emit(torch.ops.aten.index_select.default, to.input_behind(x, norm), -1, found[0]), found[1], None


def reordered_product(to: Any, asked: Product[ReorderedWeight]) -> Any:
    """Emit a product whose weight has an order of inputs."""
    x, (weight,), _ = in_one_order(to, asked.x, [asked.weight], asked.norm)
    behind = dict(residual=asked.residual, activation=asked.activation, fits=asked.fits)
    return to.product(x, weight, bias=asked.bias, **behind)
