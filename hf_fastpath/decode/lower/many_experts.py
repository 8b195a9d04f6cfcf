"""Mixtures of experts for many rows: what ``ops.fused_experts`` and ``ops.routed_experts`` compute, for any number of
rows. Pairs of a row and an expert are sorted by expert, so that the rows of an expert are one product with its matrix
where that lies: no weights are copied or converted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ... import ops
from ...choices import Activation, Scoring
from ...expert_pairs import one_by_one, sorted_pairs
from ...ops.fused_experts import UNGATED, clamped
from ...ops.gemv import MAX_ROWS
from ...options import MAX_BATCH
from ...registry import PLAIN_TENSORS
from ..calls.named_calls import Call
from . import composed, packed_experts

#: elements of a down matrix up to which an expert's calls from Python take longer than its products; measured on a
#: Zen 4 core
_SMALL = 1 << 15
#: pairs of an expert in the mean from which on PyTorch's products of bfloat16 are faster than ``ops.gemm`` over the few
#: features of an expert
_MANY_PAIRS = 32
#: elements that are weighted in float32 at once
_WEIGHTED = 1 << 24
#: bytes that grouped products want matrices and rows to be aligned to
_ALIGNED = 16
#: compute capabilities on which PyTorch has a kernel for grouped products of bfloat16 that reads offsets on the device
_GROUPED_ON = frozenset({9, 10})
#: arguments of ``ops.routed_experts`` that are of a shared expert
OF_SHARED = ("shared_gate_weight", "shared_up_weight", "shared_down_weight", "shared_logits")


def routed_experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    top_k: int,
    product: Callable[..., torch.Tensor],
    residual: torch.Tensor | None = None,
    normalized: bool = True,
    rounded: bool = False,
    activation: Activation = Activation.SILU,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    transposed: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    concatenated: bool = False,
    first_expert: int | None = None,
    scoring: Scoring = Scoring.SOFTMAX,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_tops: int = 2,
    factor: float = 1.0,
    sum_eps: float = 0.0,
) -> torch.Tensor:
    """Do as ``ops.routed_experts`` without norm and shared expert, for any number of rows."""
    router = scoring, correction_bias, num_groups, top_groups, group_tops, factor, sum_eps
    ids, weights = composed.chosen(logits, top_k, normalized, rounded, False, *router)
    return chosen_experts(
        x,
        ids,
        weights,
        gate_up_weight,
        down_weight,
        product,
        activation,
        residual,
        gate_up_bias,
        down_bias,
        transposed,
        alpha,
        limit,
        concatenated,
        first_expert or 0,
    )


def scaled_experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    top_k: int,
    product: Callable[..., torch.Tensor],
    activation: Activation,
) -> torch.Tensor:
    """Do as ``composed.scaled_experts``."""
    shares, ids = logits.flatten(0, -2).topk(top_k)
    rows = (x.reshape(len(ids), 1, -1) * shares.float().sigmoid().to(x.dtype)[..., None]).flatten(0, 1)
    ones = torch.ones(len(rows), 1, dtype=torch.float32, device=x.device)
    given = rows, ids.reshape(-1, 1), ones, gate_up_weight, down_weight
    out = chosen_experts(*given, product, activation, transposed=True, concatenated=True)
    return out.view(*ids.shape, -1).sum(1).view(x.shape)


def chosen_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    product: Callable[..., torch.Tensor],
    activation: Activation = Activation.SILU,
    residual: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    transposed: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    concatenated: bool = False,
    first_expert: int = 0,
) -> torch.Tensor:
    """Do as ``ops.fused_experts`` for any number of rows.

    The same arguments give the same result: each row's experts are added in an order that depends on its choice alone.

    Args:
        x: [..., hidden_size].
        ids, weights: [rows, top_k] of any integers and floats: experts, of which those of the stacks are
            ``first_expert`` and those behind it, and what their outputs are multiplied by.
        product: ``ops.gemm``, or what computes the same; it multiplies the rows of one expert.
        residual: [..., hidden_size] or None.
        gate_up_weight, down_weight, gate_up_bias, down_bias, activation, transposed, alpha, limit, concatenated: as of
            ``ops.fused_experts``.

    Returns:
        [..., hidden_size] in x's dtype, contiguous.

    Source: transformers ``integrations/moe.py@5.24``, ``grouped_mm_experts_forward``.
    """
    rows, count = x.reshape(len(ids), -1), len(down_weight)
    local = ids.long().flatten() - first_expert
    sorted_ids, order, ends = sorted_pairs(local, count)
    how = activation, transposed, alpha, limit, concatenated
    layers = (gate_up_weight, gate_up_bias), (down_weight, down_bias)
    if _are_grouped(len(order), gate_up_weight, down_weight):
        found = _grouped(rows, weights, sorted_ids, order, ends, layers, how)
    else:
        found = _one_by_one(rows, weights, order, ends, layers, how, product)
    out = found.to(x.dtype).view(x.shape)
    return out if residual is None else out.add_(residual)


def most_sequences(mixtures: Iterable[Mapping[str, Any]]) -> int:
    """Return how many sequences a step may have, given arguments of its mixtures: MAX_ROWS, or more where the host does
    not wait for the choice of experts, so that a CUDA graph holds the step."""
    return MAX_ROWS if any(map(_wait, mixtures)) else MAX_BATCH


def waits_for_choice(call: Call) -> bool:
    """Whether the host waits in a call until a GPU has chosen experts, which a CUDA graph cannot hold."""
    if call.op in packed_experts.OF_PACKED:
        return call.arguments["stacks"].down.device.type != "cpu"
    return call.op in OF_MANY.values() and _wait(call.arguments)


def _wait(mixture: Mapping[str, Any]) -> bool:
    """Whether the host waits for the choice of experts with these arguments, of many rows."""
    stacks = mixture["gate_up_weight"], mixture["down_weight"]
    if all(each.device.type == "cpu" for each in stacks):
        return False
    if not all(type(each) in PLAIN_TENSORS and each.dtype == torch.bfloat16 for each in stacks):
        return True
    return not _take_grouped(*stacks) or torch.cuda.get_device_capability(stacks[0].device)[0] not in _GROUPED_ON


def _are_grouped(pairs: int, gate_up_weight: torch.Tensor, down_weight: torch.Tensor) -> bool:
    """Whether one call of PyTorch multiplies the rows of all experts."""
    if not _take_grouped(gate_up_weight, down_weight):
        return False
    if down_weight.device.type != "cpu" or down_weight[0].numel() <= _SMALL:
        return True
    return down_weight.dtype == torch.bfloat16 and pairs > _MANY_PAIRS * len(down_weight)


def _take_grouped(*stacks: torch.Tensor) -> bool:
    """Whether PyTorch's grouped products take such weights, and rows of as many features."""
    for stack in stacks:
        steps = (*stack.shape[1:], *stack.stride()[:2])
        if stack.stride(2) != 1 or any(each * stack.element_size() % _ALIGNED for each in steps):
            return False
    return not any(stack.data_ptr() % _ALIGNED for stack in stacks)


