"""Local models: copies of a model's modules that hold other tensors, for plans; the model itself stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..sources.described import DescribedModel


def rebuilt(model: nn.Module, local_of: Callable[[nn.Module, dict[str, Any]], nn.Module]) -> nn.Module:
    """Return what stands for ``model``.

    Args:
        local_of: gives what stands for a module, given the module and what stands for its children; it is asked once
            for each module, from the innermost on.
    """
    made: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> nn.Module:
        if id(module) not in made:
            children = {name: None if each is None else visit(each) for name, each in module._modules.items()}
            made[id(module)] = local_of(module, children)
        return made[id(module)]

    return visit(model)


def has_local(module: nn.Module, children: dict[str, Any]) -> bool:
    """Whether a copy stands for one of the module's children."""
    return any(children[name] is not each for name, each in module._modules.items())


def copied(
    module: nn.Module, children: dict[str, Any], forward: Any, leave_out: tuple[str, ...] = (), **contents: Any
) -> nn.Module:
    """Return a copy of a module: its attributes are the module's own, except for ``children`` and ``contents``.

    Args:
        forward: the instance's forward in the copy, or None for that of the class.
        leave_out: attributes that the copy does not get.
    """
    made = object.__new__(type(module))
    kept = {name: value for name, value in vars(module).items() if name not in ("forward", *leave_out)}
    vars(made).update(kept, _modules=children, **contents)
    if forward is not None:
        vars(made)["forward"] = forward
    return made


def owner_of(whole: nn.Module, local: nn.Module, module: nn.Module) -> nn.Module:
    """Return the module of ``whole`` for which a module of its local model stands."""
    return whole.get_submodule(next(name for name, each in local.named_modules() if each is module))


@dataclass(frozen=True)
class LocalModel(DescribedModel):
    """A local model in its roles.

    Attributes:
        whole: the model for which ``module`` stands.
    """

    whole: nn.Module

    @property
    def source(self) -> nn.Module:
        return self.whole

    def owner(self, module: nn.Module) -> nn.Module:
        return owner_of(self.whole, self.module, module)
