"""What recorded steps ask of a model's modules, tensors and sizes of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .. import compat
from ..decode.model.modules import odd_module, own_code_reason
from ..native import loader
from ..ops.queries import takes_head_dim
from ..reasons import Cause, class_name
from ..registry import PLAIN_TENSORS


def tensors_reason(
    model: nn.Module, device_of: Callable[[torch.Tensor], torch.device], is_placed: bool
) -> Cause | None:
    """Return why kernels cannot read a model's weights where they are, or None.

    Args:
        device_of: gives where calls read a weight.
        is_placed: whether calls may run on several devices.
    """
    parameters = list(model.parameters())
    if any(map(compat.is_sharded, parameters)):
        return Cause("sharded", module=model)
    owned = ((module, each) for module in model.modules() for each in module._parameters.values() if each is not None)
    odd = next(((module, each) for module, each in owned if type(each) not in PLAIN_TENSORS), None)
    if odd is not None:
        module, weight = odd
        return odd_module(module, f"weight is {class_name(weight)}")
    devices = set(map(device_of, parameters))
    if len({each.type for each in devices} if is_placed else devices) > 1:
        return Cause("device", f"weights on {', '.join(sorted(map(str, devices)))}", model)
    # a model on the meta device is only asked about, and never runs
    types = [each.type for each in devices if each.type != "meta"]
    code = next((code for each in types if (code := loader.why_not_native(each)) is not None), None)
    return None if code is None else Cause(code, f"device {next(iter(devices))}")


def modules_reason(model: nn.Module) -> str | None:
    """Return why calling some module inside of a model is more than its class's forward, or None."""
    inner = (module for module in model.modules() if module is not model)
    found = (own_code_reason(module, type(module).__module__) for module in inner)
    return next((reason for reason in found if reason is not None), None)


def sizes_reason(
    model: nn.Module, attentions: Iterable[Any], encoded: set[int], windows: Iterable[int | None]
) -> Cause | None:
    """Return why kernels have no attention of a model's sizes, or None.

    Args:
        encoded: elements of a head in attention to what an encoder has read.
    """
    sizes = encoded | {each.head_dim for each in attentions if each.value_dim is None}
    odd = next((size for size in sizes if not takes_head_dim(size)), None)
    if odd is not None:
        return Cause("unsupported_head_dim", f"head_dim={odd}", model)
    narrow = next((w for w in windows if w is not None and w < compat.MIN_WINDOW), None)
    return None if narrow is None else Cause("unsupported_config", f"sliding_window={narrow}", model)
