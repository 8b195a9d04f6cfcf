"""Mixtures whose experts have quantized weights: functions over tensors, which calls of a step stand for."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ...choices import Activation, NormKind, PackedFormat, Scoring
from ...linears.packed_experts import GateHow, PackedStacks, chosen_experts
from ...ops import packed_experts
from ...ops.gemv import MAX_ROWS
from ...ops.norm import normed
from ...quantization import PackedWeight
from . import composed
from .formulas import Mixture


def routed_and_weights(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up_quants: torch.Tensor,
    gate_up_scales: torch.Tensor,
    gate_up_zeros: torch.Tensor | None,
    gate_up_multiplier: float,
    gate_up_format: PackedFormat,
    down_quants: torch.Tensor,
    down_scales: torch.Tensor,
    down_zeros: torch.Tensor | None,
    down_multiplier: float,
    down_format: PackedFormat,
    top_k: int,
    residual: torch.Tensor | None = None,
    normalized: bool = True,
    rounded: bool = False,
    activation: Activation = Activation.SILU,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    alternating: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    first_expert: int = 0,
    norm: NormKind = NormKind.NONE,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    scoring: Scoring = Scoring.SOFTMAX,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_tops: int = 2,
    factor: float = 1.0,
    sum_eps: float = 0.0,
    programmatic_launch: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``ops.packed_experts`` on ``norm(x)`` with the experts and weights that ``ops.choose_experts`` makes of
    logits, [..., num_experts], for any number of rows.

    Returns:
        The output, and the experts' weights, float32 [rows, top_k].
    """
    router = scoring, correction_bias, num_groups, top_groups, group_tops, factor, sum_eps
    ids, weights = composed.chosen(logits, top_k, normalized, rounded, programmatic_launch, *router)
    first = gate_up_quants, gate_up_scales, gate_up_zeros, gate_up_multiplier, gate_up_format
    second = down_quants, down_scales, down_zeros, down_multiplier, down_format
    if len(ids) <= MAX_ROWS:
        chosen = ids - first_expert if first_expert else ids
        how = activation, gate_up_bias, down_bias, alternating, alpha, limit
        of_norm = norm, norm_weight, norm_bias, norm_eps
        others = *second, residual, *how, *of_norm, programmatic_launch
        return packed_experts.overload(x, chosen, weights, *first, *others), weights
    given = normed(x, norm, norm_weight, norm_bias, norm_eps), ids, weights, *first, *second, activation, residual
    return of_choices(*given, gate_up_bias, down_bias, alternating, alpha, limit, first_expert), weights


def of_choices(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_quants: torch.Tensor,
    gate_up_scales: torch.Tensor,
    gate_up_zeros: torch.Tensor | None,
    gate_up_multiplier: float,
    gate_up_format: PackedFormat,
    down_quants: torch.Tensor,
    down_scales: torch.Tensor,
    down_zeros: torch.Tensor | None,
    down_multiplier: float,
    down_format: PackedFormat,
    activation: Activation,
    residual: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    alternating: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    first_expert: int = 0,
) -> torch.Tensor:
    """Run experts that the model's own code has chosen, see ``recording.marks.experts``, for any number of rows."""
    first = gate_up_quants, gate_up_scales, gate_up_zeros, gate_up_multiplier, gate_up_format
    second = down_quants, down_scales, down_zeros, down_multiplier, down_format
    hidden_size = x.shape[-1]
    width = len(gate_up_quants) // (len(down_quants) // hidden_size) // 2
    stacks = PackedStacks(PackedWeight.of_parts(hidden_size, *first), PackedWeight.of_parts(width, *second))
    how = GateHow(activation, alternating, alpha, limit)
    return chosen_experts(x, ids, weights, stacks, how, gate_up_bias, down_bias, residual, first_expert)


#: what runs mixtures with quantized experts, for any number of rows
OF_PACKED = (routed_and_weights, of_choices)


def packed_mixture(to: Any, asked: Mixture) -> Any:
    """Emit a :class:`Mixture` over quantized weights; ``to`` is a ``which_op.Lower``."""
    given = {name: each for name, each in asked.given.items() if name not in ("transposed", "concatenated")}
    stacks = PackedStacks(given.pop("gate_up_weight"), given.pop("down_weight"))
    if asked.op is composed.run_experts:
        return to.emit(of_choices, stacks=stacks, **given)
    given["first_expert"] = given.get("first_expert") or 0
    both = to.emit(routed_and_weights, stacks=stacks, **given, programmatic_launch=to.early)
    return both if asked.op is composed.experts_and_weights else to.emit(operator.getitem, both, 0)
