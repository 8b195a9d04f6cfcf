"""A decoder layer over a few new tokens, as op calls.

Every function takes ``emit(op, *arguments)``. A patched module passes :func:`run`, which calls the op at once; a
decode plan passes its recorder, which notes the call. So the layer is written down once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import ops
from ..choices import Activation, Norm
from ..quantization.linear import joined as joined_weights
from . import composed
from .modules import is_packed, is_transposed, weight_and_bias
from .parts import AttentionPart, FeedForwardPart, MLPPart, MoEPart, NormPart
from .structure import LayerPart, ModelPart

Emit = Callable[..., Any]
_aten = torch.ops.aten


def run(op: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``op`` now."""
    return op(*arguments)


class Staging:
    """Keys and values of the new tokens of one layer after the other, as they are before they are quantized: float32
    caches of query_len slots.

    Args:
        seq_lens: int32 [batch], query_len in each.
        shapes: heads and head_dim of every layer's cache.
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

    def of(self, part: AttentionPart) -> list[torch.Tensor]:
        """K and V, [batch, heads, query_len, head_dim], of ``part``."""
        return self._buffers[part.cache_shape]


@dataclass
class Positions:
    """Where the new tokens stand; tensors, or registers of a plan.

    Attributes:
        angles: cos and sin of every kind of layer, [batch or 1, query_len, rotary_dim] in the model's dtype; see
            ``AttentionPart.layer_type``. Empty without rotary embedding.
        seq_lens: int32 [batch], tokens a row holds with the new ones.
        starts: int32 [batch], left padding of each row, or None.
        kv_tables: see ``ops.rope_append``, for caches in pages (True) and others; where there is none, the caches' own
            addresses are used.
        workspace: see ``ops.decode_attention``.
        overlap: a kernel may start on what does not depend on the one in front; see ``ops.gemv``.
        staging: where keys and values of the new tokens wait for ``ops.quantizing_attention``, or None: projections
            append to the cache.
    """

    angles: dict[str | None, tuple[Any, Any]]
    seq_lens: Any
    starts: Any
    kv_tables: Mapping[bool, Any] = field(default_factory=dict)
    workspace: Any = None
    overlap: bool = False
    staging: Staging | None = None

    def table_of(self, cache: tuple) -> Any:
        """The ``kv_table`` for a layer's cache."""
        return self.kv_tables.get(is_paged(cache))

    def stores(self, part: AttentionPart, cache: tuple, layer: int) -> tuple[tuple, tuple]:
        """What projections append to: K, V, seq_lens, heads of queries, kv_table and layer; and scales."""
        k, v, *scales = cache
        if self.staging is None or part.softcap:
            return (k, v, self.seq_lens, part.num_heads, self.table_of(cache), layer), tuple(scales)
        return (*self.staging.of(part), self.staging.seq_lens, part.num_heads, None, 0), ()

    def angles_of(self, part: AttentionPart) -> tuple[Any, Any]:
        """cos and sin that ``part`` uses: None where it does not rotate."""
        return self.angles[part.layer_type] if part.rotates else (None, None)


def is_paged(cache: tuple) -> bool:
    """Whether a layer's cache is K, V, no scales and a block table, instead of K and V, and scales of quants."""
    return len(cache) == 5


def norm_arguments(part: NormPart | None) -> tuple:
    """The norm of an op's input, as the ops take it; ``part`` None is no norm."""
    if part is None:
        return Norm.NONE, None, None, 0.0
    return Norm(part.architecture.norm.kind), part.module.weight, getattr(part.module, "bias", None), part.eps


def projection(
    emit: Emit,
    linear: nn.Module,
    x: Any,
    residual: Any = None,
    activation: Activation = Activation.NONE,
    norm: NormPart | None = None,
    overlap: bool = False,
) -> Any:
    """``activation(linear(norm(x))) + residual``."""
    if is_packed(linear):
        return _packed(emit, linear.op_weight(), x, linear.bias, residual, activation, norm, overlap)
    return emit(
        ops.gemv.overload,
        *(x, *weight_and_bias(linear), residual, activation, is_transposed(linear)),
        *(*norm_arguments(norm), overlap),
    )


def _packed(
    emit: Emit,
    weight: tuple,
    x: Any,
    bias: Any = None,
    residual: Any = None,
    activation: Activation = Activation.NONE,
    norm: NormPart | None = None,
    overlap: bool = False,
) -> Any:
    """As :func:`projection`, of a weight as ``ops.packed_gemv`` takes it."""
    return emit(ops.packed_gemv.overload, x, *weight, bias, residual, activation, *norm_arguments(norm), overlap)


def joined(linears: list[nn.Module]) -> tuple | None:
    """Packed projections of one input as one weight, where they lie so."""
    return joined_weights(linears) if all(map(is_packed, linears)) else None


