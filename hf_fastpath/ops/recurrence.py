"""What the ops of recurrent steps check alike: states that are updated in place, and parameters of their own dtype."""

from __future__ import annotations

import torch

from ..registry import shape_reason


def written_reason(name: str, state: torch.Tensor) -> list[str]:
    """Return a reason if ``state``, which an op updates in place, is not contiguous."""
    if state.is_contiguous():
        return []
    return [f"{name} has strides {state.stride()}: it is written, make it contiguous"]


def state_reasons(x: torch.Tensor, state: torch.Tensor, shape: tuple[int, ...]) -> list[str]:
    """Return reasons why a recurrent state is not one for ``x``: float32, contiguous, of this shape."""
    reasons = shape_reason("state", state, shape)
    if state.dtype != torch.float32:
        reasons.append(f"state has dtype {state.dtype}, expected torch.float32")
    if state.device != x.device:
        reasons.append(f"state is on {state.device}, expected {x.device}: move it")
    return reasons + written_reason("state", state)


def parameter_reasons(x: torch.Tensor, **parameters: torch.Tensor | None) -> list[str]:
    """Return reasons why parameters are not on x's device, in float32 or x's dtype."""
    reasons = []
    for name, tensor in parameters.items():
        if tensor is None:
            continue
        if tensor.dtype not in (torch.float32, x.dtype):
            reasons.append(f"{name} has dtype {tensor.dtype}, expected torch.float32 or {x.dtype}: cast it")
        if tensor.device != x.device:
            reasons.append(f"{name} is on {tensor.device}, expected {x.device}: move it")
    return reasons
