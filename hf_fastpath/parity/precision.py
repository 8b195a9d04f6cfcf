"""The reference of ``verify()``: a model's own code in a wider type than its weights have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..compat import eager_experts, foreign_code, function_code
from ..registry import FLOAT_DTYPES, PLAIN_TENSORS


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the type that a reference for ``dtype`` is computed in."""
    return torch.float64 if dtype == torch.float32 else torch.float32


@contextmanager
def in_higher_precision(model: nn.Module) -> Iterator[None]:
    """Let modules compute in float32, or in float64 if parameters are float32. Parameters are copied for each call, so
    that only one module's copies take memory at a time.

    Layers that other packages have quantized compute as they always do, in the model's type: their weights are no
    numbers that could be converted.
    """
    dtype: torch.dtype = model.dtype
    wide = wider(dtype)
    kept: dict[int, list[tuple[nn.Module, dict[str, nn.Parameter | None]]]] = {}

    def widen(module: nn.Module, arguments: tuple) -> tuple | None:
        # layers of adapters read weights of the layers inside them without a call
        inside = list(module.modules()) if foreign_code(module) == "adapter" else [module]
        kept[id(module)] = [(each, dict(each._parameters)) for each in inside]
        for each in inside:
            for name, parameter in each._parameters.items():
                if parameter is not None:
                    each._parameters[name] = nn.Parameter(parameter.detach().to(wide), requires_grad=False)
        # T5 brings what it gives to a projection to the dtype of the weight that waits there
        return tuple(each.to(wide) for each in arguments) if isinstance(module, nn.Linear) else None

    def narrow(module: nn.Module, *arguments: Any) -> None:
        for each, parameters in kept.pop(id(module), []):
            each._parameters.update(parameters)

    def given(module: nn.Module, arguments: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return _cast(arguments, dtype), _cast(named, dtype)

    def made(module: nn.Module, arguments: tuple, out: Any) -> Any:
        return _cast(out, wide)

    owners, foreign = _owners(model)
    handles = [owner.register_forward_pre_hook(widen) for owner in owners]
    handles += [owner.register_forward_hook(narrow, always_call=True) for owner in owners]
    handles += [each.register_forward_pre_hook(given, with_kwargs=True) for each in foreign]
    handles += [each.register_forward_hook(made) for each in foreign]
    try:
        with eager_experts(model):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for owner in owners:
            narrow(owner)


def _owners(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules whose parameters can be converted, and those that compute as they are: the outermost ones that
    other packages have quantized or given a forward."""
    owners: list[nn.Module] = []
    foreign: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        parameters = [each for each in module._parameters.values() if each is not None]
        is_plain = all(type(each) in PLAIN_TENSORS and each.dtype in FLOAT_DTYPES for each in parameters)
        has_tensors = bool(parameters) or any(each is not None for each in module._buffers.values())
        is_wrapped = has_tensors and function_code(vars(module).get("forward")) == "compressed_tensors"
        code = foreign_code(module)
        if not is_plain or is_wrapped or code not in (None, "adapter"):
            foreign.append(module)
            return
        if parameters or code == "adapter":
            owners.append(module)
        for child in module.children():
            visit(child)

    visit(model)
    return owners, foreign


def _cast(thing: Any, dtype: torch.dtype) -> Any:
    """Return ``thing`` with all tensors of floats in it, in containers of any kind, in a type."""
    if isinstance(thing, torch.Tensor):
        return thing.to(dtype) if thing.is_floating_point() else thing
    if isinstance(thing, dict):
        return {name: _cast(each, dtype) for name, each in thing.items()}
    if type(thing) in (list, tuple):
        return type(thing)(_cast(each, dtype) for each in thing)
    return thing