def _norm_op(part: NormPart) -> tuple:
    """An op that computes the norm of its first argument, and its other arguments."""
    kind, weight, bias, eps = norm_arguments(part)
    if part.architecture.norm.unit_offset:
        return composed.unit_offset_norm, weight, eps
    return (ops.rms_norm.overload, weight, eps) if kind == Norm.RMS else (ops.layer_norm.overload, weight, bias, eps)


def norm(emit: Emit, part: NormPart, x: Any) -> Any:
    """``part(x)``."""
    op, *arguments = _norm_op(part)
    return emit(op, x, *arguments)


def in_front(emit: Emit, part: NormPart | None, x: Any) -> tuple[Any, NormPart | None]:
    """``x`` and its norm as projections take them: a norm that they cannot apply is emitted."""
    if part is None or not part.architecture.norm.unit_offset:
        return x, part
    return norm(emit, part, x), None


def _queries_composed(
    emit: Emit, part: AttentionPart, x: Any, cache: tuple, at: Positions, layer: int, norm: NormPart | None
) -> Any:
    """As ``ops.qkv_rope_append``, for what that op does not do."""
    linears = part.projections()[:-1]
    together = None if part.head_norms else joined(linears)
    if together is not None:
        qkv = _packed(emit, together, x, norm=norm, overlap=at.overlap)
    else:
        projected = [projection(emit, linear, x, norm=norm, overlap=at.overlap) for linear in linears]
        for place, each in enumerate(part.head_norms):
            projected[place] = emit(composed.head_norm, projected[place], *_norm_op(each))
        qkv = projected[0] if len(projected) == 1 else emit(composed.joined, *projected)
    if part.spec.by_kv_head:
        qkv = emit(composed.ungrouped, qkv, part.head_dim, part.group)
    cos, sin = at.angles_of(part)
    if cos is not None and part.spec.pairs == "neighbors":
        qkv = emit(composed.turn_neighbors, qkv, cos, sin, part.num_heads + part.num_kv_heads, part.head_dim)
        cos = sin = None
    if part.repeats_kv:
        qkv = emit(composed.repeated_kv, qkv, part.num_heads, part.head_dim, part.group)
    to, scales = at.stores(part, cache, layer)
    return emit(ops.rope_append.overload, qkv, None, cos, sin, *to, *scales)


def attention(
    emit: Emit,
    part: AttentionPart,
    x: Any,
    cache: tuple,
    at: Positions,
    layer: int,
    residual: Any = None,
    norm: NormPart | None = None,
) -> Any:
    """``residual + part(norm(x))``, appending to ``cache`` (its K and V buffers, and scales of quantized ones or a
    block table), the ``layer``-th of the model."""
    *qkv, out = part.projections()
    to, scales = at.stores(part, cache, layer)
    x, norm = in_front(emit, norm, x)
    together = None if part.is_composed or is_paged(cache) else joined(qkv)
    if together is not None:
        queries = emit(
            ops.packed_qkv_rope_append.overload,
            *(x, *together, *at.angles_of(part), *to, *norm_arguments(norm), at.overlap, *scales),
        )
    elif part.is_composed or any(map(is_packed, qkv)):
        queries = _queries_composed(emit, part, x, cache, at, layer, norm)
    else:
        absent = [None] * (3 - len(qkv))  # one projection may hold all three
        weights, biases = ([getattr(linear, name) for linear in qkv] + absent for name in ("weight", "bias"))
        cos, sin = at.angles_of(part)
        queries = emit(
            ops.qkv_rope_append.overload,
            *(x, *weights, *biases, is_transposed(qkv[0]), cos, sin, *to, *norm_arguments(norm), at.overlap, *scales),
        )
    k, v, *scales = cache
    seen = at.seq_lens, at.starts, part.scaling, part.window or 0
    place = at.table_of(cache), layer, at.workspace, at.overlap
    if part.softcap:
        mixed = emit(composed.soft_capped_attention, queries, k, v, *seen, part.softcap, *scales)
    elif at.staging is not None:
        new = at.staging.of(part)
        mixed = emit(ops.quantizing_attention.overload, queries, *new, *cache, *seen, *place, part.sinks)
    else:
        mixed = emit(ops.decode_attention.overload, queries, k, v, *seen, *place, part.sinks, *scales)
    return projection(emit, out, mixed, residual, overlap=at.overlap)


