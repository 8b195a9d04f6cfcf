"""A decoder layer over a few new tokens, as op calls.

Every function takes ``emit(op, **arguments)``. A patched module passes :func:`run`, which calls the op at once; a
decode plan passes the ``emit`` of its program, which records the call. So there is one description of the layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .. import ops
from ..choices import Activation, NormKind
from ..ops.kv_cache import KVCache
from ..quantization.linear import joined as joined_weights
from . import composed
from .attention_part import AttentionPart
from .modules import is_packed, is_transposed, weight_and_bias
from .named_calls import Emit, Norm, run
from .parts import FeedForwardPart, MLPPart, MoEPart, NormPart
from .structure import LayerPart, ModelPart

__all__ = ["Emit", "Positions", "Staging", "run"]

_aten = torch.ops.aten


class Staging:
    """Buffers for keys and values of a layer's new tokens before they are quantized; the layers take turns.

    The buffers are float32 caches of query_len slots.

    Args:
        seq_lens: int32 [batch], each query_len.
        shapes: number of heads and head_dim of the layers' caches.
    """

    def __init__(self, seq_lens: torch.Tensor, query_len: int, shapes: set[tuple[int, int]]):
        self.seq_lens = seq_lens
        self._buffers = {
            (heads, dim): [
                torch.zeros(len(seq_lens), heads, query_len, dim, dtype=torch.float32, device=seq_lens.device)
                for _ in range(2)
            ]
            for heads, dim in shapes
        }

    def of(self, part: AttentionPart) -> KVCache:
        """Return K and V, [batch, heads, query_len, head_dim], for ``part``."""
        return KVCache(*self._buffers[part.cache_shape])


@dataclass
class Positions:
    """The places of the new tokens, as tensors or as registers of a plan.

    Attributes:
        angles: cos and sin for every kind of layer, [batch or 1, query_len, rotary_dim] in the model's dtype; see
            ``AttentionPart.layer_type``. The dict is empty without rotary embedding.
        seq_lens: int32 [batch], tokens that a row holds with the new ones.
        starts: int32 [batch], left padding of each row, or None.
        kv_tables: for caches with pages (True) and others (False), see ``ops.rope_append``; without a table, the
            caches' own addresses are used.
        workspace: see ``ops.decode_attention``.
        programmatic_launch: a kernel may start on what does not depend on the kernel in front; see ``ops.gemv``.
        staging: where keys and values of the new tokens wait for ``ops.quantizing_attention``; None if projections
            append to the cache.
        kv_dtype: storage type of the caches, None if it is not known.
    """

    angles: dict[str | None, tuple[Any, Any]]
    seq_lens: Any
    starts: Any
    kv_tables: Mapping[bool, Any] = field(default_factory=dict)
    workspace: Any = None
    programmatic_launch: bool = False
    staging: Staging | None = None
    kv_dtype: torch.dtype | None = None

    def placed(self, cache: KVCache, layer: int) -> KVCache:
        """Return a layer's cache with the ``kv_table`` that serves it."""
        table = self.kv_tables.get(cache.is_paged)
        return cache if table is None else replace(cache, table=table, layer=layer)

    def store(self, part: AttentionPart, cache: KVCache) -> dict[str, Any]:
        """Return where projections append: cache and seq_lens."""
        if self.staging is None or part.softcap:
            return {"cache": cache, "seq_lens": self.seq_lens}
        return {"cache": self.staging.of(part), "seq_lens": self.staging.seq_lens}

    def angles_of(self, part: AttentionPart) -> dict[str, Any]:
        """Return the cos and sin that ``part`` uses, None if it does not rotate; and which elements turn together."""
        cos, sin = self.angles[part.layer_type] if part.rotates else (None, None)
        return {"cos": cos, "sin": sin, "neighbors": part.spec.pairs == "neighbors"}


