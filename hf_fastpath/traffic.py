"""Bytes that one decode step has to read, which bound its speed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .compat import (
    cache_name,
    has_encoder,
    head_dim,
    is_multimodal,
    layer_config,
    layer_kinds,
    text_decoder,
    text_embedding,
    text_head,
)
from .linears.packed_experts import PackedExperts
from .linears.packed_linear import PackedLinear
from .ops.kv_cache import SCALE_DTYPE, is_quantized

#: config entries that hold the features inside an MLP; a config without them has four times the model's features there
_MLP_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")


def weight_bytes(model: Any, batch: int = 1) -> int:
    """Return the bytes of weights that one decode step reads.

    Every parameter is read once, whatever the batch. Of an embedding table, only a row for each sequence is read; of a
    mixture's experts, only the chosen ones, as if no two sequences chose the same expert. A head that is tied to an
    embedding table is read in full. Of a multimodal model and of an encoder-decoder, the decoder is read; of the latter
    also the weights that make keys and values of the encoder's output, which are read once a prompt, count here.
    """
    head = text_head(model)
    modules = _modules_of_a_step(model)
    tables = [module.weight for module in modules if isinstance(module, nn.Embedding)]
    gathered = {id(table) for table in tables}
    if head is not None:
        gathered.discard(id(getattr(head, "weight", None)))
    rows = sum(batch * table.shape[1] * table.element_size() for table in tables)
    chosen = batch * (getattr(model.config.get_text_config(decoder=True), "num_experts_per_tok", None) or 0)
    total = rows
    for parameter in {id(each): each for module in modules for each in module.parameters(recurse=False)}.values():
        if id(parameter) not in gathered:
            is_stack = chosen and parameter.dim() == 3
            total += parameter.nbytes * min(chosen, len(parameter)) // len(parameter) if is_stack else parameter.nbytes
    stacks = {id(each): module for module in modules if isinstance(module, PackedExperts) for each in module.children()}
    for module in (each for each in modules if type(each) is PackedLinear):
        nbytes = sum(buffer.nbytes for buffer in module.buffers())
        experts = stacks.get(id(module))
        total += nbytes if experts is None else nbytes * min(chosen, experts.num_experts) // experts.num_experts
    return total


def _modules_of_a_step(model: Any) -> list[nn.Module]:
    if not (is_multimodal(model) or has_encoder(model)):
        return list(model.modules())
    roots = text_decoder(model), text_embedding(model), text_head(model)
    return list(dict.fromkeys(module for root in roots if root is not None for module in root.modules()))


def layer_widths(config: Any) -> tuple[int, int, int]:
    """Return the features of a layer's queries, of its keys (its values have as many), and inside its MLP."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1  # Falcon; its newer architecture keeps keys and values for every query head
    inner = next(filter(None, (getattr(config, name, None) for name in _MLP_WIDTHS)), 4 * config.hidden_size)
    return heads * head_dim(config), kv_heads * head_dim(config), inner


def kv_bytes(config: Any, context: float, dtype: torch.dtype, batch: int = 1) -> int:
    """Return the bytes of keys and values, or of a latent, that a decode step reads if each sequence holds ``context``
    positions. Recurrent states and windows of convolutions are not counted: a config does not tell their sizes, see
    :func:`state_bytes`. Nor is what a decoder keeps of an encoder's output, which has a length of its own.

    Layers that keep states instead of keys and values count for nothing; of latent attention, the latents are read.

    Args:
        dtype: storage type of the cache; of a quantized cache, the scales are read as well.

    Raises:
        ValueError: a layer holds something else than keys, values and states.
    """
    config = config.get_text_config(decoder=True)
    kinds = layer_kinds(config)
    if kinds is None:
        raise ValueError(f"{type(config).__name__} has layers that hold more than keys, values and states")
    total = 0.0
    for layer, kind in enumerate(kinds):
        if kind.keys:
            positions = context if kind.window is None else min(context, kind.window)
            total += positions * _position_bytes(layer_config(config, layer), dtype)
    return int(total * batch)


def state_bytes(model: Any, batch: int = 1) -> int:
    """Return the bytes of recurrent states and windows of convolutions that a decode step reads: all that a cache holds
    of them behind one token, which the model's forward reads for that if its config tells of states."""
    kinds = layer_kinds(model.config.get_text_config(decoder=True)) or []
    if not any(kind.states for kind in kinds):
        return 0
    with torch.no_grad():
        out = model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True)
    cache = out[cache_name(model)]
    layers = [layer for layer, kind in zip(cache.layers, kinds) if kind.states]
    states = [states for layer in layers for states in (layer.conv_states, layer.recurrent_states)]
    return batch * sum(each.nbytes for held in states for each in held.values() if each is not None)


def _position_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes that a layer with this config keeps of a position."""
    if (latent := getattr(config, "kv_lora_rank", None)) is not None:
        elements, scales = latent + config.qk_rope_head_dim, 2
    else:
        width, kv_width, _ = layer_widths(config)
        elements, scales = 2 * kv_width, 2 * kv_width * config.num_attention_heads // width
    return elements * dtype.itemsize + is_quantized(dtype) * scales * SCALE_DTYPE.itemsize
