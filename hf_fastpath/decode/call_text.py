"""Calls as text that a person reads, and that is the same whenever the calls are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ops.kv_cache import KVCache
from .named_calls import Call, Norm, Register


def texts(calls: Sequence[Call]) -> list[str]:
    """Return each call with its arguments: tensors by type and shape, registers by the place of the call that gives
    them, or by ``%`` alone if they are given from outside."""
    makers = {call.out.index: place for place, call in enumerate(calls)}
    found = []
    for call in calls:
        given = (f"{name}={_text(each, makers)}" for name, each in call.arguments.items())
        found.append(f"{call.name}({', '.join(given)})")
    return found


def _text(value: Any, makers: dict[int, int]) -> str:
    if isinstance(value, Register):
        return f"%{makers.get(value.index, '')}"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (Norm, KVCache)):
        inside = (f"{name}={_text(each, makers)}" for name, each in vars(value).items())
        return f"{type(value).__name__}({', '.join(inside)})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(each, makers) for each in value)}]"
    return "function" if callable(value) else str(value)
