"""All layers of a model as one op call, where they are alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import ops
from ..ops.decode_layers import LAYER_TENSORS, OUTER_TENSORS, sizes, weight_reasons
from ..ops.kv_cache import is_quantized
from .modules import is_packed, is_transposed, weight_and_bias
from .steps import Emit, Positions, head, joined, norm_arguments
from .structure import LayerPart, ModelPart


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
    rotation = attention.rotates, attention.layer_type
    return attention.num_heads, attention.head_dim, attention.scaling, mlp.activation, rotation, kinds


def one_call_reasons(part: ModelPart, kv_dtype: torch.dtype | None = None, paged: bool = False) -> list[str]:
    """Reasons why neither ``ops.decode_layers`` nor ``ops.packed_layers`` can take all of the model's layers.

    Args:
        part: the model.
        kv_dtype: of the cache's buffers; None: the model's.
        paged: some layer of the cache lies in pages.
    """
    layers = part.layers
    if kv_dtype is not None and is_quantized(kv_dtype):
        return ["keys and values are quantized"]
    if paged:
        return ["keys and values lie in pages"]
    if not all(layer.is_sequential for layer in layers):
        return ["the layers are not norm, attention, norm and MLP in turn"]
    attentions = [layer.attention for layer in layers]
    if any(part.is_composed or part.softcap or part.sinks is not None for part in attentions):
        return ["attention takes other ops"]
    constants = _constants(layers[0])
    if any(_constants(layer) != constants for layer in layers):
        return ["the layers differ in a constant"]
    norms = [part.final_norm, *(norm for layer in layers for norm in (layer.attention_norm, layer.mlp_norm))]
    if len({norm.eps for norm in norms}) > 1:
        return ["the norms differ in eps"]
    if any(is_packed(linear) for layer in layers for linear in layer.projections()):
        return _packed_reasons(part)
    num_heads, head_dim, _, activation, _, kinds = constants
    if len(kinds) > 1 or is_transposed(part.head):
        return ["the projections are stored in different ways"]
    if any(layer.mlp.gate is not None and layer.mlp.gate.bias is not None for layer in layers):
        return ["a gate has a bias"]
    (transposed,) = kinds
    weights = _all_weights(part)
    model = sizes(weights, num_heads * head_dim, transposed)
    num_kv_heads = (model.qkv_features - model.q_features) // (2 * head_dim)
    x = part.head.weight.new_empty(1, 1, model.hidden_size)
    kind, *_ = norm_arguments(part.final_norm)
    return weight_reasons(x, weights, num_heads, num_kv_heads, head_dim, kind, activation, transposed)


def _packed_matrices(part: LayerPart) -> list[tuple | None]:
    """A layer's quantized weights in the order of ``ops.packed_layers``; None for one that it does not take."""
    *qkv, out = part.attention.projections()
    *inputs, down = part.mlp.projections()
    return [joined(linears) for linears in (qkv, [out], inputs, [down])]


def _packed_reasons(part: ModelPart) -> list[str]:
    """What is left of :func:`one_call_reasons` where weights are quantized."""
    device = part.embedding.weight.device.type
    if device not in ops.packed_layers.native:
        return [f"packed_layers has no kernels for {device}"]
    matrices = [matrix for layer in part.layers for matrix in _packed_matrices(layer)]
    if None in matrices:
        return ["a projection has a bias, or those of one input are no one weight"]
    if len({form for *_, form in matrices}) > 1:
        return ["the projections are quantized in different ways"]
    return []


def _all_packed_layers(emit: Emit, part: ModelPart, hidden: Any, caches: list[tuple], at: Positions) -> Any:
    """:func:`all_layers` where weights are quantized."""
    layers = part.layers
    attention, mlp = layers[0].attention, layers[0].mlp
    absent = part.embedding.weight.new_empty(0)
    weights, multipliers = [], []
    for layer in layers:
        matrices = _packed_matrices(layer)
        for place, (quants, scales, zeros, multiplier, _) in enumerate(matrices):
            if place % 2 == 0:
                _, *norm, _ = norm_arguments(layer.mlp_norm if place else layer.attention_norm)
                weights += norm
            weights += [quants, scales, zeros]
            multipliers.append(multiplier)
    kind, _, _, eps = norm_arguments(layers[0].attention_norm)
    hidden = emit(
        ops.packed_layers.overload,
        *(hidden, [absent if p is None else p for p in weights], multipliers, matrices[0][-1]),
        *([k for k, _ in caches], [v for _, v in caches], *at.angles_of(attention), at.seq_lens, at.starts),
        *(attention.num_heads, attention.scaling, [layer.window or 0 for layer in layers], kind, eps),
        *(mlp.activation, mlp.gate is not None),
    )
    return head(emit, part, hidden, at.overlap)


def all_layers(emit: Emit, part: ModelPart, hidden: Any, caches: list[tuple], at: Positions) -> Any:
    """All layers, the final norm and the head of a model without :func:`one_call_reasons`, over one new token of each
    sequence: ``hidden`` [batch, 1, hidden_size] in, logits [batch, 1, vocab_size] out."""
    layers = part.layers
    first = layers[0]
    if is_packed(first.mlp.down):
        return _all_packed_layers(emit, part, hidden, caches, at)
    norm, _, _, eps = norm_arguments(first.attention_norm)
    return emit(
        ops.decode_layers.overload,
        *(hidden, _all_weights(part), [k for k, _ in caches], [v for _, v in caches]),
        *(*at.angles_of(first.attention), at.seq_lens, at.starts, first.attention.num_heads, first.attention.scaling),
        *([layer.window or 0 for layer in layers], norm, eps, first.mlp.activation, is_transposed(first.mlp.up)),
        *(at.table_of(caches[0]), at.workspace, at.overlap),
    )
