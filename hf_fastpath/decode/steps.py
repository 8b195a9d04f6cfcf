"""A decoder layer over a few new tokens, as op calls.

Every function takes ``emit(op, **arguments)``. A patched module passes :func:`run`, which calls the op at once; a
decode plan passes the ``emit`` of its program, which records the call. So there is one description of the layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import ops
from ..choices import Activation, NormKind
from ..compat import ShardStyle
from ..linears.packed_linear import joined as joined_weights
from ..ops.kv_cache import KVCache
from . import composed
from .attention_part import AttentionPart
from .layer_part import LayerPart
from .modules import is_packed, is_transposed, weight_and_bias
from .named_calls import Emit, HeadNorms, Norm, run
from .parts import FeedForwardPart, MLPPart, MoEPart, NormPart
from .positions import Positions
from .program import Program
from .rank_calls import gathered, own_embeddings, own_inputs, own_rows, shard_of, style_of, summed
from .structure import ModelPart

__all__ = ["Emit", "run"]

_aten = torch.ops.aten


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
    """Emit ``activation(linear(norm(x))) + residual``; what all ranks make of it if the layer is spread over ranks."""
    shard, style = shard_of(linear), style_of(linear)
    if style is ShardStyle.SPLIT_ROWS:
        x = emit(own_inputs, x=x, shard=shard)
    is_summed = style in (ShardStyle.ROWS, ShardStyle.SPLIT_ROWS)
    behind = None if is_summed else residual
    made = _product(emit, linear, x, behind, activation, norm, programmatic_launch)
    if is_summed:
        return emit(summed, x=made, residual=residual, shard=shard)
    return emit(gathered, x=made, shard=shard) if style is ShardStyle.GATHERED else made


def _product(
    emit: Emit,
    linear: nn.Module,
    x: Any,
    residual: Any,
    activation: Activation,
    norm: NormPart | None,
    programmatic_launch: bool,
) -> Any:
    """Emit :func:`projection` of what this rank has of the layer."""
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


def _norm_op(part: NormPart, programmatic_launch: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return an op that computes the norm of ``x``, and the op's other arguments."""
    norm = norm_of(part)
    weight = {"weight": norm.weight, "eps": norm.eps}
    if norm.kind.is_rms:
        weight |= {"weight_offset": norm.kind.weight_offset, "programmatic_launch": programmatic_launch}
        return ops.rms_norm.overload, weight
    return ops.layer_norm.overload, weight | {"bias": norm.bias}


def norm(emit: Emit, part: NormPart, x: Any, residual: Any = None, programmatic_launch: bool = False) -> Any:
    """Emit ``residual + part(x)``."""
    op, arguments = _norm_op(part, programmatic_launch)
    return emit(op, x=x, **arguments, residual=residual)


def head_norms(part: AttentionPart) -> HeadNorms | None:
    """Return the norms of queries and keys in the form that calls take."""
    if not part.head_norms:
        return None
    q, k = map(norm_of, part.head_norms)
    return HeadNorms(q.weight, k.weight, q.eps, q.kind.weight_offset)


