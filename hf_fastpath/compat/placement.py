"""accelerate's hooks, which place modules on devices, and bring weights that wait elsewhere."""

from __future__ import annotations

import functools
import sys
from itertools import chain
from typing import Any

import torch
from torch import nn


def _hook(module: nn.Module) -> Any:
    """Return the AlignDevicesHook that stands in place of the instance's ``forward``; None if there is none."""
    contents = vars(module)
    hook, outer = contents.get("_hf_hook"), contents.get("forward")
    if (type(hook).__module__, type(hook).__qualname__) != ("accelerate.hooks", "AlignDevicesHook"):
        return None
    if not isinstance(outer, functools.partial) or outer.args != (module,):
        return None
    return None if outer.func.__module__ != "accelerate.hooks" or hook.no_grad else hook


def _brought(module: nn.Module, hook: Any) -> dict[str, torch.Tensor]:
    """Return the module's own tensors that a hook fills for every call, by name."""
    if not hook.offload or hook.execution_device is None:
        return {}
    found = dict(module._parameters)
    if hook.offload_buffers:  # the others are computed by the module, and stay on the device
        computed = module._non_persistent_buffers_set
        found |= {name: each for name, each in module._buffers.items() if name not in computed}
    return {name: each for name, each in found.items() if each is not None}


def placement(module: nn.Module) -> str | None:
    """Return what the accelerate hook in place of the instance's ``forward`` does.

    Returns:
        ``"placed"`` if it moves tensors to the module's weights, so that it does nothing if they are there already;
        ``"offloaded"`` if it brings weights for every call; None if it does anything else or there is no hook.
    """
    hook = _hook(module)
    if hook is None:
        return None
    here = next((tensor.device for tensor in chain(module.parameters(), module.buffers())), None)
    if _brought(module, hook) or (here is not None and here.type == "meta"):
        return "offloaded"
    if here is None or hook.execution_device is None:  # the device makes no difference to the values
        return "placed"
    there = torch.device(hook.execution_device)
    return "placed" if there.type == here.type and there.index in (None, here.index) else None


def brought(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return what accelerate's hook brings for every call of ``module``, by the names of parameters and buffers.

    Returns:
        The tensors in host memory that the hook copies; or, of weights that are tied to others on the device, those.
        None stands for a tensor that is read from disk or converted.
    """
    hook = _hook(module)
    return {} if hook is None else {name: _source(hook, name, own) for name, own in _brought(module, hook).items()}


def _source(hook: Any, name: str, own: torch.Tensor) -> torch.Tensor | None:
    weights = hook.weights_map
    while type(weights).__name__ == "PrefixedDataset":
        weights, name = weights.dataset, weights.prefix + name
    if type(weights).__name__ == "OffloadedWeightsLoader":
        weights = weights.state_dict  # the loader reads all others from disk
    found = weights.get(name) if isinstance(weights, dict) else None
    if not isinstance(found, torch.Tensor) or (found.dtype, found.shape) != (own.dtype, own.shape):
        return None
    tied = (hook.tied_params_map or {}).get(found.data_ptr(), {})
    return tied.get(hook.execution_device, found)


def place_like(original: nn.Module, made: nn.Module) -> None:
    """Let a layer take its inputs from other devices if accelerate lets ``original``, which it replaces."""
    if (hook := _hook(original)) is not None:
        same = dict(execution_device=hook.execution_device, io_same_device=hook.io_same_device)
        hooks = sys.modules[type(hook).__module__]
        hooks.add_hook_to_module(made, type(hook)(**same, skip_keys=hook.skip_keys))


def execution_device(module: nn.Module) -> torch.device | None:
    """Return the device to which accelerate's hook brings weights of ``module``; None if it brings none."""
    hook = _hook(module)
    return torch.device(hook.execution_device) if hook is not None and _brought(module, hook) else None


def input_device(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter, or to which accelerate brings what is on "meta"."""
    first = next(model.parameters()).device
    if first.type != "meta":
        return first
    return next((device for device in map(execution_device, model.modules()) if device is not None), first)
