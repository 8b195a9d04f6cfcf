"""Inputs of products that are changed in front of them: gathered in another order, or rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import ops
from ...choices import InputQuants
from ...quantization import InputRounding, ReorderedWeight, RoundedInputWeight
from ..calls.named_calls import Call, Norm
from ..model.weight import Weight, order_of, rounding_of
from .formulas import Product


def prepared_input(
    to: Any, x: Any, weights: Sequence[Weight], norm: Norm | None
) -> tuple[Any, Sequence[Weight], Norm | None]:
    """Return the input, weights and norm of products of one input.

    If the weights share one order of inputs, the input is gathered once, behind its norm, and they are returned without
    it; likewise if they have their input rounded in one way.

    Args:
        to: a ``which_op.Lower``.
    """
    if (found := order_of(weights)) is not None:
        return to.emit(torch.ops.aten.index_select.default, to.input_behind(x, norm), -1, found[0]), found[1], None
    if (rounded := rounding_of(weights)) is not None:
        rounding, packed = rounded
        how = dict(quants=rounding.quants, limit=rounding.limit, programmatic_launch=to.early)
        return to.emit(ops.fake_quantize.overload, x=x, norm=norm, **how), packed, None
    return x, weights, norm


def mixes_rows(call: Call) -> bool:
    """Whether a call rounds inputs of one row by those of others."""
    if call.op is not ops.fake_quantize.overload:
        return False
    return InputRounding(InputQuants(call.arguments["quants"]), call.arguments["limit"]).mixes_rows


def prepared_product(to: Any, asked: Product[ReorderedWeight | RoundedInputWeight]) -> Any:
    """Emit a product whose weight has its input changed."""
    x, (weight,), _ = prepared_input(to, asked.x, [asked.weight], asked.norm)
    behind = dict(residual=asked.residual, activation=asked.activation, fits=asked.fits)
    return to.product(x, weight, bias=asked.bias, **behind)
