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
    """

    cos: Any
    sin: Any
    seq_lens: Any
    starts: Any
    kv_table: Any = None
    workspace: Any = None


def norm(emit: Emit, part: NormPart, x: Any) -> Any:
    """``part(x)``."""
    module = part.module
    if part.architecture.norm.kind == "rms":
        return emit(ops.rms_norm.overload, x, module.weight, part.eps)
    return emit(ops.layer_norm.overload, x, module.weight, module.bias, part.eps)


def projection(emit: Emit, linear: nn.Module, x: Any, residual: Any = None, activation: str = "none") -> Any:
    """``activation(linear(x)) + residual``."""
    return emit(ops.gemv.overload, x, linear.weight, linear.bias, residual, activation, is_transposed(linear))


def attention(
    emit: Emit, part: AttentionPart, x: Any, cache: tuple[Any, Any], at: Positions, layer: int, residual: Any = None
) -> Any:
    """``residual + part(x)``, appending to ``cache`` (its K and V buffers), the ``layer``-th of the model."""
    *qkv, out = part.projections()
    if len(qkv) == 1:
        states = projection(emit, qkv[0], x)
    else:
        weights, biases = [linear.weight for linear in qkv], [linear.bias for linear in qkv]
        states = emit(ops.gemv_qkv.overload, x, *weights, *biases)
    queries = emit(
        ops.rope_append.overload,
        *(states, None, at.cos, at.sin, *cache, at.seq_lens, part.num_heads, at.kv_table, layer),
    )
    mixed = emit(
        ops.decode_attention.overload,
        *(queries, *cache, at.seq_lens, at.starts, part.scaling, part.window or 0, at.kv_table, layer, at.workspace),
    )
    return projection(emit, out, mixed, residual)


def mlp(emit: Emit, part: MLPPart, x: Any, residual: Any = None) -> Any:
    """``residual + part(x)``."""
    if part.gate is None:
        hidden = projection(emit, part.up, x, activation=part.activation)
    elif part.gate.bias is None and part.up.bias is None:
        hidden = emit(ops.gemv_swiglu.overload, x, part.gate.weight, part.up.weight, part.activation)
    else:
        gate, up = projection(emit, part.gate, x), projection(emit, part.up, x)
        hidden = emit(ops.fused_swiglu.overload, gate, up, part.activation)
    return projection(emit, part.down, hidden, residual)


def decoder_layer(emit: Emit, part: LayerPart, hidden: Any, cache: tuple[Any, Any], at: Positions, layer: int) -> Any:
    """The whole layer: ``hidden`` [batch, query_len, hidden_size] in and out."""
    x = norm(emit, part.attention_norm, hidden)
    hidden = attention(emit, part.attention, x, cache, at, layer, residual=hidden)
    x = norm(emit, part.mlp_norm, hidden)
    return mlp(emit, part.mlp, x, residual=hidden)
