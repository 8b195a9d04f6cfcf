"""The active adapters of PEFT in a model, as far as a forward depends on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .layouts import memory_of

#: what a layer keeps of an adapter that its forward does not read: they are in its matrices' sizes and its factor
_UNREAD = frozenset({"r", "lora_alpha", "use_rslora"})
#: attributes of a layer that say which adapters it has and which of them are active
_OF_ADAPTERS = frozenset({"_active_adapter", "adapter_layer_names", "other_param_names"})
#: what of a module is looked at as its tensors and modules
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_PLAIN = (type(None), bool, int, float, str)
#: attribute of a model that PEFT has put adapters into
_CONFIG = "peft_config"
#: PEFT's hook, for the length of a call, that hands a layer the adapter of each row
NAMES_OF_ROWS = "_adapter_names_pre_forward_hook"
#: the name by which a row asks for no adapter
_NO_ADAPTER = "__base__"
#: so many adapters are taken whether a call names them or not: then all such calls share steps that were recorded once
_FEW_ADAPTERS = 8
#: and so many at most
_MOST_ADAPTERS = 16
#: dicts of a module with hooks that run before its forward, and with how these want to be called
_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


@dataclass(frozen=True)
class ActiveAdapters:
    """The active adapters of one layer.

    Attributes:
        kind: equal for adapters whose forwards differ in nothing but the values of tensors and in factors.
        tensors: of all active adapters, in order.
        memories: the storage that each tensor had when it was looked at, and where it began in it.
        scales: the factor of each, or None.
        containers: names of the layer's attributes that hold something of each adapter.
    """

    kind: tuple
    tensors: tuple[torch.Tensor, ...]
    memories: tuple[tuple[int, int], ...]
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


class RowAdapters:
    """The adapters that a call of ``generate()`` names for its rows (``adapter_names=``).

    Attributes:
        names: of adapters, which the call names or may name.
        rows: of each row, the place of its adapter among the names; -1 for none.
    """

    def __init__(self, model: nn.Module, given: Sequence[str]):
        self._model = model
        self._layers = [each for each in model.modules() if hasattr(each, "adapter_layer_names")]
        asked = sorted(set(given) - {_NO_ADAPTER})
        others = {name for each in self._layers for name in _more_than_lora(each)}
        loaded = sorted({name for each in self._layers for name in getattr(each, "lora_A", ())} - others)
        self.names = loaded if len(loaded) <= _FEW_ADAPTERS and set(asked) <= set(loaded) else asked
        self._are_plain = others.isdisjoint(self.names)
        self.rows = [-1 if name == _NO_ADAPTER else self.names.index(name) for name in given]

    def may_be_in_a_step(self, model: nn.Module) -> bool:
        """Whether a step of a model may have all of the adapters."""
        return model is self._model and self._are_plain and len(self.names) <= _MOST_ADAPTERS

    @functools.cached_property
    def numbers(self) -> dict[int, int] | None:
        """Return the address of each adapter's first matrix in a layer -> the adapter's place among the names; None if
        adapters share a matrix."""
        found: dict[int, int] = {}
        for layer in self._layers:
            for name, down in getattr(layer, "lora_A", {}).items():
                if name in self.names:
                    found[down.weight.data_ptr()] = self.names.index(name)
        count = sum(name in self.names for each in self._layers for name in getattr(each, "lora_A", {}))
        return found if len(found) == count else None

    @contextmanager
    def all_active(self) -> Iterator[None]:
        """Let the model's layers have all the adapters active, and no hook that tells of rows, for the length of a
        ``with`` block. PEFT's own hooks are on the layers for all threads, too."""
        before = []
        try:
            for layer in self._layers:
                space = vars(layer)
                before.append((layer, space.get("_active_adapter"), [dict(space[each]) for each in _HOOKS]))
                for number, hook in list(layer._forward_pre_hooks.items()):
                    if _names_in_hook(hook) is not None:
                        for each in _HOOKS:
                            space[each].pop(number, None)
                space["_active_adapter"] = list(self.names)
            yield
        finally:
            for layer, active, hooks in before:
                vars(layer)["_active_adapter"] = active
                for name, held in zip(_HOOKS, hooks):
                    now = vars(layer)[name]
                    now.clear()
                    now.update(held)


def row_adapters(model: nn.Module) -> RowAdapters | None:
    """Return the adapters that a call which is under way names for its rows, or None."""
    if _CONFIG not in vars(model):
        return None
    first = next((each for each in model.modules() if hasattr(each, "adapter_layer_names")), None)
    hooks = () if first is None else first._forward_pre_hooks.values()
    given = [names for each in hooks if (names := _names_in_hook(each)) is not None]
    return RowAdapters(model, given[-1]) if given else None  # PEFT leaves those of a call that was broken off


def _names_in_hook(hook: Any) -> Sequence[str] | None:
    if not isinstance(hook, functools.partial) or getattr(hook.func, "__name__", "") != NAMES_OF_ROWS:
        return None
    names = hook.keywords.get("adapter_names")
    return names if isinstance(names, (list, tuple)) and all(type(each) is str for each in names) else None


def _more_than_lora(layer: nn.Module) -> list[str]:
    """Return the names of a layer's adapters that are more than LoRA beside a product."""
    biases = getattr(layer, "lora_bias", {})
    others = [*getattr(layer, "lora_variant", ()), *getattr(layer, "lora_embedding_A", ())]
    return [*others, *(name for name in biases if biases[name])]


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
    memories = tuple((memory_of(each), int(each.storage_offset())) for each in tensors)
    return ActiveAdapters((type(layer), kinds), tuple(tensors), memories, tuple(scales), _OF_ADAPTERS.union(held))


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
