"""A model with an architecture file over a few new tokens, in the terms of :class:`..lower.which_op.Lower`.

A patched module hands over a ``Lower`` that runs calls at once; a decode plan and a prompt hand over one that records
them. So there is one description of the layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, overload

import torch
from torch import nn

from ... import ops
from ...choices import Activation, NormKind
from ...compat import ShardStyle
from ...linears.packed_embedding import PackedEmbedding, packed_rows
from ...ops.kv_cache import KVCache
from ..calls.named_calls import HeadNorms, Norm
from ..lower import composed
from ..lower.positions import Positions
from ..lower.which_op import Lower
from ..model.attention_part import AttentionPart
from ..model.layer_part import LayerPart
from ..model.parts import FeedForwardPart, MLPPart, MoEPart, NormPart
from ..model.structure import ModelInRoles
from ..model.weight import weight_of
from ..ranks.rank_calls import own_embeddings, own_rows, shard_of, style_of, summed
from ..run.program import Program

_aten = torch.ops.aten


@overload
def norm_of(part: NormPart) -> Norm: ...


@overload
def norm_of(part: None) -> None: ...


def norm_of(part: NormPart | None) -> Norm | None:
    """Return the norm of an op's input in the form that calls take."""
    if part is None:
        return None
    module: Any = part.module
    spec = part.architecture.norm
    kind = NormKind.RMS_OFFSET if spec.unit_offset else NormKind[spec.kind.upper()]
    return Norm(kind, module.weight, getattr(module, "bias", None), part.eps)


def projection(
    to: Lower,
    linear: nn.Module,
    x: Any,
    residual: Any = None,
    activation: Activation = Activation.NONE,
    norm: NormPart | None = None,
) -> Any:
    """Emit ``activation(linear(norm(x))) + residual``; what all ranks make of it if the layer is spread over ranks."""
    weight, bias = weight_of(linear)
    how = dict(bias=bias, residual=residual, activation=activation, norm=norm_of(norm))
    return to.product(x, weight, shard_of(linear), **how)


def norm(to: Lower, part: NormPart, x: Any, residual: Any = None) -> Any:
    """Emit ``residual + part(x)``."""
    return to.normed(x, norm_of(part), residual)


def head_norms(part: AttentionPart) -> HeadNorms | None:
    """Return the norms of queries and keys in the form that calls take."""
    if not part.head_norms:
        return None
    q, k = (norm_of(each) for each in part.head_norms)
    assert q.weight is not None and k.weight is not None
    return HeadNorms(q.weight, k.weight, q.eps, q.kind.weight_offset)


def _queries(to: Lower, part: AttentionPart, x: Any, cache: KVCache, at: Positions, norm: NormPart | None) -> Any:
    """Emit rotated queries, and the append of keys and values."""
    linears = part.projections()[:-1]
    store = at.store(part, cache) | at.angles_of(part) | dict(num_heads=part.num_heads)
    weights, biases = map(list, zip(*map(weight_of, linears)))
    if not part.is_composed:
        others = dict(norm=norm_of(norm), head_norms=head_norms(part))
        queries = to.queries(x, weights, biases, store, **others)
        if queries is not None:
            return queries
    projected = to.projections(x, weights, biases, norm_of(norm), [shard_of(each) for each in linears])
    qkv = projected[0] if len(projected) == 1 else to.emit(composed.concatenated, *projected)
    if part.spec.by_kv_head:
        qkv = to.emit(composed.ungrouped, qkv=qkv, head_dim=part.head_dim, group=part.group)
    if part.repeats_kv:
        sizes = dict(num_heads=part.num_heads, head_dim=part.head_dim, group=part.group)
        qkv = to.emit(composed.repeated_kv, qkv=qkv, **sizes)
    return to.append(dict(qkv=qkv), store, head_norms(part))


