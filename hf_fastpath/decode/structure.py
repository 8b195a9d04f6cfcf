"""The modules of a model in the roles its architecture gives them, with the reasons why a role cannot be played.

Nothing here copies a weight: parts hold modules and look parameters up when they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import architecture as arch
from ..compat import Conv1D, activation_name, has_hooks, has_static_rope, layer_windows
from ..ops.decode_attention import MAX_HEAD_DIM, MIN_HEAD_DIM
from ..registry import FLOAT_DTYPES

_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)


def own_code_reason(module: nn.Module) -> str | None:
    """Why calling ``module`` is more than its class's forward, or None."""
    if has_hooks(module):
        return "hooks"
    override = vars(module).get("forward")
    # An unpickled module may carry its class's own forward as a bound method: that is no override.
    if override is not None and getattr(override, "__func__", None) is not type(module).forward:
        return "instance_forward"
    return None


def projection_reason(module: nn.Module) -> str | None:
    """Why the kernels cannot stand in for this projection, or None.

    Only the exact classes count: LoRA's ``weight`` is the base weight, a quantized one is not a plain tensor.
    """
    if type(module) not in (nn.Linear, Conv1D):
        return "unsupported_projection"
    weight = module.weight
    if type(weight) not in _PLAIN_TENSORS or weight.stride(-1) != 1:
        return "unsupported_projection"
    if weight.dtype not in FLOAT_DTYPES or (module.bias is not None and module.bias.dtype != weight.dtype):
        return "dtype"
    return own_code_reason(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a projection's weight is [in_features, out_features]."""
    return type(module) is Conv1D


@dataclass
class NormPart:
    """A norm: ``kind``, the module, and its epsilon."""

    spec: arch.Norm
    module: nn.Module

    @property
    def eps(self) -> float:
        return getattr(self.module, self.spec.eps)

    def parameters(self) -> list[torch.Tensor | None]:
        return [self.module.weight, getattr(self.module, "bias", None)]

    def reason(self) -> str | None:
        """Why the kernels cannot stand in for it, or None."""
        if self.spec.kind == "layer" and type(self.module) is not nn.LayerNorm:
            return "class_not_supported"
        if any(p is not None and p.dtype not in FLOAT_DTYPES for p in self.parameters()):
            return "dtype"
        return own_code_reason(self.module) if type(self.module) is nn.LayerNorm else _patched_reason(self.module)


@dataclass
class MLPPart:
    """A plain or gated MLP."""

    spec: arch.MLP
    module: nn.Module

    # Looked up at every use: PEFT and others replace projections after patching.
    @property
    def up(self) -> nn.Module:
        return getattr(self.module, self.spec.up)

    @property
    def down(self) -> nn.Module:
        return getattr(self.module, self.spec.down)

    @property
    def gate(self) -> nn.Module | None:
        return None if self.spec.gate is None else getattr(self.module, self.spec.gate)

    @property
    def activation(self) -> str | None:
        return activation_name(getattr(self.module, self.spec.activation))

    def projections(self) -> list[nn.Module]:
        return [linear for linear in (self.gate, self.up, self.down) if linear is not None]

    def parameters(self) -> list[torch.Tensor | None]:
        return [p for linear in self.projections() for p in (linear.weight, linear.bias)]

    def activation_reason(self) -> str | None:
        """Why the fused activation cannot stand in, or None."""
        if self.activation is None or (self.spec.gate is not None and self.activation == "relu"):
            return "unsupported_activation"
        return own_code_reason(getattr(self.module, self.spec.activation))

    def reason(self) -> str | None:
        """Why the fused projections cannot stand in, or None."""
        reasons = [self.activation_reason(), _patched_reason(self.module)]
        reasons += [projection_reason(linear) for linear in self.projections()]
        if self.spec.dropout is not None and _drops(getattr(self.module, self.spec.dropout)):
            reasons.append("dropout")
        return next((reason for reason in reasons if reason), None)


@dataclass
class AttentionPart:
    """An attention module with separate or fused query, key and value projections."""

    spec: arch.Attention
    module: nn.Module
    window: int | None

    def projections(self) -> list[nn.Module]:
        return [getattr(self.module, name) for name in (*self.spec.qkv, self.spec.out)]

    def parameters(self) -> list[torch.Tensor | None]:
        return [p for linear in self.projections() for p in (linear.weight, linear.bias)]

    @property
    def head_dim(self) -> int:
        return self.module.head_dim

    @property
    def num_heads(self) -> int:
        return self.module.config.num_attention_heads

    @property
    def scaling(self) -> float:
        return float(getattr(self.module, self.spec.scaling))

    def reason(self) -> str | None:
        """Why the kernels cannot stand in for it, or None."""
        if any(getattr(self.module, name, False) for name in self.spec.refuse):
            return "unsupported_config"
        if not MIN_HEAD_DIM <= self.head_dim <= MAX_HEAD_DIM or self.head_dim % 8:
            return "unsupported_head_dim"
        reasons = [projection_reason(linear) for linear in self.projections()] + [_patched_reason(self.module)]
        dropouts = [getattr(self.module, self.spec.attention_dropout, 0.0)]
        if self.spec.residual_dropout is not None:
            dropouts.append(getattr(self.module, self.spec.residual_dropout))
        if self.module.training and any(_probability(dropout) > 0 for dropout in dropouts):
            reasons.append("dropout")
        return next((reason for reason in reasons if reason), None)


@dataclass
class LayerPart:
    """A decoder layer and its four parts."""

    spec: arch.Layer
    module: nn.Module
    attention_norm: NormPart
    attention: AttentionPart
    mlp_norm: NormPart
    mlp: MLPPart

    def parts(self) -> list[Any]:
        return [self.attention_norm, self.attention, self.mlp_norm, self.mlp]

    def parameters(self) -> list[torch.Tensor | None]:
        return [parameter for part in self.parts() for parameter in part.parameters()]

    def reason(self) -> str | None:
        """Why the fused layer cannot stand in, or None."""
        if any(hasattr(self.module, name) for name in self.spec.refuse):
            return "unsupported_config"
        reasons = (part.reason() for part in self.parts())
        return next((reason for reason in reasons if reason), None) or _patched_reason(self.module)


@dataclass
class ModelPart:
    """A causal LM: what a decode plan needs of it."""

    architecture: arch.Architecture
    model: nn.Module
    layers: list[LayerPart]
    final_norm: NormPart
    head: nn.Module
    embedding: nn.Embedding
    position_embedding: nn.Embedding | None
    rotary: nn.Module | None
    decoder: nn.Module = field(repr=False)

    def parameters(self) -> list[torch.Tensor | None]:
        embeddings = [self.embedding.weight, self.head.weight, self.head.bias]
        if self.position_embedding is not None:
            embeddings.append(self.position_embedding.weight)
        return embeddings + self.final_norm.parameters() + [p for layer in self.layers for p in layer.parameters()]

    def reason(self) -> str | None:
        """Why a decode plan of this model would not be right now, or None. Cheap enough for every generate()."""
        embeddings = [self.embedding] + ([self.position_embedding] if self.position_embedding is not None else [])
        if any(type(module) is not nn.Embedding for module in embeddings):
            return "unsupported_projection"
        reasons = [own_code_reason(module) for module in embeddings]
        if self.rotary is not None:
            reasons += [None if has_static_rope(self.rotary) else "dynamic_rope", own_code_reason(self.rotary)]
        reasons += [projection_reason(self.head), self.final_norm.reason(), self._types_reason()]
        reasons += ["hooks" if has_hooks(module) else None for module in (self.model, self.decoder)]
        reasons += [own_code_reason(self.decoder), own_code_reason(self.model)]
        dropout = self.architecture.embedding_dropout
        if dropout is not None and _drops(getattr(self.decoder, dropout)):
            reasons.append("dropout")
        found = next((reason for reason in reasons if reason), None)
        return found or next((reason for layer in self.layers if (reason := layer.reason())), None)

    def _types_reason(self) -> str | None:
        present = [parameter for parameter in self.parameters() if parameter is not None]
        if len({parameter.dtype for parameter in present}) > 1:
            return "dtype"
        return "device" if len({parameter.device for parameter in present}) > 1 else None


def _patched_reason(module: nn.Module) -> str | None:
    """Like ``own_code_reason`` for a module that may carry our own forward."""
    if has_hooks(module):
        return "hooks"
    override = vars(module).get("forward")
    function = getattr(override, "__func__", None)
    ours = getattr(function, "__module__", "").startswith("hf_fastpath.")
    return None if override is None or ours or function is type(module).forward else "instance_forward"


def _probability(dropout: Any) -> float:
    return dropout.p if isinstance(dropout, nn.Dropout) else float(dropout or 0.0)


def _drops(dropout: nn.Dropout) -> bool:
    return dropout.training and dropout.p > 0


def layer_part(architecture: arch.Architecture, module: nn.Module, window: int | None) -> LayerPart:
    """The parts of one decoder layer."""
    spec = architecture.layer
    return LayerPart(
        spec,
        module,
        NormPart(architecture.norm, getattr(module, spec.attention_norm)),
        AttentionPart(architecture.attention, getattr(module, spec.attention), window),
        NormPart(architecture.norm, getattr(module, spec.mlp_norm)),
        MLPPart(architecture.mlp, getattr(module, spec.mlp)),
    )


def model_part(architecture: arch.Architecture, model: nn.Module) -> ModelPart | None:
    """The parts of a causal LM of ``architecture``, or None if ``model`` is not exactly one or is of other layers."""
    cls = type(model)
    if (cls.__module__, cls.__name__) != (architecture.module, architecture.causal_lm):
        return None
    decoder = getattr(model, architecture.base)
    layers = getattr(decoder, architecture.layers)
    windows = layer_windows(model.config)
    if windows is None or any(architecture.part_of(layer) != "layer" for layer in layers):
        return None

    def optional(name: str | None) -> Any:
        return None if name is None else getattr(decoder, name)

    return ModelPart(
        architecture,
        model,
        [layer_part(architecture, layer, window) for layer, window in zip(layers, windows)],
        NormPart(architecture.norm, getattr(decoder, architecture.final_norm)),
        getattr(model, architecture.head),
        getattr(decoder, architecture.embedding),
        optional(architecture.position_embedding),
        optional(architecture.rotary),
        decoder,
    )


def fingerprint(part: ModelPart) -> tuple:
    """What a decode plan bakes in of the model: which parameters, where they are, and of which type."""
    return tuple(None if p is None else (id(p), p.data_ptr(), p.dtype) for p in part.parameters())