def mlp(
    emit: Emit, part: MLPPart, x: Any, residual: Any = None, norm: NormPart | None = None, overlap: bool = False
) -> Any:
    """``residual + part(norm(x))``."""
    x, norm = in_front(emit, norm, x)
    if part.gate is None:
        hidden = projection(emit, part.up, x, activation=part.activation, norm=norm, overlap=overlap)
    elif (together := joined(part.projections()[:-1])) is not None:
        arguments = (*together, part.activation, *norm_arguments(norm), overlap)
        hidden = emit(ops.packed_gemv_swiglu.overload, x, *arguments)
    elif not is_packed(part.up) and not is_packed(part.gate) and part.gate.bias is None and part.up.bias is None:
        weights = part.gate_and_up()
        hidden = emit(ops.gemv_swiglu.overload, x, *weights, part.activation, *norm_arguments(norm), overlap)
    else:
        gate, up = (projection(emit, linear, x, norm=norm, overlap=overlap) for linear in (part.gate, part.up))
        hidden = emit(ops.fused_swiglu.overload, gate, up, part.activation)
    return projection(emit, part.down, hidden, residual, overlap=overlap)


def mixture(
    emit: Emit,
    part: MoEPart,
    x: Any,
    residual: Any = None,
    norm: NormPart | None = None,
    overlap: bool = False,
    experts: Callable[..., Any] = composed.routed_experts,
) -> Any:
    """``residual + part(norm(x))``; what ``experts`` gives: it may be ``composed.experts_and_weights``."""
    if norm is not None:  # router and experts take it
        op, *arguments = _norm_op(norm)
        x = emit(op, x, *arguments)
    logits = projection(emit, part.router, x, overlap=overlap)
    routing = (part.top_k, part.is_normalized, part.spec.rounded)
    form = (*part.stack_biases(), part.spec.transposed, *part.gate_limits)
    return emit(experts, x, logits, *part.stacks(), residual, routing, part.activation, overlap, *form)


def feed_forward(emit: Emit, part: FeedForwardPart, *arguments: Any) -> Any:
    """:func:`mlp` or :func:`mixture`."""
    return (mixture if isinstance(part, MoEPart) else mlp)(emit, part, *arguments)


def _added(emit: Emit, part: LayerPart, stream: Any, post_norm: NormPart | None, block: Callable[[Any], Any]) -> Any:
    """``stream + residual_multiplier * post_norm(block)``.

    Args:
        block: emits attention or MLP; adds its argument in the last projection, where nothing lies between.
    """
    if post_norm is None and part.residual_multiplier == 1:
        return block(stream)
    out = block(None)
    if post_norm is not None:
        out = norm(emit, post_norm, out)
    return emit(composed.scaled_sum, stream, out, part.residual_multiplier)


def decoder_layer(emit: Emit, part: LayerPart, hidden: Any, cache: tuple, at: Positions, layer: int) -> Any:
    """The whole layer: ``hidden`` [batch, query_len, hidden_size] in and out."""

    def attend(residual: Any) -> Any:
        return attention(emit, part.attention, hidden, cache, at, layer, residual, part.attention_norm)

    attended = _added(emit, part, hidden, part.attention_post_norm, attend)
    source = hidden if part.is_parallel else attended

    def transform(residual: Any) -> Any:
        return feed_forward(emit, part.mlp, source, residual, part.mlp_norm, at.overlap)

    return _added(emit, part, attended, part.mlp_post_norm, transform)


def step_inputs(emit: Emit, part: ModelPart, tokens: Any, positions: Any, tables: list[Any]) -> tuple[Any, list[Any]]:
    """What the first layer takes: [batch, query_len, hidden_size] for int64 [batch, query_len] each, and the rows of
    ``tables`` at the positions."""
    learned = None if part.position_embedding is None else part.position_embedding.weight
    in_one = part.embedding_scale is None and part.embedding_multiplier == 1  # nothing comes before that sum
    found = emit(
        ops.step_inputs.overload,
        *(part.embedding.weight, tokens, positions, learned if in_one else None, part.position_offset, tables),
    )
    hidden, *rows = (emit(operator.getitem, found, place) for place in range(1 + len(tables)))
    if part.embedding_scale is not None:
        hidden = emit(composed.scaled, hidden, part.embedding_scale)
    if part.embedding_multiplier != 1:
        hidden = emit(_aten.mul.Scalar, hidden, part.embedding_multiplier)
    if learned is not None and not in_one:
        if part.position_offset:
            positions = emit(_aten.add.Scalar, positions, part.position_offset)
        hidden = emit(_aten.add.Tensor, hidden, emit(_aten.embedding.default, learned, positions))
    return hidden, rows


def head(emit: Emit, part: ModelPart, hidden: Any, overlap: bool = False) -> Any:
    """The head's output after the last layer's."""
    hidden, norm = in_front(emit, part.final_norm, hidden)
    return projection(emit, part.head, hidden, norm=norm, overlap=overlap)


def scaled_logits(emit: Emit, part: ModelPart, logits: Any) -> Any:
    """What the model makes of its head's output."""
    if part.logits_multiplier != 1:
        logits = emit(_aten.mul.Scalar, logits, part.logits_multiplier)
    if part.logits_divisor != 1:
        logits = emit(_aten.div.Scalar, logits, part.logits_divisor)
    if part.logits_softcap:
        logits = emit(composed.soft_capped, logits, part.logits_softcap)
    return logits
