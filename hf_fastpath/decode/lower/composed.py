"""Operations that no kernel has, as compositions of PyTorch ops: a decode plan records them beside the kernels, and a
CUDA graph captures them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...choices import Activation, Rotation
from ...ops import choose_experts, fused_experts
from ...ops.decode_attention import visible_slots
from ...ops.gemv import MAX_ROWS
from ...ops.kv_cache import dequantized, gathered, quantized
from ...ops.rope_append import rotate


def unit_offset_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Compute the layer norm with the factor ``1 + weight``."""
    return nn.functional.layer_norm(x, weight.shape, 1 + weight, bias, eps)


def by_text(x: torch.Tensor, batch: int) -> torch.Tensor:
    """Return [batch, tokens, ...] of [batch * tokens, 1, ...]."""
    return x.unflatten(0, (batch, -1)).flatten(1, 2)


def by_row(x: torch.Tensor) -> torch.Tensor:
    """Undo :func:`by_text`."""
    return x.flatten(0, 1)[:, None]


def last_rows(x: torch.Tensor, batch: int) -> torch.Tensor:
    """Return the last row of each of so many sequences, [batch, ...], of [batch * tokens, ...]."""
    return x.unflatten(0, (batch, -1))[:, -1]


def token_at(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return [batch, 1, ...], the token at its sequence's ``place``, int64 [batch], of [batch, tokens, ...]."""
    return x.gather(1, place.view(-1, *(1 for _ in x.shape[1:])).expand(-1, 1, *x.shape[2:]))


def row_at(x: torch.Tensor, batch: int, place: torch.Tensor) -> torch.Tensor:
    """Do as :func:`last_rows` with the row at each sequence's ``place``, int64 [batch]."""
    return token_at(x.unflatten(0, (batch, -1)), place)[:, 0]


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
    concatenated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``ops.fused_experts`` with the ``top_k`` experts whose ``logits``, [..., num_experts], are largest.

    Args:
        top_k: number of experts for a row.
        normalized, rounded: of ``ops.choose_experts``; all other arguments are those of ``ops.fused_experts``.

    Returns:
        The output, of x's shape and dtype; and the experts' weights, float32 [rows, top_k].
    """
    ids, weights = chosen(logits, top_k, normalized, rounded, programmatic_launch)
    stacks, biases = (gate_up_weight, down_weight), (gate_up_bias, down_bias)
    settings = (activation, programmatic_launch, *biases, transposed, alpha, limit, concatenated)
    return fused_experts.overload(x, ids, weights, *stacks, residual, *settings), weights


def chosen(logits: torch.Tensor, top_k: int, *settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``ops.choose_experts`` on logits, [..., num_experts]; ``settings`` are its arguments from ``normalized`` on.

    Returns:
        Experts, int64 [rows, top_k], and their weights, float32 [rows, top_k].
    """
    scores = logits.flatten(0, -2)
    ids = torch.empty(len(scores), top_k, dtype=torch.int64, device=logits.device)
    return ids, choose_experts.overload(scores, ids, *settings)


def scaled_experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    top_k: int,
    activation: Activation,
    programmatic_launch: bool,
) -> torch.Tensor:
    """Add what the ``top_k`` experts whose ``logits``, [..., num_experts], are largest make of x times the sigmoid of
    their logits.

    The weights are those of ``ops.fused_experts``, transposed and concatenated.

    Source: transformers ``models/llama4/modeling_llama4.py@5.24``, ``Llama4TextMoe``.
    """
    shares, ids = logits.flatten(0, -2).topk(top_k)
    rows = (x.reshape(len(ids), 1, -1) * shares.float().sigmoid().to(x.dtype)[..., None]).flatten(0, 1)
    settings = (activation, programmatic_launch, None, None, True, 1.702, 7.0, True)
    parts = [
        fused_experts.overload(
            part, choice, torch.ones_like(choice, dtype=torch.float32), gate_up_weight, down_weight, None, *settings
        )
        for part, choice in zip(rows.split(MAX_ROWS), ids.reshape(-1, 1).split(MAX_ROWS))
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.view(*ids.shape, -1).sum(1).view(x.shape)


def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Compute ``factor * x``, with the factor rounded to x's dtype first."""
    return x * factor.to(x.dtype)


def scaled_sum(x: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
    """Compute ``x + factor * y``."""
    return torch.add(x, y, alpha=factor)


def soft_capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Compute ``cap * tanh(x / cap)``."""
    return torch.tanh(x / cap) * cap


def append_states(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> None:
    """Append keys and values, [batch, num_kv_heads, query_len, dim] each, which need not be of the same size."""
    new = (seq_lens[:1].long() - k.shape[2]) + torch.arange(k.shape[2], device=k.device)  # rows are of the same length
    for states, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
        size = cache.shape[2]
        if scales is not None:
            states, of_states = quantized(states, cache.dtype)
            scales.index_copy_(2, new % size, of_states)
        states = states.to(cache.dtype)
        if cache.element_size() == 1:  # PyTorch copies no float8 by index on a CPU
            states, cache = states.view(torch.uint8), cache.view(torch.uint8)
        if block_table is None:
            cache.index_copy_(2, new % size, states)
        else:
            cache[block_table[:, new // size].long(), :, new % size] = states.transpose(1, 2)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn x, [batch, heads, query_len, dim], by angles [batch or 1, query_len, dim], as ``ops.latent_attention``."""
    if rotation == Rotation.NEIGHBORS_TO_HALVES:
        x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    return rotate(x.transpose(1, 2), cos, sin, rotation == Rotation.NEIGHBORS).transpose(1, 2)


def with_turned_end(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn the last elements of q, as many as there are angles; see :func:`rotated`."""
    plain, end = q.tensor_split((q.shape[-1] - cos.shape[-1],), dim=-1)
    return torch.cat((plain, rotated(end, cos, sin, rotation)), dim=-1)


def log_sums(queries: torch.Tensor) -> torch.Tensor:
    """Return memory for the ``lse`` that ``ops.decode_attention`` writes of queries."""
    return queries.new_empty(queries.shape[:3], dtype=torch.float32)


def latent_attention(
    q: torch.Tensor,
    weight: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor | None,
    scale: float,
    window: int,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over a latent, without making keys and values of it: queries are brought to the latent, and the latent
    that they see is brought to values.

    Args:
        q: [batch, num_heads, query_len, plain + rotated].
        weight: [num_heads * (plain + value_dim), latent_dim], see ``recording.latent``.
        k_cache: latents, [batch, 1, capacity, latent_dim].
        v_cache: rotated keys, [batch, 1, capacity, rotated].
        seq_lens, starts, scale, window, k_scales, v_scales, block_table: as of ``ops.decode_attention``.

    Returns:
        [batch, query_len, num_heads, value_dim].

    Source: arXiv:2405.04434, section 2.1.
    """
    rotated, heads = v_cache.shape[-1], q.shape[1]
    plain, by_head = q.shape[-1] - rotated, weight.view(heads, -1, weight.shape[-1])
    at_latent = torch.matmul(q[..., :plain], by_head[:, :plain])
    if k_scales is not None and v_scales is not None:
        k_cache, v_cache = dequantized(k_cache, k_scales, torch.float32), dequantized(v_cache, v_scales, torch.float32)
    k_cache, v_cache = gathered(k_cache, block_table), gathered(v_cache, block_table)
    visible = visible_slots(seq_lens, starts, q.shape[2], k_cache.shape[2], window)[:, None]
    used = visible.any(2)[..., None]  # slots that no token sees may hold anything, NaN included
    latents, keys = (cache.masked_fill(~used, 0).float() for cache in (k_cache, v_cache))
    scores = at_latent.float() @ latents.mT + q[..., plain:].float() @ keys.mT
    seen = visible.any(3, keepdim=True)  # a row of padding sees nothing
    weights = (scale * scores).masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~seen, 0)
    return torch.matmul((weights @ latents).to(q.dtype), by_head[:, plain:].mT).transpose(1, 2)


#: what reads or writes a cache where it is bound
READING_BUFFERS = frozenset({append_states, latent_attention})


def scaled_queries(queries: torch.Tensor, factor: torch.Tensor, query_len: int) -> torch.Tensor:
    """Return queries [batch, query_len, heads, head_dim] times a number for each new token, in the queries' dtype."""
    return (queries * factor.reshape(-1, query_len, 1, 1)).to(queries.dtype)


def chunk_starts(seq_lens: torch.Tensor, starts: torch.Tensor, size: int) -> torch.Tensor:
    """Return int32 [batch], where the windows of ``size`` positions begin that the newest tokens are in."""
    return starts + (seq_lens - 1 - starts) // size * size


def run_angles(
    tables: Any, formula: Callable[..., Sequence[torch.Tensor]], dtype: torch.dtype, pairs: str, shape: Sequence[int]
) -> list[torch.Tensor]:
    """Return cos and sin in the model's dtype, [batch, query_len, rotary_dim]."""
    return [each.reshape(*shape, each.shape[-1]).to(dtype) for each in formula(tables, pairs)]


def run_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    activation: Activation,
    residual: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    transposed: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    concatenated: bool = False,
    first_expert: int = 0,
) -> torch.Tensor:
    """Run ``ops.fused_experts`` with the experts that the model's own code has chosen; see
    ``recording.marks.experts``."""
    settings = (activation, False, gate_up_bias, down_bias, transposed, alpha, limit, concatenated)
    stacks = gate_up_weight, down_weight
    return fused_experts.overload(x, ids.long() - first_expert, weights.float(), *stacks, residual, *settings)