def attention(
    to: Lower,
    part: AttentionPart,
    x: Any,
    cache: KVCache,
    at: Positions,
    layer: int,
    residual: Any = None,
    norm: NormPart | None = None,
) -> Any:
    """Emit ``residual + part(norm(x))``, which appends to ``cache``, the cache of the model's ``layer``-th layer."""
    placed = at.placed(cache, layer)
    queries = _queries(to, part, x, placed, at, norm)
    seen = dict(seq_lens=at.seq_lens, starts=at.starts, scale=part.scaling, window=part.window or 0)
    seen |= dict(workspace=at.workspace, sinks=part.sinks, softcap=part.softcap)
    mixed = to.attend(queries, placed, None if at.staging is None else at.staging.of(part), **seen)
    return projection(to, part.projections()[-1], mixed, residual)


def mlp(to: Lower, part: MLPPart, x: Any, residual: Any = None, norm: NormPart | None = None) -> Any:
    """Emit ``residual + part(norm(x))``."""
    activation, own_gate = part.activation, part.gate
    assert activation is not None, "an unknown one is a reason against the part"
    if own_gate is None:
        hidden = projection(to, part.up, x, activation=activation, norm=norm)
    elif style_of(part.up) is ShardStyle.GATHERED:  # a rank's rows are of other features than its own
        if part.is_fused:
            halves = to.emit(_aten.chunk.default, projection(to, part.up, x, norm=norm), 2, -1)
            gate, up = (to.emit(operator.getitem, halves, place) for place in range(2))
        else:
            gate, up = (projection(to, each, x, norm=norm) for each in (own_gate, part.up))
        hidden = to.emit(ops.fused_swiglu.overload, gate=gate, up=up, activation=activation)
    else:
        (gate, up), biases = zip(*part.gate_and_up())
        hidden = to.gated(x, gate, up, activation, norm=norm_of(norm), biases=biases)
    return projection(to, part.down, hidden, residual)


def mixture(
    to: Lower,
    part: MoEPart,
    x: Any,
    residual: Any = None,
    norm: NormPart | None = None,
    experts: Callable[..., Any] = ops.routed_experts.overload,
) -> Any:
    """Emit ``residual + part(norm(x))`` as ``experts`` computes it; ``composed.experts_and_weights`` is one such op."""
    packed = part.packed
    if packed is None and norm is not None and part.spec.transposed:  # the kernels of such experts take no norm
        x, norm = to.normed(x, norm_of(norm)), None
    (gate_up, down), (gate_up_bias, down_bias) = part.stacks(), part.stack_biases()
    shard, others = shard_of(part.experts), dict(zip(("alpha", "limit"), part.gate_limits))
    if shard is not None and shard.style in (ShardStyle.SOME_EXPERTS, ShardStyle.PICKED_EXPERTS):
        others["first_expert"] = shard.first
    made = to.experts(
        experts,
        x=x,
        logits=projection(to, part.router, x, norm=norm),
        norm=norm_of(norm),
        gate_up_weight=gate_up,
        down_weight=down,
        residual=residual if shard is None else None,
        top_k=part.top_k,
        normalized=part.is_normalized,
        rounded=part.spec.rounded,
        activation=part.activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        **(dict(transposed=part.spec.transposed) if packed is None else dict(alternating=packed.how.alternating)),
        **others,
    )
    return made if shard is None else to.emit(summed, x=made, residual=residual, shard=shard)


def feed_forward(to: Lower, part: FeedForwardPart, *arguments: Any) -> Any:
    """Emit :func:`mlp` or :func:`mixture`."""
    return mixture(to, part, *arguments) if isinstance(part, MoEPart) else mlp(to, part, *arguments)


def _added(to: Lower, part: LayerPart, stream: Any, post_norm: NormPart | None, block: Callable[[Any], Any]) -> Any:
    """Emit ``stream + residual_multiplier * post_norm(block)``.

    Args:
        block: emits attention or MLP. Its last projection adds its argument, if nothing comes between.
    """
    if post_norm is None and part.residual_multiplier == 1:
        return block(stream)
    out = block(None)
    if post_norm is not None and part.residual_multiplier == 1:
        return norm(to, post_norm, out, stream)
    if post_norm is not None:
        out = norm(to, post_norm, out)
    return to.emit(composed.scaled_sum, x=stream, y=out, factor=part.residual_multiplier)


