"""The modules of a model in the roles its architecture gives them, with the reasons why a role cannot be played.

Nothing here copies a weight: parts hold modules and look parameters up when they are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import architecture as arch
from ..architecture import Architecture
from ..compat import (
    Conv1D,
    activation_name,
    attention_function,
    has_hooks,
    has_static_rope,
    is_library_code,
    is_wrapped_by,
    layer_windows,
    rotation_function,
)
from ..ops.decode_attention import MAX_HEAD_DIM, MIN_HEAD_DIM
from ..registry import FLOAT_DTYPES

_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)


def child(module: nn.Module, name: str) -> Any:
    """``getattr(module, name)``, without the detour through ``nn.Module.__getattr__`` where that is possible.

    Every generate() looks at every module of the model, so it counts.
    """
    found = module.__dict__["_modules"].get(name)
    return getattr(module, name) if found is None else found


def weight_and_bias(module: nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``module.weight`` and ``module.bias``, None where there is none; as :func:`child`."""
    parameters = module.__dict__["_parameters"]
    weight = parameters["weight"] if "weight" in parameters else getattr(module, "weight", None)
    return weight, parameters["bias"] if "bias" in parameters else getattr(module, "bias", None)


def own_code_reason(module: nn.Module) -> str | None:
    """Why calling ``module`` is more than its class's forward, or None."""
    if has_hooks(module):
        return "hooks"
    if not is_library_code(type(module).forward):
        return "class_forward"
    override = module.__dict__.get("forward")
    if override is None:
        return None
    function = getattr(override, "__func__", None)
    # Ours is no override; nor is the class's own forward, bound: an unpickled module may carry it; accelerate leaves
    # it without its decorators.
    ours = getattr(function, "__module__", "").startswith("hf_fastpath.")
    return None if ours or is_wrapped_by(function, type(module).forward) else "instance_forward"


