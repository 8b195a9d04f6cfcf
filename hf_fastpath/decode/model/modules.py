"""What a module or something inside it is, and whether kernels can stand in for it."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from torch import nn

from ...architecture import Architecture
from ...compat import (
    Conv1D,
    ShardStyle,
    foreign_code,
    function_code,
    hook_of,
    is_known_code,
    is_ours,
    is_sharded,
    is_wrapped_by,
    name_of,
    placement,
)
from ...linears.checkpoints import noted
from ...linears.packed_linear import PackedLinear
from ...native import loader
from ...ops import packed_gemv
from ...reasons import Cause, class_name
from ...registry import FLOAT_DTYPES, PLAIN_TENSORS
from ..ranks.rank_calls import shard_of
from . import pass_through


def child(module: nn.Module, name: str) -> Any:
    """Return ``getattr(module, name)``, without the detour through ``nn.Module.__getattr__`` if that is possible.

    Every generate() looks at every module of the model, so the detour's time matters.
    """
    found = module.__dict__["_modules"].get(name)
    return getattr(module, name) if found is None else found


def weight_and_bias(module: nn.Module) -> tuple[Any, Any]:
    """Return ``module.weight`` and ``module.bias``, None if absent, as :func:`child` does.

    The weight of a :class:`PackedLinear` counts as absent. Classes of other packages may have a method or anything else
    in the place of a tensor, so callers ask.
    """
    parameters = module.__dict__["_parameters"]
    if "weight" in parameters:
        weight = parameters["weight"]
    else:
        weight = None if is_packed(module) else getattr(module, "weight", None)
    return weight, parameters["bias"] if "bias" in parameters else getattr(module, "bias", None)


def odd_tensor(tensors: Iterable[Any]) -> str | None:
    """Return what one of ``tensors`` is if it is neither a tensor nor None, or None."""
    odd = next((each for each in tensors if each is not None and not isinstance(each, torch.Tensor)), None)
    return None if odd is None else f"a weight or bias is no tensor, it is a {class_name(odd)}"


def odd_module(module: nn.Module, what: str = "") -> Cause:
    """Return the reason for a module that is not of the class, or whose weight not of the type, that kernels read."""
    code = foreign_code(module)
    # of quantized layers, patch() may have noted more; of compressed-tensors' layers, one thing helps whatever it noted
    return Cause(
        code if code == "compressed_tensors" else noted(module) or code or "unsupported_projection", what, module
    )


def own_code_reason(module: nn.Module, home: str = "") -> Cause | None:
    """Return why calling ``module`` does more than its class's forward, or None. ``home``: see ``is_known_code``."""
    if (hook := hook_of(module)) is not None:
        return Cause(function_code(hook) or "hooks", f"hook {name_of(hook)}", module)
    forward = type(module).forward
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    is_inherited = home == type(module).__module__ and is_known_code(forward, owner.__module__)
    if not is_inherited and not is_known_code(forward, home):
        return Cause("class_forward", f"forward is {name_of(type(module).forward)}", module)
    override = module.__dict__.get("forward")
    if override is None:
        return None
    if (placed := placement(module)) == "placed":  # such a hook runs the forward that was there before
        override = module.__dict__["_old_forward"]
    if is_own_forward(module, override):
        return None
    if placed == "offloaded":
        return Cause("offloaded", module=module)
    code = function_code(override)
    code = code if code == "compressed_tensors" else "instance_forward"
    return Cause(code, f"forward is {name_of(override)}", module)


def is_own_forward(module: nn.Module, forward: Any) -> bool:
    """Whether a forward of an instance is our own, or does what the class's forward does.

    An unpickled module carries the class's own forward, and accelerate leaves it there without its decorators.
    """
    function = getattr(forward, "__func__", None)
    is_known = is_ours(function) or is_wrapped_by(function, type(module).forward)
    return is_known and forward.__self__ is module


def model_code_reason(model: nn.Module, home: str = "") -> str | None:
    """Do as :func:`own_code_reason` for a causal LM as ``generate()`` calls it.

    A forward on the instance is no reason if what it adds to the class's forward happens only in training.
    """
    reason = own_code_reason(model, home)
    if reason is None or reason != "instance_forward":
        return reason
    override = model.__dict__["_old_forward" if placement(model) == "placed" else "forward"]
    found = pass_through.reason_of(override, model)
    return None if found is None else Cause(found, reason.what, model)