def _queries_composed(
    emit: Emit, part: AttentionPart, x: Any, cache: KVCache, at: Positions, norm: NormPart | None
) -> Any:
    """Emit what ``ops.qkv_rope_append`` computes, for attention that the op does not support."""
    linears = part.projections()[:-1]
    together = joined(linears)
    if together is not None:
        qkv = emit(
            ops.packed_gemv.overload, x=x, **together, norm=norm_of(norm), programmatic_launch=at.programmatic_launch
        )
    else:
        projected = [
            projection(emit, linear, x, norm=norm, programmatic_launch=at.programmatic_launch) for linear in linears
        ]
        qkv = projected[0] if len(projected) == 1 else emit(composed.concatenated, *projected)
    if part.spec.by_kv_head:
        qkv = emit(composed.ungrouped, qkv=qkv, head_dim=part.head_dim, group=part.group)
    if part.repeats_kv:
        sizes = dict(num_heads=part.num_heads, head_dim=part.head_dim, group=part.group)
        qkv = emit(composed.repeated_kv, qkv=qkv, **sizes)
    store = at.store(part, cache) | at.angles_of(part)
    store |= dict(head_norms=head_norms(part), programmatic_launch=at.programmatic_launch)
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
    together = None if part.is_composed or part.head_norms or cache.is_paged else joined(qkv)
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
            store |= dict(transposed=is_transposed(qkv[0]), head_norms=head_norms(part))
            queries = emit(ops.qkv_rope_append.overload, x=x, **weights, **store)
    seen = dict(seq_lens=at.seq_lens, starts=at.starts, scale=part.scaling, window=part.window or 0)
    how = dict(workspace=at.workspace, programmatic_launch=at.programmatic_launch)
    how |= dict(sinks=part.sinks, softcap=part.softcap)
    if at.staging is not None:
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
    elif part.is_fused and style_of(part.up) is ShardStyle.GATHERED:  # a rank's rows are of other features than its own
        both = projection(emit, part.up, x, norm=norm, programmatic_launch=programmatic_launch)
        halves = emit(_aten.chunk.default, both, 2, -1)
        gate, up = (emit(operator.getitem, halves, place) for place in range(2))
        hidden = emit(ops.fused_swiglu.overload, gate=gate, up=up, activation=part.activation)
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
    experts: Callable[..., Any] = ops.routed_experts.overload,
) -> Any:
    """Emit ``residual + part(norm(x))`` as ``experts`` computes it; ``composed.experts_and_weights`` is one such op."""
    if norm is not None and part.spec.transposed:  # the kernels of such experts take no norm
        op, arguments = _norm_op(norm, programmatic_launch)
        x, norm = emit(op, x=x, **arguments), None
    (gate_up, down), (gate_up_bias, down_bias) = part.stacks(), part.stack_biases()
    shard, others = shard_of(part.experts), dict(zip(("alpha", "limit"), part.gate_limits))
    if style_of(part.experts) in (ShardStyle.SOME_EXPERTS, ShardStyle.PICKED_EXPERTS):
        others["first_expert"] = shard.first
    made = emit(
        experts,
        x=x,
        logits=projection(emit, part.router, x, norm=norm, programmatic_launch=programmatic_launch),
        norm=norm_of(norm),
        gate_up_weight=gate_up,
        down_weight=down,
        residual=residual if shard is None else None,
        top_k=part.top_k,
        normalized=part.is_normalized,
        rounded=part.spec.rounded,
        activation=part.activation,
        programmatic_launch=programmatic_launch,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        transposed=part.spec.transposed,
        **others,
    )
    return made if shard is None else emit(summed, x=made, residual=residual, shard=shard)


def feed_forward(emit: Emit, part: FeedForwardPart, *arguments: Any) -> Any:
    """Emit :func:`mlp` or :func:`mixture`."""
    return (mixture if isinstance(part, MoEPart) else mlp)(emit, part, *arguments)


def _added(
    emit: Emit,
    part: LayerPart,
    stream: Any,
    post_norm: NormPart | None,
    programmatic_launch: bool,
    block: Callable[[Any], Any],
) -> Any:
    """Emit ``stream + residual_multiplier * post_norm(block)``.

    Args:
        block: emits attention or MLP. Its last projection adds its argument, if nothing comes between.
    """
    if post_norm is None and part.residual_multiplier == 1:
        return block(stream)
    out = block(None)
    if post_norm is not None and part.residual_multiplier == 1:
        return norm(emit, post_norm, out, stream, programmatic_launch)
    if post_norm is not None:
        out = norm(emit, post_norm, out, None, programmatic_launch)
    return emit(composed.scaled_sum, x=stream, y=out, factor=part.residual_multiplier)