def decoder_layer(to: Lower, part: LayerPart, hidden: Any, cache: KVCache, at: Positions, layer: int) -> Any:
    """Emit the whole layer; ``hidden`` is [batch, query_len, hidden_size], and so is the result."""

    def attend(residual: Any) -> Any:
        return attention(to, part.attention, hidden, cache, at, layer, residual, part.attention_norm)

    attended = _added(to, part, hidden, part.attention_post_norm, attend)
    source = hidden if part.is_parallel else attended

    def transform(residual: Any) -> Any:
        return feed_forward(to, part.mlp, source, residual, part.mlp_norm)

    return _added(to, part, attended, part.mlp_post_norm, transform)


def step_inputs(to: Lower, part: ModelInRoles, tokens: Any, positions: Any, tables: list[Any]) -> tuple[Any, list[Any]]:
    """Emit what the first layer takes.

    Args:
        tokens, positions: int64 [batch, query_len].
        tables: tables of angles.

    Returns:
        [batch, query_len, hidden_size], and the rows of ``tables`` at the positions.
    """
    emit = to.emit
    learned = None if part.position_embedding is None else part.position_embedding.weight
    if isinstance(part.embedding, PackedEmbedding):
        return _packed_inputs(to, part, tokens, positions, learned, tables)
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
    return _placed(to, part, hidden, positions, None if in_one else learned), rows


def _placed(to: Lower, part: ModelInRoles, hidden: Any, positions: Any, learned: torch.Tensor | None) -> Any:
    """Emit embeddings times the model's factor, and those of positions added to them."""
    emit = to.emit
    if part.embedding_multiplier != 1:
        hidden = emit(_aten.mul.Scalar, hidden, part.embedding_multiplier)
    if learned is None:
        return hidden
    if part.position_offset:
        positions = emit(_aten.add.Scalar, positions, part.position_offset)
    return emit(_aten.add.Tensor, hidden, emit(_aten.embedding.default, learned, positions))


def _packed_inputs(
    to: Lower, part: ModelInRoles, tokens: Any, positions: Any, learned: torch.Tensor | None, tables: list[Any]
) -> tuple[Any, list[Any]]:
    """Do as :func:`step_inputs` with a quantized table of embeddings."""
    table = part.embedding
    weight = table.in_order
    hidden = to.emit(
        packed_rows,
        tokens=tokens,
        quants=weight.quants,
        scales=weight.scales,
        format=weight.number,
        multiplier=weight.multiplier,
        width=weight.in_features,
        dtype=table.dtype,
    )
    rows = [to.emit(_aten.embedding.default, each, positions) for each in tables]
    return _placed(to, part, hidden, positions, learned), rows


def head(to: Lower, part: ModelInRoles, hidden: Any, is_normed: bool = False) -> Any:
    """Emit the final norm, unless ``hidden`` has passed it, and the head."""
    return projection(to, part.head, hidden, norm=None if is_normed else part.final_norm)


def placed_logits(program: Program, to: Lower, part: ModelInRoles, hidden: Any) -> Any:
    """Emit the final norm, the head and what the model computes from the head's output, each where its weights are."""
    program.move_to(part.norm_device)
    is_apart = part.norm_device != part.head_device
    if is_apart:
        hidden = norm(to, part.final_norm, hidden)
        program.move_to(part.head_device)
    return scaled_logits(to, part, head(replace(to, device=part.head_device), part, hidden, is_apart))


def scaled_logits(to: Lower, part: ModelInRoles, logits: Any) -> Any:
    """Emit what the model computes from its head's output."""
    if part.logits_multiplier != 1:
        logits = to.emit(_aten.mul.Scalar, logits, part.logits_multiplier)
    if part.logits_divisor != 1:
        logits = to.emit(_aten.div.Scalar, logits, part.logits_divisor)
    if part.logits_softcap:
        logits = to.emit(composed.soft_capped, x=logits, cap=part.logits_softcap)
    return logits