def norm_of(part: NormPart | None) -> Norm | None:
    """Return the norm of an op's input in the form that calls take."""
    if part is None:
        return None
    kind = NormKind.RMS_OFFSET if part.architecture.norm.unit_offset else NormKind(part.architecture.norm.kind)
    return Norm(kind, part.module.weight, getattr(part.module, "bias", None), part.eps)


def projection(
    emit: Emit,
    linear: nn.Module,
    x: Any,
    residual: Any = None,
    activation: Activation = Activation.NONE,
    norm: NormPart | None = None,
    programmatic_launch: bool = False,
) -> Any:
    """Emit ``activation(linear(norm(x))) + residual``."""
    behind = dict(residual=residual, activation=activation, norm=norm_of(norm), programmatic_launch=programmatic_launch)
    if is_packed(linear):
        return emit(ops.packed_gemv.overload, x=x, **packed(linear.op_weight()), bias=linear.bias, **behind)
    weight, bias = weight_and_bias(linear)
    transposed = is_transposed(linear)
    return emit(ops.gemv.overload, x=x, weight=weight, bias=bias, transposed=transposed, **behind)


def packed(weight: tuple) -> dict[str, Any]:
    """Return a quantized weight as arguments of an op."""
    return dict(zip(("quants", "scales", "zeros", "multiplier", "format"), weight))


def joined(linears: list[nn.Module]) -> dict[str, Any] | None:
    """Return quantized projections of one input as one weight, if they lie side by side in memory; else None."""
    together = joined_weights(linears) if all(map(is_packed, linears)) else None
    return None if together is None else packed(together)


def _norm_op(part: NormPart) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return an op that computes the norm of ``x``, and the op's other arguments."""
    norm = norm_of(part)
    weight = {"weight": norm.weight, "eps": norm.eps}
    if norm.kind.is_rms:
        return ops.rms_norm.overload, weight | {"weight_offset": norm.kind.weight_offset}
    return ops.layer_norm.overload, weight | {"bias": norm.bias}


def norm(emit: Emit, part: NormPart, x: Any, residual: Any = None) -> Any:
    """Emit ``residual + part(x)``."""
    op, arguments = _norm_op(part)
    return emit(op, x=x, **arguments, residual=residual)


def _queries_composed(
    emit: Emit, part: AttentionPart, x: Any, cache: KVCache, at: Positions, norm: NormPart | None
) -> Any:
    """Emit what ``ops.qkv_rope_append`` computes, for attention that the op does not support."""
    linears = part.projections()[:-1]
    together = None if part.head_norms else joined(linears)
    if together is not None:
        qkv = emit(
            ops.packed_gemv.overload, x=x, **together, norm=norm_of(norm), programmatic_launch=at.programmatic_launch
        )
    else:
        projected = [
            projection(emit, linear, x, norm=norm, programmatic_launch=at.programmatic_launch) for linear in linears
        ]
        for place, each in enumerate(part.head_norms):
            _, arguments = _norm_op(each)
            projected[place] = emit(composed.head_norm, x=projected[place], **arguments)
        qkv = projected[0] if len(projected) == 1 else emit(composed.concatenated, *projected)
    if part.spec.by_kv_head:
        qkv = emit(composed.ungrouped, qkv=qkv, head_dim=part.head_dim, group=part.group)
    if part.repeats_kv:
        sizes = dict(num_heads=part.num_heads, head_dim=part.head_dim, group=part.group)
        qkv = emit(composed.repeated_kv, qkv=qkv, **sizes)
    store = at.store(part, cache) | at.angles_of(part)
    return emit(ops.rope_append.overload, qkv=qkv, bias=None, **store, num_heads=part.num_heads)