def projection_reason(module: nn.Module, architecture: Architecture) -> str | None:
    """Return why the kernels cannot stand in for this projection, or None.

    Only the exact classes count: the ``weight`` of a LoRA layer is only its base weight, and a quantized weight is not
    a plain tensor.
    """
    cls = type(module)
    if type(module) is PackedLinear:
        where = module.quants.device.type
        if where not in packed_gemv.native and not module.is_described:
            return Cause(loader.why_not_native(where) or "no_native_library", f"quantized weights on {where}", module)
        return own_code_reason(module, cls.__module__)
    if cls not in (nn.Linear, Conv1D) and (cls.__module__, cls.__name__) != (architecture.module, architecture.linear):
        return odd_module(module)
    weight = module.__dict__["_parameters"].get("weight")
    _, bias = weight_and_bias(module)
    if is_sharded(weight):
        return Cause("sharded", f"weight is {class_name(weight)}", module)
    if type(weight) not in PLAIN_TENSORS or (bias is not None and type(bias) not in PLAIN_TENSORS):
        own = own_code_reason(
            module, architecture.module
        )  # what has put the weight away says more than that it is away
        name, odd = ("weight", weight) if type(weight) not in PLAIN_TENSORS else ("bias", bias)
        return own or odd_module(module, f"{name} is {'no parameter' if odd is None else class_name(odd)}")
    if weight.dim() != 2 or weight.stride(-1) != 1:
        return odd_module(module, f"weight is of shape {tuple(weight.shape)} and strides {weight.stride()}")
    if weight.dtype not in FLOAT_DTYPES or (bias is not None and bias.dtype != weight.dtype):
        return Cause("dtype", f"weight is {weight.dtype}, bias {getattr(bias, 'dtype', None)}", module)
    return own_code_reason(module, architecture.module)


def is_packed(module: nn.Module) -> TypeGuard[PackedLinear]:
    """Whether a projection's weight is quantized by ``patch()``."""
    return type(module) is PackedLinear


def device_of(module: Any) -> torch.device:
    """Return the device of a projection's weight."""
    return module.quants.device if is_packed(module) else module.weight.device


def is_transposed(module: nn.Module) -> bool:
    """Whether a projection's weight is [in_features, out_features]."""
    return type(module) is Conv1D


def in_features(module: Any) -> int:
    """Return the number of a projection's input features; those of all ranks if each rank picks its own of them."""
    shard = shard_of(module)
    if shard is not None and shard.style is ShardStyle.SPLIT_ROWS:
        return shard.total
    return module.in_features if is_packed(module) else module.weight.shape[0 if is_transposed(module) else 1]


def out_features(module: Any) -> int:
    """Return the number of a projection's output features; those of all ranks if they are gathered."""
    shard = shard_of(module)
    if shard is not None and shard.style is ShardStyle.GATHERED:
        return shard.total
    return module.out_features if is_packed(module) else module.weight.shape[1 if is_transposed(module) else 0]


def found_at(module: Any, path: str) -> Any:
    """Return what ``path`` leads to inside ``module``, or None if it leads nowhere."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def number(module: nn.Module | None, path: str | None, default: float = 1.0) -> float:
    """Return the number at ``path`` inside ``module``; ``default`` without a path or if None is there."""
    found = None if path is None else attrgetter(path)(module)
    return default if found is None else float(found)


def is_on(module: nn.Module, path: str | None, default: bool = False) -> bool:
    """Return the switch at ``path`` inside ``module``; ``default`` without a path."""
    return default if path is None else bool(attrgetter(path)(module))


def dropout_reason(module: nn.Module, name: str | None) -> str | None:
    """Return why a fused span cannot skip the dropout ``name`` of ``module``: a probability or an ``nn.Dropout``."""
    dropout = None if name is None else getattr(module, name)
    if not isinstance(dropout, nn.Module):
        return Cause("dropout", f"{name}={dropout}", module) if dropout and module.training else None
    if type(dropout) not in (nn.Dropout, nn.Identity):
        return Cause("class_not_supported", module=dropout)
    active = type(dropout) is nn.Dropout and dropout.training and dropout.p > 0
    return Cause("dropout", f"p={dropout.p}", dropout) if active else own_code_reason(dropout)


def apply_dropout(module: nn.Module, name: str | None, x: torch.Tensor) -> torch.Tensor:
    """Apply the dropout ``name`` of ``module``, if there is one, as stock code does."""
    dropout = None if name is None else getattr(module, name)
    if isinstance(dropout, nn.Module):
        return dropout(x)
    return nn.functional.dropout(x, dropout, module.training) if dropout else x
