"""Attention over latents, as calls of a plan."""

from __future__ import annotations

from typing import Any

import torch

from .. import ops
from ..choices import Rotation
from ..decode.calls.named_calls import Call
from ..decode.lower import composed
from ..decode.lower.attend import attend_latents
from ..ops.head_products import MAX_INPUTS
from ..ops.latent_attention import MAX_RANK, MAX_ROPE_DIM

_aten = torch.ops.aten


def latent_attend(
    lowering: Any,
    call: Call,
    q: Any,
    states: Any,
    layer: int,
    scale: float,
    window: int,
    weight: Any,
    cos: Any = None,
    sin: Any = None,
    rotation: Rotation = Rotation.HALVES,
) -> Any:
    """Emit what ``marks.latent_attend`` stands for, by way of a ``lowering.Lowering``."""
    at, cache, attention = lowering.at, lowering.caches[layer], lowering.attentions[layer]
    fact, (_, rank), rotated = lowering.recording.fact(call.arguments["q"]), attention.cache_shape, attention.value_dim
    new = lowering.pending.pop(layer, None)
    angles = None if cos is None else dict(cos=cos, sin=sin, rotation=rotation)
    seen = dict(seq_lens=at.seq_lens, starts=lowering.starts(window), scale=scale)
    fits = rank <= MAX_RANK and rotated <= MAX_ROPE_DIM and fact.shape[3] - rotated <= MAX_INPUTS
    is_plain = at.kv_dtype == fact.dtype == weight.dtype and not cache.is_paged
    if fits and is_plain and fact.shape[2] == 1 and not window and not lowering.rows_are_tokens:
        return _of_one_token(lowering, fact, q, layer, weight, new, angles, seen)
    if new is not None:
        k, v = new
        v = v if angles is None else lowering.emit(composed.rotated, x=v, **angles)
        states = dict(k=lowering.by_head(k), v=lowering.by_head(v))
        lowering.emit(composed.append_states, **states, cache=cache, seq_lens=at.seq_lens)
    q = lowering.by_head(q if angles is None else lowering.emit(composed.with_turned_end, q=q, **angles))
    if lowering.to.attention is not None:
        how = dict(attention=lowering.to.attention, q=q, weight=weight, cache=cache, scale=scale)
        return lowering.by_row(lowering.emit(attend_latents, **how))
    given = dict(q=q, weight=weight, cache=cache, window=window)
    return lowering.by_row(lowering.emit(composed.latent_attention, **given, **seen))


def _of_one_token(lowering: Any, fact, q, layer, weight, new, angles, seen) -> Any:
    """Emit attention of one token as ops: queries at the latent, what they see of it, and the values of that."""
    batch, heads, _, dim = fact.shape
    emit, attention = lowering.emit, lowering.attentions[layer]
    cache = lowering.at.placed(lowering.caches[layer], layer)
    rotated, by_head = attention.value_dim, weight.detach().view(heads, -1, attention.cache_shape[1])
    how = dict(programmatic_launch=lowering.to.early)
    q, border = emit(_aten.select.int, q, 2, 0), dim - rotated
    plain, end = (emit(_aten.narrow.default, q, 2, *part) for part in ((0, border), (border, rotated)))
    keys, values = by_head[:, :border], by_head[:, border:]
    at_latent = emit(ops.head_products.overload, x=plain, weight=keys, transposed=True, **how)
    given: dict[str, Any] = {}
    if new is not None:
        rows = [emit(_aten.reshape.default, each, [batch, -1]) for each in new]
        given["new_latent"], given["new_rope"] = rows
    if angles is not None:
        given |= angles | {name: emit(_aten.select.int, angles[name], 1, 0) for name in ("cos", "sin")}
    seen_of_it = emit(
        ops.latent_attention.overload,
        q_latent=at_latent,
        q_rope=end,
        latents=cache.k,
        rope_keys=cache.v,
        kv_table=cache.table,
        layer=cache.layer,
        **seen,
        **given,
        **how,
    )
    made = emit(ops.head_products.overload, x=seen_of_it, weight=values, **how)
    return emit(_aten.unsqueeze.default, made, 1)
