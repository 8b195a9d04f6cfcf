"""The modules of a model in the roles that its architecture gives them, and reasons why a module cannot play its role.

Nothing here copies a weight: parts hold modules and look parameters up when the parameters are used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...architecture import Architecture
from ...compat import entry_of, has_static_rope
from ...linears.packed_embedding import PackedEmbedding
from ...native import loader
from ...reasons import Cause, class_name
from ...registry import PLAIN_TENSORS
from .attention_part import AttentionPart
from .layer_part import LayerPart
from .modules import (
    device_of,
    dropout_reason,
    model_code_reason,
    number,
    odd_module,
    out_features,
    own_code_reason,
    projection_reason,
    weight_and_bias,
)
from .numbers import reason_of_model
from .parts import NormPart, Part
from .whole_model import WholeModel


class DecoderPart(Part):
    """The module that runs the layers with its own code, whatever that code is."""

    def parameters(self) -> list[torch.Tensor | None]:
        return []

    def other_reason(self) -> str | None:
        return None

    def reason(self) -> str | None:
        return None


@dataclass(frozen=True)
class ModelInRoles(Part, WholeModel):
    """A causal LM as it is now, in the roles of its architecture.

    Attributes:
        windows: sliding window of each layer, None for full attention.
    """

    windows: tuple[int | None, ...]

    @property
    def attentions(self) -> list[AttentionPart]:
        """Of each layer."""
        return [layer.attention for layer in self.layers]

    @property
    def vocab_size(self) -> int:
        """Number of logits of a token."""
        return out_features(self.head)

    @property
    def num_embeddings(self) -> int:
        """Number of tokens that the model has embeddings of."""
        return len(self.embedding.weight)

    @property
    def decoder(self) -> nn.Module:
        return attrgetter(self.architecture.base)(self.module)

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
    def head(self) -> Any:
        return getattr(self.module, self.architecture.head)

    @property
    def embedding(self) -> Any:
        return getattr(self.decoder, self.architecture.embedding)

    @property
    def position_embedding(self) -> Any:
        """The module whose ``weight`` is the table of learned positions; None if there is none."""
        return self._optional(self.architecture.position_embedding)

    @property
    def position_offset(self) -> int:
        return int(number(self.position_embedding, self.architecture.position_offset, default=0))

    @property
    def rotary(self) -> nn.Module | None:
        return self._optional(self.architecture.rotary)

    @cached_property
    def layer_devices(self) -> list[torch.device]:
        """The device of each layer."""
        return [layer.device for layer in self.layers]

    @property
    def head_device(self) -> torch.device:
        """The device of the head."""
        return device_of(self.head)

    @property
    def norm_device(self) -> torch.device:
        """The device of the final norm; that of the head if the norm has no weight."""
        found = (self.device_of(each) for each in self.final_norm.parameters() if each is not None)
        return next(found, self.head_device)

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices in the order in which a step comes to them."""
        behind = self.norm_device, self.head_device
        return tuple(dict.fromkeys((self.embedding.weight.device, *self.layer_devices, *behind)))

    @property
    def embedding_multiplier(self) -> float:
        return number(self.decoder, self.architecture.embedding_multiplier)

    @property
    def embedding_scale(self) -> torch.Tensor | None:
        name = self.architecture.embedding_scale
        return None if name is None else getattr(self.embedding, name)

    @property
    def rope_kinds(self) -> tuple[str | None, ...]:
        """The kinds of layers that the rotary embedding has angles for; ``(None,)`` if it knows no kinds."""
        return () if self.rotary is None else tuple({layer.attention.layer_type: None for layer in self.layers})

    @property
    def logits_multiplier(self) -> float:
        return number(self.module, self.architecture.logits_multiplier)

    @property
    def logits_divisor(self) -> float:
        return number(self.module, self.architecture.logits_divisor)

    @property
    def logits_softcap(self) -> float:
        """Soft-cap of the logits; 0 for none."""
        return number(self.module, self.architecture.logits_softcap, default=0.0)

    def _embeddings(self) -> list[nn.Module]:
        return [module for module in (self.embedding, self.position_embedding) if module is not None]

    def parameters(self) -> list[torch.Tensor | None]:
        tables = (None if type(each) is PackedEmbedding else each.weight for each in self._embeddings())
        outer = [*weight_and_bias(self.head), *tables]
        return outer + self.final_norm.parameters() + [p for layer in self.layers for p in layer.parameters()]

    def other_reason(self) -> str | None:
        names = (self.architecture.layers, self.architecture.final_norm, self.architecture.embedding)
        missing = next((name for name in names if not hasattr(self.decoder, name)), None)
        return None if missing is None else Cause("class_not_supported", f"it has no {missing}", self.decoder)

    def reason(self) -> str | None:
        """Return why a decode plan of the model would not be right now, or None. Every generate() can afford to ask."""
        if (reason := self.other_reason()) is not None:
            return reason
        count = len(getattr(self.decoder, self.architecture.layers))
        if count != (told := min(len(self.windows), entry_of(self.module.config, "num_hidden_layers") or count)):
            return Cause("unsupported_config", f"{count} layers, {told} in the config", self.decoder)
        if self.final_norm.module is None:
            return Cause("unsupported_config", f"{self.architecture.final_norm}=None", self.decoder)
        for name in self.architecture.refuse:
            if (found := getattr(self.decoder, name, None)) is not None:
                return Cause("unsupported_config", f"{name} is {class_name(found)}", self.decoder)
        for module in self._embeddings():
            if not self._is_known_embedding(module):
                return odd_module(module, "a table of embeddings")
            if type(module) is not PackedEmbedding and type(module.weight) not in PLAIN_TENSORS:
                return self._code_reason(module) or odd_module(module, f"weight is {class_name(module.weight)}")
        reasons = [*map(self._table_reason, self._embeddings()), self._code_reason(self.decoder)]
        reasons.append(self.outer_reason())
        reasons.append(reason_of_model(self))
        reasons += [projection_reason(self.head, self.architecture), self.final_norm.reason()]
        reasons.append(dropout_reason(self.decoder, self.architecture.embedding_dropout))
        if self.rotary is not None:
            known = type(self.rotary).__module__ == self.architecture.module
            reasons += [
                None if known else Cause("class_not_supported", module=self.rotary),
                self._code_reason(self.rotary),
            ]
            if not has_static_rope(self.rotary):
                reasons.append(
                    Cause("dynamic_rope", f"rope_type={getattr(self.rotary, 'rope_type', None)!r}", self.rotary)
                )
        found = next((reason for reason in reasons if reason), None)
        found = found or next((reason for layer in self.layers if (reason := layer.reason())), None)
        return found or self._types_reason() or self._order_reason()

    def _order_reason(self) -> str | None:
        places = [getattr(each.module, "layer_idx", place) for place, each in enumerate(self.attentions)]
        if places == list(range(len(places))):
            return None
        return Cause("unsupported_config", f"layers whose layer_idx is {places}, in this order", self.decoder)

    def outer_reason(self) -> str | None:
        """Return why calling the model does more than its class's forward, or None.

        A trainer's autocast around a float32 model is no reason: autocast would only add rounding.
        """
        return None if self.is_cast_down else model_code_reason(self.module, self.architecture.module)

    def _is_known_embedding(self, module: nn.Module) -> bool:
        spec = self.architecture
        of_its_own = spec.embedding_scale if module is self.embedding else spec.position_offset
        if getattr(module, "max_norm", None) is not None:  # it changes the weights of the tokens that it is asked for
            return False
        if of_its_own is None:
            return type(module) in (nn.Embedding, PackedEmbedding)
        return isinstance(module, nn.Embedding) and type(module).__module__ == spec.module

    def _table_reason(self, table: nn.Module) -> str | None:
        """Return why calling a table of embeddings does more than its class's forward, or None."""
        if type(table) is PackedEmbedding:
            return own_code_reason(table, type(table).__module__)
        return self._code_reason(table)

    def _types_reason(self) -> str | None:
        for code, kind in (("dtype", attrgetter("dtype")), ("device", self.device_of)):
            first: dict[Any, torch.Tensor] = {}  # the first parameter of each dtype or device
            for parameter in self.parameters():
                if parameter is not None:
                    first.setdefault(kind(parameter), parameter)
            if len(first) > 1 and not (code == "device" and self._is_in_stages(first)):
                return Cause(code, ", ".join(f"{self._name_of(each)} is {found}" for found, each in first.items()))
        # a model on the meta device is only asked about, and runs nowhere
        devices = (each.type for each in first if each.type != "meta")
        found = ((loader.why_not_native(each), each) for each in devices)
        return next((Cause(code, f"device {each}") for code, each in found if code is not None), None)

    def _is_in_stages(self, devices: Iterable[torch.device]) -> bool:
        """Whether the model lies on several GPUs so that each part of it is on one."""
        outer = weight_and_bias(self.head), self.final_norm.parameters(), [each.weight for each in self._embeddings()]
        groups = [*outer, *(layer.parameters() for layer in self.layers)]
        places = [{self.device_of(p) for p in group if p is not None} for group in groups]
        return all(device.type == "cuda" for device in devices) and all(len(place) <= 1 for place in places)

    def _name_of(self, parameter: torch.Tensor) -> str:
        return next((name for name, each in self.module.named_parameters() if each is parameter), "a weight")


def full_angles(architecture: Architecture, table: torch.Tensor) -> torch.Tensor:
    """Return cos or sin as the kernels take them, [..., rotary_dim]: both elements of a rotated pair have an entry."""
    return torch.cat((table, table), dim=-1) if architecture.half_angles else table