def projection_reason(module: nn.Module) -> str | None:
    """Why the kernels cannot stand in for this projection, or None.

    Only the exact classes count: LoRA's ``weight`` is the base weight, a quantized one is not a plain tensor.
    """
    if type(module) not in (nn.Linear, Conv1D):
        return "unsupported_projection"
    parameters = module.__dict__["_parameters"]
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if type(weight) not in _PLAIN_TENSORS or weight.stride(-1) != 1:
        return "unsupported_projection"
    if weight.dtype not in FLOAT_DTYPES or (bias is not None and bias.dtype != weight.dtype):
        return "dtype"
    return own_code_reason(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a projection's weight is [in_features, out_features]."""
    return type(module) is Conv1D


@dataclass(frozen=True)
class Part:
    """A module in a role. What is inside the module is looked up at every use: it may be replaced after patching."""

    architecture: Architecture
    module: nn.Module

    def parameters(self) -> list[torch.Tensor | None]:
        """Parameters the kernels read for it; None for a bias that is not there."""
        raise NotImplementedError

    def reason(self) -> str | None:
        """Why the kernels cannot stand in for it right now, or None."""
        raise NotImplementedError

    def _own_reason(self, kind: str) -> str | None:
        return None if self.architecture.part_of(self.module) == kind else "class_not_supported"


class NormPart(Part):
    """A norm."""

    @property
    def eps(self) -> float:
        return getattr(self.module, self.architecture.norm.eps)

    def parameters(self) -> list[torch.Tensor | None]:
        return list(weight_and_bias(self.module))

    def reason(self) -> str | None:
        if self.architecture.norm.kind == "layer":
            if type(self.module) is not nn.LayerNorm:
                return "class_not_supported"
        elif (reason := self._own_reason("norm")) is not None:
            return reason
        if any(p is not None and p.dtype not in FLOAT_DTYPES for p in self.parameters()):
            return "dtype"
        return own_code_reason(self.module)


class MLPPart(Part):
    """A plain or gated MLP."""

    @property
    def spec(self) -> arch.MLP:
        return self.architecture.mlp

    @property
    def up(self) -> nn.Module:
        return child(self.module, self.spec.up)

    @property
    def down(self) -> nn.Module:
        return child(self.module, self.spec.down)

    @property
    def gate(self) -> nn.Module | None:
        return None if self.spec.gate is None else child(self.module, self.spec.gate)

    @property
    def activation(self) -> str | None:
        return activation_name(child(self.module, self.spec.activation))

    @property
    def is_joined(self) -> bool:
        """Whether gate and up are one projection."""
        return self.spec.gate == self.spec.up

    def gate_and_up(self) -> list[torch.Tensor]:
        """Weights of gate and up: those of two projections, or views of one's halves."""
        return list(self.up.weight.chunk(2)) if self.is_joined else [self.gate.weight, self.up.weight]

    def projections(self) -> list[nn.Module]:
        gate = None if self.is_joined else self.gate
        return [linear for linear in (gate, self.up, self.down) if linear is not None]

    def parameters(self) -> list[torch.Tensor | None]:
        return [p for linear in self.projections() for p in weight_and_bias(linear)]

    def activation_reason(self) -> str | None:
        """Why the fused activation cannot stand in, or None."""
        if self.activation is None or (self.spec.gate is not None and self.activation == "relu"):
            return "unsupported_activation"
        return own_code_reason(child(self.module, self.spec.activation))

    def reason(self) -> str | None:
        reasons = [self._own_reason("mlp"), self.activation_reason(), own_code_reason(self.module)]
        reasons += [projection_reason(linear) for linear in self.projections()]
        if self.is_joined and (self.up.bias is not None or is_transposed(self.up)):
            reasons.append("unsupported_projection")
        reasons.append(dropout_reason(self.module, self.spec.dropout))
        return next((reason for reason in reasons if reason), None)


@dataclass(frozen=True)
class AttentionPart(Part):
    """An attention module with separate or fused query, key and value projections.

    Attributes:
        window: positions a token sees, itself included; None for all.
    """

    window: int | None

    @property
    def spec(self) -> arch.Attention:
        return self.architecture.attention

    def projections(self) -> list[nn.Module]:
        return [child(self.module, name) for name in (*self.spec.qkv, self.spec.out)]

    @property
    def head_norms(self) -> list[NormPart]:
        """Norms over every head's query and key, or none."""
        return [NormPart(self.architecture, child(self.module, name)) for name in self.spec.head_norms or ()]

    def parameters(self) -> list[torch.Tensor | None]:
        found = [p for linear in self.projections() for p in weight_and_bias(linear)]
        return found + [p for norm in self.head_norms for p in norm.parameters()]

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
        if any(getattr(self.module, name, False) for name in self.spec.refuse):
            return "unsupported_config"
        if not MIN_HEAD_DIM <= self.head_dim <= MAX_HEAD_DIM or self.head_dim % 8:
            return "unsupported_head_dim"
        if not is_library_code(attention_function(self.module)):
            return "attention_function"
        if not is_library_code(rotation_function(self.module)):
            return "class_forward"
        reasons = [self._own_reason("attention"), own_code_reason(self.module)]
        reasons += [projection_reason(linear) for linear in self.projections()]
        reasons += [dropout_reason(self.module, self.spec.attention_dropout)]
        reasons += [norm.reason() for norm in self.head_norms]
        reasons += [dropout_reason(self.module, self.spec.residual_dropout)]
        return next((reason for reason in reasons if reason), None)


@dataclass(frozen=True)
class LayerPart(Part):
    """A decoder layer and its four parts.

    Attributes:
        window: sliding window of its attention, or None.
    """

    window: int | None

    def _child(self, name: str) -> nn.Module:
        return child(self.module, name)

    @property
    def attention_norm(self) -> NormPart:
        return NormPart(self.architecture, self._child(self.architecture.layer.attention_norm))

    @property
    def attention(self) -> AttentionPart:
        return AttentionPart(self.architecture, self._child(self.architecture.layer.attention), self.window)

    @property
    def mlp_norm(self) -> NormPart:
        return NormPart(self.architecture, self._child(self.architecture.layer.mlp_norm))

    @property
    def mlp(self) -> MLPPart:
        return MLPPart(self.architecture, self._child(self.architecture.layer.mlp))

    def parts(self) -> list[Part]:
        return [self.attention_norm, self.attention, self.mlp_norm, self.mlp]

    def parameters(self) -> list[torch.Tensor | None]:
        return [parameter for part in self.parts() for parameter in part.parameters()]

    def reason(self) -> str | None:
        spec = self.architecture.layer
        if any(getattr(self.module, name, False) is not False for name in spec.refuse):
            return "unsupported_config"
        if self.module.training and getattr(self.module, "gradient_checkpointing", False):
            return "checkpointing"
        reasons = [self._own_reason("layer"), own_code_reason(self.module)]
        reasons += [dropout_reason(self.module, name) for name in spec.dropouts]
        reasons += [part.reason() for part in self.parts()]
        return next((reason for reason in reasons if reason), None)


@dataclass(frozen=True)
class ModelPart(Part):
    """A causal LM as it is now: what a decode plan needs of it.

    Attributes:
        windows: sliding window of each layer, None for full attention.
    """

    windows: tuple[int | None, ...]

    @property
    def decoder(self) -> nn.Module:
        return getattr(self.module, self.architecture.base)

    def _optional(self, name: str | None) -> Any:
        return None if name is None else getattr(self.decoder, name)

    @property
    def layers(self) -> list[LayerPart]:
        modules = getattr(self.decoder, self.architecture.layers)
        return [LayerPart(self.architecture, module, window) for module, window in zip(modules, self.windows)]

    @property
    def final_norm(self) -> NormPart:
        return NormPart(self.architecture, getattr(self.decoder, self.architecture.final_norm))

    @property
    def head(self) -> nn.Module:
        return getattr(self.module, self.architecture.head)

    @property
    def embedding(self) -> nn.Module:
        return getattr(self.decoder, self.architecture.embedding)

    @property
    def position_embedding(self) -> nn.Module | None:
        return self._optional(self.architecture.position_embedding)

    @property
    def rotary(self) -> nn.Module | None:
        return self._optional(self.architecture.rotary)

    def _embeddings(self) -> list[nn.Module]:
        return [module for module in (self.embedding, self.position_embedding) if module is not None]

    def parameters(self) -> list[torch.Tensor | None]:
        outer = [*weight_and_bias(self.head), *(module.weight for module in self._embeddings())]
        return outer + self.final_norm.parameters() + [p for layer in self.layers for p in layer.parameters()]

    def reason(self) -> str | None:
        """Why a decode plan of the model would not be right now, or None. Cheap enough for every generate()."""
        if len(getattr(self.decoder, self.architecture.layers)) != len(self.windows):
            return "unsupported_config"
        if any(type(module) is not nn.Embedding for module in self._embeddings()):
            return "unsupported_projection"
        reasons = [own_code_reason(module) for module in (*self._embeddings(), self.decoder, self.module)]
        reasons += [projection_reason(self.head), self.final_norm.reason()]
        reasons.append(dropout_reason(self.decoder, self.architecture.embedding_dropout))
        if self.rotary is not None:
            known = type(self.rotary).__module__ == self.architecture.module
            reasons += [None if known else "class_not_supported", own_code_reason(self.rotary)]
            reasons.append(None if has_static_rope(self.rotary) else "dynamic_rope")
        found = next((reason for reason in reasons if reason), None)
        found = found or next((reason for layer in self.layers if (reason := layer.reason())), None)
        return found or self._types_reason()

    def _types_reason(self) -> str | None:
        present = [parameter for parameter in self.parameters() if parameter is not None]
        if len({parameter.dtype for parameter in present}) > 1:
            return "dtype"
        return "device" if len({parameter.device for parameter in present}) > 1 else None


def dropout_reason(module: nn.Module, name: str | None) -> str | None:
    """Why a fused span cannot skip the dropout ``name`` of ``module``: a probability or an ``nn.Dropout``."""
    dropout = None if name is None else getattr(module, name)
    if not isinstance(dropout, nn.Module):
        return "dropout" if dropout and module.training else None
    if type(dropout) not in (nn.Dropout, nn.Identity):
        return "class_not_supported"
    active = type(dropout) is nn.Dropout and dropout.training and dropout.p > 0
    return "dropout" if active else own_code_reason(dropout)


def apply_dropout(module: nn.Module, name: str | None, x: torch.Tensor) -> torch.Tensor:
    """The dropout ``name`` of ``module``, if there is one, as stock code applies it."""
    dropout = None if name is None else getattr(module, name)
    if isinstance(dropout, nn.Module):
        return dropout(x)
    return nn.functional.dropout(x, dropout, module.training) if dropout else x


def model_part(architecture: Architecture, model: nn.Module) -> ModelPart | None:
    """A causal LM of ``architecture``, or None if ``model`` is not exactly one."""
    cls = type(model)
    if (cls.__module__, cls.__name__) != (architecture.module, architecture.causal_lm):
        return None
    windows = layer_windows(model.config)
    return None if windows is None else ModelPart(architecture, model, tuple(windows))


def fingerprint(part: ModelPart) -> tuple:
    """What a decode plan bakes in of the model: parameters, where and of which type they are, and constants."""
    parameters = [None if p is None else (id(p), p.data_ptr(), p.dtype) for p in part.parameters()]
    constants = [
        (layer.attention.scaling, layer.attention.num_heads, layer.window, layer.mlp.activation)
        + (layer.attention_norm.eps, layer.mlp_norm.eps, *(norm.eps for norm in layer.attention.head_norms))
        for layer in part.layers
    ]
    angles = () if part.rotary is None else _values_of(part.rotary)
    return (*parameters, *constants, part.final_norm.eps, angles)


def _values_of(rotary: nn.Module) -> tuple:
    """What a table of rotary angles depends on."""
    buffers = [buffer for buffer in rotary.buffers() if not buffer.is_inference()]
    changes = [(id(buffer), buffer.data_ptr(), buffer._version) for buffer in buffers]
    return (id(rotary), getattr(rotary, "attention_scaling", None), *changes)