def _grouped(rows, weights, sorted_ids, order, ends, layers, how) -> torch.Tensor:
    """Return [rows, hidden_size], computed without waiting for the choice."""
    top_k, transposed, count = weights.shape[1], how[1], len(ends)
    known, places = sorted_ids.clamp(max=count - 1), order // top_k

    def product(given: torch.Tensor, stack: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        made = nn.functional.grouped_mm(given, stack if transposed else stack.mT, offs=ends)
        return made if bias is None else made.add_(bias[known])

    both = product(rows[places], *layers[0])
    hidden = _activated(both, *how)
    del both
    made = product(hidden, *layers[1])
    del hidden
    by_pair = torch.empty_like(made).index_copy_(0, order, made).unflatten(0, (-1, top_k))
    del made
    # what grouped products leave of pairs of other experts may be anything
    is_known = torch.empty_like(order, dtype=torch.bool).index_copy_(0, order, sorted_ids < count)
    parts, at_once = [], max(1, _WEIGHTED // max(1, by_pair[0].numel()))
    for each in zip(*(given.split(at_once) for given in (by_pair, weights, is_known.view(-1, top_k)))):
        outputs, shares, are_known = each
        parts.append((outputs * shares.float().unsqueeze(-1)).masked_fill_(~are_known.unsqueeze(-1), 0).sum(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _one_by_one(rows, weights, order, ends, layers, how, product) -> torch.Tensor:
    """Return [rows, hidden_size] in float32: experts that were chosen run one after the other."""
    transposed = how[1]

    def layer(given: torch.Tensor, expert: int, stack: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        added = None if bias is None else bias[expert]
        return product(given, stack[expert], added, None, Activation.NONE, transposed)

    def compute(expert: int, mine: torch.Tensor) -> torch.Tensor:
        hidden = _activated(layer(rows[mine], expert, *layers[0]), *how)
        return layer(hidden, expert, *layers[1])

    return one_by_one(rows, weights, order, ends, compute)


def _activated(both, activation, transposed, alpha, limit, concatenated) -> torch.Tensor:
    """Return what goes into the product with down, given gate and up features as the weights have them."""
    if activation == UNGATED:
        return torch.relu_(both).square_()
    is_alternating = transposed and not concatenated
    gate, up = (both[..., ::2], both[..., 1::2]) if is_alternating else both.chunk(2, dim=-1)
    if activation == Activation.CLAMPED_SWIGLU:
        return clamped(gate, up, alpha, limit)
    return ops.fused_swiglu.overload(gate, up, activation)


#: what runs experts for a few rows -> what computes the same for any number of rows
OF_MANY: dict[Any, Callable[..., torch.Tensor]] = {
    ops.routed_experts.overload: routed_experts,
    composed.run_experts: chosen_experts,
    composed.scaled_experts: scaled_experts,
}