def attention(
    emit: Emit,
    part: AttentionPart,
    x: Any,
    cache: KVCache,
    at: Positions,
    layer: int,
    residual: Any = None,
    norm: NormPart | None = None,
) -> Any:
    """Emit ``residual + part(norm(x))``, which appends to ``cache``, the cache of the model's ``layer``-th layer."""
    *qkv, out = part.projections()
    placed = at.placed(cache, layer)
    together = None if part.is_composed or cache.is_paged else joined(qkv)
    if together is None and (part.is_composed or any(map(is_packed, qkv))):
        queries = _queries_composed(emit, part, x, placed, at, norm)
    else:
        store = at.store(part, placed) | at.angles_of(part)
        store |= dict(num_heads=part.num_heads, norm=norm_of(norm), programmatic_launch=at.programmatic_launch)
        if together is not None:
            queries = emit(ops.packed_qkv_rope_append.overload, x=x, **together, **store)
        else:
            absent = [None] * (3 - len(qkv))  # one projection may hold q, k and v
            kinds = ("weight", "bias")
            weights = {
                f"{role}_{kind}": each
                for kind in kinds
                for role, each in zip("qkv", [getattr(linear, kind) for linear in qkv] + absent)
            }
            queries = emit(ops.qkv_rope_append.overload, x=x, **weights, transposed=is_transposed(qkv[0]), **store)
    seen = dict(seq_lens=at.seq_lens, starts=at.starts, scale=part.scaling, window=part.window or 0)
    how = dict(workspace=at.workspace, programmatic_launch=at.programmatic_launch, sinks=part.sinks)
    if part.softcap:
        mixed = emit(composed.soft_capped_attention, q=queries, cache=cache, **seen, cap=part.softcap)
    elif at.staging is not None:
        new = at.staging.of(part)
        mixed = emit(ops.quantizing_attention.overload, q=queries, k=new.k, v=new.v, cache=placed, **seen, **how)
    else:
        mixed = emit(ops.decode_attention.overload, q=queries, cache=placed, **seen, **how)
    return projection(emit, out, mixed, residual, programmatic_launch=at.programmatic_launch)


def mlp(
    emit: Emit,
    part: MLPPart,
    x: Any,
    residual: Any = None,
    norm: NormPart | None = None,
    programmatic_launch: bool = False,
) -> Any:
    """Emit ``residual + part(norm(x))``."""
    how = dict(activation=part.activation, norm=norm_of(norm), programmatic_launch=programmatic_launch)
    if part.gate is None:
        hidden = projection(
            emit, part.up, x, activation=part.activation, norm=norm, programmatic_launch=programmatic_launch
        )
    elif (together := joined(part.projections()[:-1])) is not None:
        hidden = emit(ops.packed_gemv_swiglu.overload, x=x, **together, **how)
    elif not is_packed(part.up) and not is_packed(part.gate) and part.gate.bias is None and part.up.bias is None:
        gate, up = part.gate_and_up()
        hidden = emit(ops.gemv_swiglu.overload, x=x, gate_weight=gate, up_weight=up, **how)
    else:
        gate, up = (
            projection(emit, linear, x, norm=norm, programmatic_launch=programmatic_launch)
            for linear in (part.gate, part.up)
        )
        hidden = emit(ops.fused_swiglu.overload, gate=gate, up=up, activation=part.activation)
    return projection(emit, part.down, hidden, residual, programmatic_launch=programmatic_launch)


def mixture(
    emit: Emit,
    part: MoEPart,
    x: Any,
    residual: Any = None,
    norm: NormPart | None = None,
    programmatic_launch: bool = False,
    experts: Callable[..., Any] = composed.routed_experts,
) -> Any:
    """Emit ``residual + part(norm(x))`` as ``experts`` computes it; ``composed.experts_and_weights`` is one such op."""
    if norm is not None:  # router and experts share its result
        op, arguments = _norm_op(norm)
        x = emit(op, x=x, **arguments)
    (gate_up, down), (gate_up_bias, down_bias) = part.stacks(), part.stack_biases()
    return emit(
        experts,
        x=x,
        logits=projection(emit, part.router, x, programmatic_launch=programmatic_launch),
        gate_up_weight=gate_up,
        down_weight=down,
        residual=residual,
        top_k=part.top_k,
        normalized=part.is_normalized,
        rounded=part.spec.rounded,
        activation=part.activation,
        programmatic_launch=programmatic_launch,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        transposed=part.spec.transposed,
        **dict(zip(("alpha", "limit"), part.gate_limits)),
    )


