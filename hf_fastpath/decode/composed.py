"""Operations that no kernel has, as compositions of PyTorch ops: a decode plan records them beside the kernels, and a
CUDA graph captures them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ..choices import Activation
from ..ops import fused_experts, topk_softmax


def unit_offset_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Compute the layer norm with the factor ``1 + weight``."""
    return nn.functional.layer_norm(x, weight.shape, 1 + weight, bias, eps)


def plain_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute the RMS norm without a weight, in float32 and rounded once."""
    return nn.functional.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


def concatenated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Put features side by side."""
    return torch.cat((q, k, v), dim=-1)


def ungrouped(qkv: torch.Tensor, head_dim: int, group: int) -> torch.Tensor:
    """Reorder features that lie by KV head (``group`` queries, a key, a value) to ``query | key | value``."""
    heads = qkv.unflatten(-1, (-1, group + 2, head_dim))
    return torch.cat([part.flatten(2) for part in heads.split((group, 1, 1), dim=3)], dim=-1)


def repeated_kv(qkv: torch.Tensor, num_heads: int, head_dim: int, group: int) -> torch.Tensor:
    """Repeat every key and value head of ``query | key | value`` ``group`` times, once for each query head."""
    q, kv = qkv.unflatten(-1, (-1, head_dim)).tensor_split((num_heads,), dim=2)
    return torch.cat((q, kv.repeat_interleave(group, dim=2)), dim=2).flatten(2)


def experts_and_weights(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    residual: torch.Tensor | None,
    top_k: int,
    normalized: bool,
    rounded: bool,
    activation: Activation,
    programmatic_launch: bool,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    transposed: bool,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``ops.fused_experts`` with the ``top_k`` experts whose ``logits``, [..., num_experts], are largest.

    Args:
        top_k: number of experts for a row.
        normalized, rounded: of ``ops.topk_softmax``; all other arguments are those of ``ops.fused_experts``.

    Returns:
        The output, of x's shape and dtype; and the experts' weights, float32 [rows, top_k].
    """
    scores = logits.flatten(0, -2)
    ids = torch.empty(len(scores), top_k, dtype=torch.int64, device=x.device)
    weights = topk_softmax.overload(scores, ids, normalized, rounded, programmatic_launch)
    stacks, settings = (gate_up_weight, down_weight), (gate_up_bias, down_bias, transposed, alpha, limit)
    return fused_experts.overload(
        x, ids, weights, *stacks, residual, activation, programmatic_launch, *settings
    ), weights


def routed_experts(*arguments: Any) -> torch.Tensor:
    """Return the output of :func:`experts_and_weights`."""
    return experts_and_weights(*arguments)[0]


routed_experts.__signature__ = inspect.signature(experts_and_weights)


def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Compute ``factor * x``, with the factor rounded to x's dtype first."""
    return x * factor.to(x.dtype)


def scaled_sum(x: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
    """Compute ``x + factor * y``."""
    return torch.add(x, y, alpha=factor)


def soft_capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Compute ``cap * tanh(x / cap)``."""
    return torch.tanh(x / cap) * cap
