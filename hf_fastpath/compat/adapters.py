"""The active adapters of PEFT in a model, as far as a forward depends on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

#: what a layer keeps of an adapter that its forward does not read: they are in its matrices' sizes and its factor
_UNREAD = frozenset({"r", "lora_alpha", "use_rslora"})
#: attributes of a layer that say which adapters it has and which of them are active
_OF_ADAPTERS = frozenset({"_active_adapter", "adapter_layer_names", "other_param_names"})
#: what of a module is looked at as its tensors and modules
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class ActiveAdapters:
    """The active adapters of one layer.

    Attributes:
        kind: equal for adapters whose forwards differ in nothing but the values of tensors and in factors.
        tensors: of all active adapters, in order.
        scales: the factor of each, or None.
        containers: names of the layer's attributes that hold something of each adapter.
    """

    kind: tuple
    tensors: tuple[torch.Tensor, ...]
    scales: tuple[float | None, ...]
    containers: frozenset[str]


def active_adapters(model: nn.Module) -> dict[str, ActiveAdapters]:
    """Return the active adapters of each layer that has adapters, by the layer's name."""
    return {
        path: _of_layer(module)
        for path, module in model.named_modules()
        if hasattr(module, "other_param_names") and "base_layer" in module._modules
    }


def adapter_names(model: nn.Module) -> list[str]:
    """Return the names of the adapters that layers of a model have, in the order in which they are found."""
    found: dict[str, None] = {}
    for module in _with_adapters(model):
        for each in getattr(module, "adapter_layer_names", ("modules_to_save",)):
            found |= dict.fromkeys(sorted(_names_in(getattr(module, each, None))))
    return list(found)


def use_adapter(model: nn.Module, name: str) -> Callable[[], None]:
    """Make an adapter the only active one of all layers that have adapters.

    Remove when: PEFT gives back what was active, and which parameters wanted gradients.

    Returns:
        Makes those active that were so before.
    """
    modules = _with_adapters(model)
    wanted = [(each, each.requires_grad) for module in modules for each in module.parameters()]
    active = [(module, module.active_adapter) for module in modules]

    def give_back() -> None:
        for module, names in active:
            module.set_adapter(names)
        for each, wants_gradient in wanted:
            each.requires_grad_(wants_gradient)

    for module in modules:
        module.set_adapter(name)
    for each, wants_gradient in wanted:
        each.requires_grad_(wants_gradient)
    return give_back


def _with_adapters(model: nn.Module) -> list[Any]:
    has_adapters = lambda module: hasattr(module, "set_adapter") and hasattr(module, "active_adapter")  # noqa: E731
    of_layers = (
        each for each in model.modules() if hasattr(each, "other_param_names") or hasattr(each, "modules_to_save")
    )
    return [each for each in of_layers if has_adapters(each)]


def is_of_adapters(place: str, layers: Mapping[str, ActiveAdapters]) -> bool:
    """Whether a value is one that only adapters hold, or that says which of them are active.

    Args:
        place: its name, that of a module with an attribute behind it, and perhaps more.
        layers: of :func:`active_adapters`.
    """
    if place.rpartition(".")[2] == "peft_config":
        return True
    parts = place.removesuffix(" itself").split(".")
    for count in range(len(parts) - 1, 0, -1):
        found = layers.get(".".join(parts[:count]))
        if found is not None:
            return parts[count] in found.containers
    return False


def _of_layer(layer: nn.Module) -> ActiveAdapters:
    kept = {each: getattr(layer, each, None) for each in layer.adapter_layer_names}
    names = {name for each in kept.values() for name in _names_in(each)}
    held = {
        name: value
        for name, value in {**vars(layer), **layer._modules}.items()
        if (found := _names_in(value)) and found <= names and name not in ("_modules", "_parameters", "_buffers")
    }
    # What holds something of adapters, but nobody knows how, is equal to nothing.
    kinds: list[Any] = [object() for each in kept.values() if each is not None and not hasattr(each, "keys")]
    scales, tensors = [], []
    for active in layer.active_adapters:
        of_one = {name: value[active] for name, value in held.items() if active in value}
        scale = of_one.get("scaling")
        scales.append(float(scale) if type(scale) in (int, float) else None)
        if scales[-1] is not None:
            del of_one["scaling"]
        kinds.append([(name, _kind(value, tensors)) for name, value in of_one.items() if name not in _UNREAD])
    return ActiveAdapters((type(layer), kinds), tuple(tensors), tuple(scales), _OF_ADAPTERS.union(held))


def _is_empty(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple, set)) and not value


def _names_in(value: Any) -> set[str]:
    """Return the names that a dict holds something for, of whichever class it is; nothing of any other value."""
    if not isinstance(value, (dict, nn.Module)) or not hasattr(value, "keys"):
        return set()
    found = set(value.keys())
    return found if all(isinstance(each, str) for each in found) else set()


def _kind(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return what has to be equal in an adapter's value and in that of another one; its tensors are collected."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return type(value), value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, nn.Module):
        inside = {**value._parameters, **value._buffers, **value._modules}
        space = {name: each for name, each in vars(value).items() if name not in _OF_MODULES}
        plain = {name: each for name, each in space.items() if isinstance(each, _PLAIN)}
        others = [id(each) for name, each in space.items() if name not in plain and not _is_empty(each)]
        return type(value), [(name, _kind(each, tensors)) for name, each in (inside | plain).items()], others
    return type(value), id(value) if getattr(value, "__dict__", None) else None  # an object with values of its own