def decoder_layer(emit: Emit, part: LayerPart, hidden: Any, cache: KVCache, at: Positions, layer: int) -> Any:
    """Emit the whole layer; ``hidden`` is [batch, query_len, hidden_size], and so is the result."""

    def attend(residual: Any) -> Any:
        return attention(emit, part.attention, hidden, cache, at, layer, residual, part.attention_norm)

    attended = _added(emit, part, hidden, part.attention_post_norm, at.programmatic_launch, attend)
    source = hidden if part.is_parallel else attended

    def transform(residual: Any) -> Any:
        return feed_forward(emit, part.mlp, source, residual, part.mlp_norm, at.programmatic_launch)

    return _added(emit, part, attended, part.mlp_post_norm, at.programmatic_launch, transform)


def step_inputs(emit: Emit, part: ModelPart, tokens: Any, positions: Any, tables: list[Any]) -> tuple[Any, list[Any]]:
    """Emit what the first layer takes.

    Args:
        tokens, positions: int64 [batch, query_len].
        tables: tables of angles.

    Returns:
        [batch, query_len, hidden_size], and the rows of ``tables`` at the positions.
    """
    learned = None if part.position_embedding is None else part.position_embedding.weight
    shard, weight = shard_of(part.embedding), part.embedding.weight
    # else there are steps before the sum
    in_one = part.embedding_scale is None and part.embedding_multiplier == 1 and shard is None
    found = emit(
        ops.step_inputs.overload,
        embedding=weight,
        tokens=tokens if shard is None else emit(own_rows, tokens=tokens, embedding=weight, shard=shard),
        positions=positions,
        position_embedding=learned if in_one else None,
        position_offset=part.position_offset,
        tables=tables,
    )
    hidden, *rows = (emit(operator.getitem, found, place) for place in range(1 + len(tables)))
    if shard is not None:
        hidden = emit(own_embeddings, x=hidden, tokens=tokens, embedding=weight, shard=shard)
        hidden = emit(summed, x=hidden, residual=None, shard=shard)
    if part.embedding_scale is not None:
        hidden = emit(composed.scaled, x=hidden, factor=part.embedding_scale)
    if part.embedding_multiplier != 1:
        hidden = emit(_aten.mul.Scalar, hidden, part.embedding_multiplier)
    if learned is not None and not in_one:
        if part.position_offset:
            positions = emit(_aten.add.Scalar, positions, part.position_offset)
        hidden = emit(_aten.add.Tensor, hidden, emit(_aten.embedding.default, learned, positions))
    return hidden, rows


def head(emit: Emit, part: ModelPart, hidden: Any, is_normed: bool = False, programmatic_launch: bool = False) -> Any:
    """Emit the final norm, unless ``hidden`` has passed it, and the head."""
    norm = None if is_normed else part.final_norm
    return projection(emit, part.head, hidden, norm=norm, programmatic_launch=programmatic_launch)


def placed_logits(program: Program, part: ModelPart, hidden: Any, programmatic_launch: bool) -> Any:
    """Emit the final norm, the head and what the model computes from the head's output, each where its weights are."""
    program.move_to(part.norm_device)
    is_apart = part.norm_device != part.head_device
    if is_apart:
        hidden = norm(program.emit, part.final_norm, hidden, programmatic_launch=programmatic_launch)
        program.move_to(part.head_device)
    logits = head(program.emit, part, hidden, is_apart, programmatic_launch)
    return scaled_logits(program.emit, part, logits)


def scaled_logits(emit: Emit, part: ModelPart, logits: Any) -> Any:
    """Emit what the model computes from its head's output."""
    if part.logits_multiplier != 1:
        logits = emit(_aten.mul.Scalar, logits, part.logits_multiplier)
    if part.logits_divisor != 1:
        logits = emit(_aten.div.Scalar, logits, part.logits_divisor)
    if part.logits_softcap:
        logits = emit(composed.soft_capped, x=logits, cap=part.logits_softcap)
    return logits