def feed_forward(emit: Emit, part: FeedForwardPart, *arguments: Any) -> Any:
    """Emit :func:`mlp` or :func:`mixture`."""
    return (mixture if isinstance(part, MoEPart) else mlp)(emit, part, *arguments)


def _added(emit: Emit, part: LayerPart, stream: Any, post_norm: NormPart | None, block: Callable[[Any], Any]) -> Any:
    """Emit ``stream + residual_multiplier * post_norm(block)``.

    Args:
        block: emits attention or MLP. Its last projection adds its argument, if nothing comes between.
    """
    if post_norm is None and part.residual_multiplier == 1:
        return block(stream)
    out = block(None)
    if post_norm is not None and part.residual_multiplier == 1:
        return norm(emit, post_norm, out, stream)
    if post_norm is not None:
        out = norm(emit, post_norm, out)
    return emit(composed.scaled_sum, x=stream, y=out, factor=part.residual_multiplier)


def decoder_layer(emit: Emit, part: LayerPart, hidden: Any, cache: KVCache, at: Positions, layer: int) -> Any:
    """Emit the whole layer; ``hidden`` is [batch, query_len, hidden_size], and so is the result."""

    def attend(residual: Any) -> Any:
        return attention(emit, part.attention, hidden, cache, at, layer, residual, part.attention_norm)

    attended = _added(emit, part, hidden, part.attention_post_norm, attend)
    source = hidden if part.is_parallel else attended

    def transform(residual: Any) -> Any:
        return feed_forward(emit, part.mlp, source, residual, part.mlp_norm, at.programmatic_launch)

    return _added(emit, part, attended, part.mlp_post_norm, transform)


def step_inputs(emit: Emit, part: ModelPart, tokens: Any, positions: Any, tables: list[Any]) -> tuple[Any, list[Any]]:
    """Emit what the first layer takes.

    Args:
        tokens, positions: int64 [batch, query_len].
        tables: tables of angles.

    Returns:
        [batch, query_len, hidden_size], and the rows of ``tables`` at the positions.
    """
    learned = None if part.position_embedding is None else part.position_embedding.weight
    in_one = part.embedding_scale is None and part.embedding_multiplier == 1  # else there are steps before the sum
    found = emit(
        ops.step_inputs.overload,
        embedding=part.embedding.weight,
        tokens=tokens,
        positions=positions,
        position_embedding=learned if in_one else None,
        position_offset=part.position_offset,
        tables=tables,
    )
    hidden, *rows = (emit(operator.getitem, found, place) for place in range(1 + len(tables)))
    if part.embedding_scale is not None:
        hidden = emit(composed.scaled, x=hidden, factor=part.embedding_scale)
    if part.embedding_multiplier != 1:
        hidden = emit(_aten.mul.Scalar, hidden, part.embedding_multiplier)
    if learned is not None and not in_one:
        if part.position_offset:
            positions = emit(_aten.add.Scalar, positions, part.position_offset)
        hidden = emit(_aten.add.Tensor, hidden, emit(_aten.embedding.default, learned, positions))
    return hidden, rows


def head(emit: Emit, part: ModelPart, hidden: Any, programmatic_launch: bool = False) -> Any:
    """Emit the final norm and the head."""
    return projection(emit, part.head, hidden, norm=part.final_norm, programmatic_launch=programmatic_launch)


def scaled_logits(emit: Emit, part: ModelPart, logits: Any) -> Any:
    """Emit what the model computes from its head's output."""
    if part.logits_multiplier != 1:
        logits = emit(_aten.mul.Scalar, logits, part.logits_multiplier)
    if part.logits_divisor != 1:
        logits = emit(_aten.div.Scalar, logits, part.logits_divisor)
    if part.logits_softcap:
        logits = emit(composed.soft_capped, x=logits, cap=part.logits_softcap)
    return logits
