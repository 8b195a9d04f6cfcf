"""What a decode plan records of a described model."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..model.modules import is_packed
from ..model.parts import MoEPart


def fingerprint(part: Any) -> tuple:
    """Return what a decode plan records of the model: constants, and parameters with their addresses and dtypes."""
    parameters: list[tuple | None] = [None if p is None else (id(p), p.data_ptr(), p.dtype) for p in part.parameters()]
    linears = [part.head, *(linear for layer in part.layers for linear in layer.projections())]
    packed: list[Any] = [linear for linear in linears if is_packed(linear)]
    packed += [layer.mlp.packed for layer in part.layers if isinstance(layer.mlp, MoEPart) and layer.mlp.packed]
    parameters += [(id(linear.quants), linear.quants.data_ptr()) for linear in packed]
    constants = [
        (layer.attention.scaling, layer.attention.softcap, layer.attention.num_heads, layer.window)
        + layer.mlp.constants
        + (layer.attention.rotates, layer.attention.layer_type, layer.is_parallel, layer.residual_multiplier)
        + tuple(norm.eps for norm in (*layer.norms, *layer.attention.head_norms))
        for layer in part.layers
    ]
    outer = (part.embedding_multiplier, part.logits_multiplier, part.logits_divisor, part.logits_softcap)
    inner = (part.position_offset, None if part.embedding_scale is None else id(part.embedding_scale))
    angles = () if part.rotary is None else angle_facts(part.rotary)
    return (*parameters, *constants, *outer, *inner, part.final_norm.eps, angles)


def angle_facts(rotary: nn.Module) -> tuple:
    """Return what a table of rotary angles depends on."""
    buffers = [buffer for buffer in rotary.buffers() if not buffer.is_inference()]
    changes = [(id(buffer), buffer.data_ptr(), buffer._version) for buffer in buffers]
    scalings = {name: value for name, value in vars(rotary).items() if name.endswith("attention_scaling")}
    return (id(rotary), *sorted(scalings.items()), *changes)
