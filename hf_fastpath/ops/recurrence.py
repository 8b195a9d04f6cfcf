"""What the ops of recurrent steps have in common: states that are updated in place, parameters of their own dtype, and
sequences of several tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..registry import shape_reason


def in_turn(step: Callable[..., torch.Tensor], tokens: int, rows: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Run the step of one token of each sequence for ``tokens`` tokens, one after the other.

    Args:
        step: takes one row of each sequence of every tensor.
        rows: [batch * tokens, ...], the rows of a sequence in a row.

    Returns:
        [batch * tokens, ...].
    """
    parts = [None if each is None else each.unflatten(0, (-1, tokens)).unbind(1) for each in rows]
    made = [step(*(None if each is None else each[token] for each in parts)) for token in range(tokens)]
    return torch.stack(made, dim=1).flatten(0, 1)


def tokens_reason(x: torch.Tensor, tokens: int) -> list[str]:
    """Return a reason if the rows of ``x`` are not those of sequences of so many tokens."""
    if tokens >= 1 and len(x) % tokens == 0:
        return []
    return [f"got {len(x)} rows and tokens={tokens}, expected a multiple of tokens, which is at least 1"]


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
