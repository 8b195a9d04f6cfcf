"""Models of which accelerate keeps weights in host memory, and the family of models that an architecture describes.

accelerate's hooks leave such weights on "meta" and bring them for every call of their module. A plan reads the tensors
that the hooks copy from: on the CPU where they lie, on a GPU through :mod:`.fetch`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .. import compat
from ..architecture import Architecture
from ..reasons import Cause
from .local_models import LocalPart, copied, has_local, rebuilt
from .modules import is_own_forward, weight_and_bias
from .structure import ModelPart, model_part

#: attributes that accelerate's hooks leave on a module
_HOOKED = ("_hf_hook", "_old_forward")


def local_model(model: nn.Module) -> nn.Module:
    """Return a model whose tensors are those that accelerate's hooks copy from, without these hooks.

    Modules for which nothing is brought are those of ``model`` itself. Tensors on disk stay on "meta".
    """

    def local(module: nn.Module, children: dict[str, Any]) -> nn.Module:
        brought = compat.brought(module)
        if not brought and not has_local(module, children):
            return module
        forward = vars(module).get("forward" if compat.placement(module) is None else "_old_forward")
        if is_own_forward(module, forward):
            forward = None
        known = {name: each for name, each in brought.items() if each is not None}
        parameters, buffers = (
            {name: known.get(name, each) for name, each in own.items()} for own in (module._parameters, module._buffers)
        )
        return copied(module, children, forward, _HOOKED, _parameters=parameters, _buffers=buffers)

    return rebuilt(model, local)


@dataclass(frozen=True)
class OffloadedPart(LocalPart):
    """A model some weights of which wait in host memory or on disk."""

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Return where calls read a tensor: what waits in host memory is brought to the embeddings' device."""
        return self.home if self._waits(tensor) else tensor.device

    @property
    def home(self) -> torch.device:
        """The device of the embeddings."""
        return self.embedding.weight.device

    @cached_property
    def _brought(self) -> list[tuple[nn.Module, dict[str, torch.Tensor | None]]]:
        """The model's modules whose hooks bring something, and what that is."""
        return [(module, found) for module in self.whole.modules() if (found := compat.brought(module))]

    @cached_property
    def _waiting(self) -> dict[int, torch.Tensor]:
        tensors = (each for _, found in self._brought for each in found.values() if each is not None)
        return {id(each): each for each in tensors if self.is_elsewhere(each)}

    def is_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that a hook brings is not where the embeddings are."""
        return tensor.device != self.home

    def _waits(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._waiting

    @property
    def host_weights(self) -> list[list[torch.Tensor]]:
        head = [*self.final_norm.parameters(), *weight_and_bias(self.head)]
        groups = [*(layer.parameters() for layer in self.layers), head]
        return [[each for each in group if each is not None and self._waits(each)] for group in groups]

    @property
    def sources(self) -> list[tuple[int, int]]:
        found = (compat.brought(module).values() for module, _ in self._brought)
        return [(id(each), each.data_ptr()) for values in found for each in values if each is not None]

    @cached_property
    def layer_devices(self) -> list[torch.device]:
        return [self._device_of_all(layer.parameters(), layer.device) for layer in self.layers]

    @property
    def head_device(self) -> torch.device:
        return self._device_of_all(weight_and_bias(self.head), super().head_device)

    def _device_of_all(self, tensors: Iterable[torch.Tensor | None], device: torch.device) -> torch.device:
        """Return the home if some of ``tensors`` wait in host memory, else ``device``."""
        return self.home if any(each is not None and self._waits(each) for each in tensors) else device

    def lasting_reason(self) -> str | None:
        if (reason := self.other_reason()) is not None:
            return reason
        for module, found in self._brought:
            if None in found.values():
                return Cause("offloaded", "weights that are on disk, or that accelerate converts", module)
            there = compat.execution_device(module)
            if there.type != self.home.type or there.index not in (None, self.home.index):
                return Cause("offloaded", f"brought to {there}, and the embeddings are on {self.home}", module)
        tables = (module for module in self._embeddings() if self._waits(module.weight))
        if (table := next(tables, None)) is not None:
            return Cause("offloaded", "a table of which a step reads a few rows", self._in_whole(table))
        return None

    def reason(self) -> str | None:
        reason = self.lasting_reason() or super().reason()
        local = getattr(reason, "module", None)
        return reason if local is None else Cause(reason, reason.what, self._in_whole(local))

    def _in_whole(self, module: nn.Module) -> nn.Module:
        return self.owner(module) if any(each is module for each in self.module.modules()) else module


@dataclass(frozen=True)
class Described:
    """The family of models that an architecture describes."""

    architecture: Architecture

    @property
    def module(self) -> str:
        """Name of the transformers module that defines the architecture's classes."""
        return self.architecture.module

    def model_part(self, model: nn.Module) -> ModelPart | None:
        """Return ``model`` in its roles as it is now, or None if it is not exactly of this architecture."""
        part = model_part(self.architecture, model)
        if part is None or not any(map(compat.brought, model.modules())):
            return part
        return OffloadedPart(self.architecture, local_model(model), part.windows, model)
