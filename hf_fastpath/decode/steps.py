"""A decoder layer over a few new tokens, as op calls.

Every function takes ``emit(op, *arguments)``. A patched module passes :func:`run`, which calls the op at once; a
decode plan passes its recorder, which notes the call. So the layer is written down once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import ops
from .structure import AttentionPart, LayerPart, MLPPart, NormPart, is_transposed

Emit = Callable[..., Any]


def run(op: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``op`` now."""
    return op(*arguments)


@dataclass
class Positions:
    """Where the new tokens stand; tensors, or registers of a plan.

    Attributes:
        cos, sin: [batch or 1, query_len, rotary_dim] in the model's dtype, or None without rotary embedding.
        seq_lens: int32 [batch], tokens a row holds with the new ones.
        starts: int32 [batch], left padding of each row, or None.
        kv_table: see ``ops.rope_append``; None uses the caches' own addresses.
        workspace: see ``ops.decode_attention``.
        overlap: a kernel may start on what does not depend on the one in front; see ``ops.gemv``.
    """

    cos: Any
    sin: Any
    seq_lens: Any
    starts: Any
    kv_table: Any = None
    workspace: Any = None
    overlap: bool = False


def _norm_arguments(part: NormPart | None) -> tuple:
    """The norm of an op's input, as the ops take it; ``part`` None is no norm."""
    if part is None:
        return "none", None, None, 0.0
    return part.architecture.norm.kind, part.module.weight, getattr(part.module, "bias", None), part.eps


def projection(
    emit: Emit,
    linear: nn.Module,
    x: Any,
    residual: Any = None,
    activation: str = "none",
    norm: NormPart | None = None,
    overlap: bool = False,
) -> Any:
    """``activation(linear(norm(x))) + residual``."""
    return emit(
        ops.gemv.overload,
        *(x, linear.weight, linear.bias, residual, activation, is_transposed(linear)),
        *(*_norm_arguments(norm), overlap),
    )


def attention(
    emit: Emit,
    part: AttentionPart,
    x: Any,
    cache: tuple[Any, Any],
    at: Positions,
    layer: int,
    residual: Any = None,
    norm: NormPart | None = None,
) -> Any:
    """``residual + part(norm(x))``, appending to ``cache`` (its K and V buffers), the ``layer``-th of the model."""
    *qkv, out = part.projections()
    absent = [None] * (3 - len(qkv))  # one projection may hold all three
    weights, biases = ([getattr(linear, name) for linear in qkv] + absent for name in ("weight", "bias"))
    queries = emit(
        ops.qkv_rope_append.overload,
        *(x, *weights, *biases, is_transposed(qkv[0]), at.cos, at.sin, *cache, at.seq_lens, part.num_heads),
        *(at.kv_table, layer, *_norm_arguments(norm), at.overlap),
    )
    mixed = emit(
        ops.decode_attention.overload,
        *(queries, *cache, at.seq_lens, at.starts, part.scaling, part.window or 0, at.kv_table, layer, at.workspace),
        at.overlap,
    )
    return projection(emit, out, mixed, residual, overlap=at.overlap)


def mlp(
    emit: Emit, part: MLPPart, x: Any, residual: Any = None, norm: NormPart | None = None, overlap: bool = False
) -> Any:
    """``residual + part(norm(x))``."""
    if part.gate is None:
        hidden = projection(emit, part.up, x, activation=part.activation, norm=norm, overlap=overlap)
    elif part.gate.bias is None and part.up.bias is None:
        weights = part.gate.weight, part.up.weight
        hidden = emit(ops.gemv_swiglu.overload, x, *weights, part.activation, *_norm_arguments(norm), overlap)
    else:
        gate, up = (projection(emit, linear, x, norm=norm, overlap=overlap) for linear in (part.gate, part.up))
        hidden = emit(ops.fused_swiglu.overload, gate, up, part.activation)
    return projection(emit, part.down, hidden, residual, overlap=overlap)


def decoder_layer(emit: Emit, part: LayerPart, hidden: Any, cache: tuple[Any, Any], at: Positions, layer: int) -> Any:
    """The whole layer: ``hidden`` [batch, query_len, hidden_size] in and out."""
    hidden = attention(emit, part.attention, hidden, cache, at, layer, hidden, part.attention_norm)
    return mlp(emit, part.mlp, hidden, hidden, part.mlp_norm, at.overlap)
