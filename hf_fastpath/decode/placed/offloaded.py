"""Models of which accelerate keeps weights in host memory, and the family of models that an architecture describes.

accelerate's hooks leave such weights on "meta" and bring them for every call of their module. A plan reads the tensors
that the hooks copy from: on the CPU where they lie, on a GPU through :mod:`.fetch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ... import compat
from ...architecture import Architecture
from ...reasons import Cause
from ..model.modules import is_own_forward, weight_and_bias
from ..sources.described import DescribedModel, model_part
from ..sources.step_source import StepSource
from .local_models import LocalModel, copied, has_local, rebuilt

#: attributes that accelerate's hooks leave on a module
_HOOKED = ("_hf_hook", "_old_forward")


def local_model(model: nn.Module) -> nn.Module:
    """Return a model whose tensors are those that accelerate's hooks copy from, without these hooks.

    Modules without such a hook are those of ``model`` itself. Tensors on disk stay on "meta".
    """

    def local(module: nn.Module, children: dict[str, Any]) -> nn.Module:
        is_placed = compat.placement(module) is not None
        if not is_placed and not has_local(module, children):
            return module
        brought = compat.brought(module)
        forward = vars(module).get("_old_forward" if is_placed else "forward")
        if is_own_forward(module, forward):
            forward = None
        known = {name: each for name, each in brought.items() if each is not None}
        parameters, buffers = (
            {name: known.get(name, each) for name, each in own.items()} for own in (module._parameters, module._buffers)
        )
        return copied(module, children, forward, _HOOKED, _parameters=parameters, _buffers=buffers)

    return rebuilt(model, local)


class Waiting:
    """The tensors that accelerate's hooks bring to the device of a model's embeddings.

    Args:
        model: the model, with its hooks.
        home: the device of the embeddings.
    """

    def __init__(self, model: nn.Module, home: torch.device):
        self._home = home
        brought = ((module, compat.brought(module)) for module in model.modules())
        self._brought = [(module, found) for module, found in brought if found]
        waiting = (each for each in self._tensors() if self.is_elsewhere(each))
        self._waiting = {id(each): each for each in waiting}

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (each for _, found in self._brought for each in found.values() if each is not None)

    def is_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that a hook brings is not where the embeddings are."""
        return tensor.device != self._home

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._waiting

    @property
    def sources(self) -> list[tuple[int, int]]:
        """See ``StepSource.sources``."""
        found = (compat.brought(module).values() for module, _ in self._brought)
        return [(id(each), each.data_ptr()) for values in found for each in values if each is not None]

    def reason(self) -> Cause | None:
        """Return why steps cannot bring what the hooks bring, or None."""
        for module, found in self._brought:
            if None in found.values():
                return Cause("offloaded", "weights that are on disk, or that accelerate converts", module)
            there = compat.execution_device(module)
            if there is None or there.type != self._home.type or there.index not in (None, self._home.index):
                return Cause("offloaded", f"brought to {there}, and the embeddings are on {self._home}", module)
        return None

    def table_reason(self, tables: Iterable[nn.Module]) -> Cause | None:
        """Return a reason if one of ``tables`` of embeddings waits: a step would bring all of it to read a few rows."""
        table = next((module for module in tables if weight_and_bias(module)[0] in self), None)
        return None if table is None else Cause("offloaded", "a table of which a step reads a few rows", table)


@dataclass(frozen=True)
class OffloadedModel(LocalModel):
    """A model some weights of which wait in host memory or on disk."""

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Return where calls read a tensor: what waits in host memory is brought to the embeddings' device."""
        return self.home if tensor in self._waiting else tensor.device

    @property
    def home(self) -> torch.device:
        """The device of the embeddings."""
        return self.embedding.weight.device

    @cached_property
    def _waiting(self) -> Waiting:
        return Waiting(self.whole, self.home)

    @property
    def host_weights(self) -> list[list[torch.Tensor]]:
        head = [*self.final_norm.parameters(), *weight_and_bias(self.head)]
        groups = [*(layer.parameters() for layer in self.layers), head]
        return [[each for each in group if each is not None and each in self._waiting] for group in groups]

    @property
    def sources(self) -> list[tuple[int, int]]:
        return self._waiting.sources

    @cached_property
    def layer_devices(self) -> list[torch.device]:
        return [self._device_of_all(layer.parameters(), layer.device) for layer in self.layers]

    @property
    def head_device(self) -> torch.device:
        return self._device_of_all(weight_and_bias(self.head), super().head_device)

    def _device_of_all(self, tensors: Iterable[torch.Tensor | None], device: torch.device) -> torch.device:
        """Return the home if some of ``tensors`` wait in host memory, else ``device``."""
        return self.home if any(each is not None and each in self._waiting for each in tensors) else device

    def lasting_reason(self) -> str | None:
        reason = self.other_reason() or self._waiting.reason()
        return reason or in_whole(self, self._waiting.table_reason(self._embeddings()))

    def reason(self) -> str | None:
        return self.lasting_reason() or in_whole(self, super().reason())


def in_whole(part: StepSource, reason: str | None) -> str | None:
    """Return a reason with the module of the whole model in the place of one of its local model."""
    if not isinstance(reason, Cause) or reason.module is None:
        return reason
    if not any(each is reason.module for each in part.module.modules()):
        return reason
    return Cause(reason, reason.what, part.owner(reason.module))


@dataclass(frozen=True)
class Described:
    """The family of models that an architecture describes."""

    architecture: Architecture

    @property
    def module(self) -> str:
        """Name of the transformers module that defines the architecture's classes."""
        return self.architecture.module

    def model_part(self, model: nn.Module) -> DescribedModel | None:
        """Return ``model`` in its roles as it is now, or None if it is not exactly of this architecture."""
        part = model_part(self.architecture, model)
        if part is None or not any(map(compat.brought, model.modules())):
            return part
        return OffloadedModel(self.architecture, local_model(model), part.windows, model)
