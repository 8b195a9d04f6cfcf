"""A decoder layer over a few new tokens, as op calls.

Every function takes ``emit(op, *arguments)``. A patched module passes :func:`run`, which calls the op at once; a
decode plan passes its recorder, which notes the call. So the layer is written down once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import ops
from ..ops.decode_layers import LAYER_TENSORS, OUTER_TENSORS, sizes, weight_reasons
from .structure import AttentionPart, LayerPart, MLPPart, ModelPart, NormPart, is_transposed, weight_and_bias

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


def head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of every head: [batch, query_len, heads * head_dim] in and out."""
    return ops.rms_norm.overload(x.unflatten(-1, (-1, weight.numel())), weight, eps).flatten(-2)


def joined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Features side by side."""
    return torch.cat((q, k, v), dim=-1)


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
    if part.head_norms:
        q, k, v = (projection(emit, linear, x, norm=norm, overlap=at.overlap) for linear in qkv)
        q, k = (emit(head_norm, y, each.module.weight, each.eps) for y, each in zip((q, k), part.head_norms))
        queries = emit(
            ops.rope_append.overload,
            *(emit(joined, q, k, v), None, at.cos, at.sin, *cache, at.seq_lens, part.num_heads, at.kv_table, layer),
        )
    else:
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
        weights = part.gate_and_up()
        hidden = emit(ops.gemv_swiglu.overload, x, *weights, part.activation, *_norm_arguments(norm), overlap)
    else:
        gate, up = (projection(emit, linear, x, norm=norm, overlap=overlap) for linear in (part.gate, part.up))
        hidden = emit(ops.fused_swiglu.overload, gate, up, part.activation)
    return projection(emit, part.down, hidden, residual, overlap=overlap)


def decoder_layer(emit: Emit, part: LayerPart, hidden: Any, cache: tuple[Any, Any], at: Positions, layer: int) -> Any:
    """The whole layer: ``hidden`` [batch, query_len, hidden_size] in and out."""
    hidden = attention(emit, part.attention, hidden, cache, at, layer, hidden, part.attention_norm)
    return mlp(emit, part.mlp, hidden, hidden, part.mlp_norm, at.overlap)


# ---- a whole model in one call ---------------------------------------------------------------------------------


def _named(roles: dict[str, nn.Module | None]) -> dict[str, torch.Tensor | None]:
    """Weights and biases of modules, as ``<role>_weight`` and ``<role>_bias``."""
    pairs = {role: weight_and_bias(module) for role, module in roles.items() if module is not None}
    return {f"{role}_{name}": p for role, pair in pairs.items() for name, p in zip(("weight", "bias"), pair)}


def _layer_tensors(part: LayerPart) -> dict[str, torch.Tensor | None]:
    *qkv, out = part.attention.projections()
    roles = {"attention_norm": part.attention_norm.module, **dict(zip("qkv", qkv)), "out": out}
    roles |= {"mlp_norm": part.mlp_norm.module, "gate": part.mlp.gate, "up": part.mlp.up, "down": part.mlp.down}
    found = _named(roles)
    if part.mlp.gate is not None:
        found["gate_weight"], found["up_weight"] = part.mlp.gate_and_up()
    return found


def _all_weights(part: ModelPart) -> list[torch.Tensor]:
    """The model's parameters as ``ops.decode_layers`` takes them."""
    absent = part.head.weight.new_empty(0)
    outer = _named({"final_norm": part.final_norm.module, "head": part.head})
    found = [layer.get(name) for layer in map(_layer_tensors, part.layers) for name in LAYER_TENSORS]
    return [absent if p is None else p for p in (*found, *(outer.get(name) for name in OUTER_TENSORS))]


def _constants(part: LayerPart) -> tuple:
    """What ``ops.decode_layers`` takes once for all layers."""
    attention, mlp = part.attention, part.mlp
    kinds = {is_transposed(linear) for linear in (*attention.projections(), *mlp.projections())}
    return attention.num_heads, attention.head_dim, attention.scaling, mlp.activation, kinds


def one_call_reasons(part: ModelPart) -> list[str]:
    """Reasons why ``ops.decode_layers`` cannot take all of the model's layers."""
    layers, weights = part.layers, _all_weights(part)
    if any(layer.attention.head_norms for layer in layers):
        return ["heads have norms of their own"]
    constants = _constants(layers[0])
    if any(_constants(layer) != constants for layer in layers):
        return ["the layers differ in a constant"]
    norms = [part.final_norm, *(norm for layer in layers for norm in (layer.attention_norm, layer.mlp_norm))]
    if len({norm.eps for norm in norms}) > 1:
        return ["the norms differ in eps"]
    num_heads, head_dim, _, activation, kinds = constants
    if len(kinds) > 1 or is_transposed(part.head):
        return ["the projections are stored in different ways"]
    if any(layer.mlp.gate is not None and layer.mlp.gate.bias is not None for layer in layers):
        return ["a gate has a bias"]
    (transposed,) = kinds
    model = sizes(weights, num_heads * head_dim, transposed)
    num_kv_heads = (model.qkv_features - model.q_features) // (2 * head_dim)
    x = part.head.weight.new_empty(1, 1, model.hidden_size)
    kind = part.architecture.norm.kind
    return weight_reasons(x, weights, num_heads, num_kv_heads, head_dim, kind, activation, transposed)


def all_layers(emit: Emit, part: ModelPart, hidden: Any, caches: list[tuple[Any, Any]], at: Positions) -> Any:
    """All layers, the final norm and the head of a model without :func:`one_call_reasons`, over one new token of one
    sequence: ``hidden`` [1, 1, hidden_size] in, logits [1, 1, vocab_size] out."""
    layers = part.layers
    first = layers[0]
    norm, _, _, eps = _norm_arguments(first.attention_norm)
    return emit(
        ops.decode_layers.overload,
        *(hidden, _all_weights(part), [k for k, _ in caches], [v for _, v in caches]),
        *(at.cos, at.sin, at.seq_lens, at.starts, first.attention.num_heads, first.attention.scaling),
        *([layer.window or 0 for layer in layers], norm, eps, first.mlp.activation, is_transposed(first.mlp.up)),
        *(at.kv_table, at.workspace, at.overlap),
    )
