"""Calls as text that a person reads, and that is the same whenever the calls are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...linears.packed_experts import PackedStacks
from ...ops.kv_cache import KVCache
from ...quantization import PackedWeight
from .named_calls import Call, Norm, Register, parameters


def texts(calls: Sequence[Call]) -> list[str]:
    """Return each call with its arguments: tensors by type and shape, registers by the place of the call that gives
    them, or by ``%`` alone if they are given from outside. Arguments that have their default are left out."""
    makers = {call.out.index: place for place, call in enumerate(calls)}
    return [_text_of(call, makers) for call in calls]


def _text_of(call: Call, makers: dict[int, int]) -> str:
    """Return a call as text, its arguments in the op's order, without those that have their default."""
    known, named = parameters(call.op), dict(call.arguments)
    if isinstance(packed := named.get("packed"), PackedWeight):
        named |= dict(zip(packed.PARTS, packed.parts))
        del named["packed"]
    values = {name: named.pop(name) for name in sorted(named) if name not in known and named[name] is not None}
    given = {name: named[name] for name in known if name in named}
    arguments = {name: each for name, each in given.items() if not _is_default(each, known[name])} | values
    return f"{call.name}({', '.join(f'{name}={_text(each, makers)}' for name, each in arguments.items())})"


def _is_default(value: Any, default: Any) -> bool:
    return isinstance(value, (type(None), int, float, str)) and value == default  # numbers stand for choices


def _text(value: Any, makers: dict[int, int]) -> str:
    if isinstance(value, Register):
        return f"%{makers.get(value.index, '')}"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, PackedWeight):
        inside = (f"{name}={_text(each, makers)}" for name, each in zip(value.PARTS, value.parts))
        return f"PackedWeight({', '.join(inside)})"
    if isinstance(value, (Norm, KVCache, PackedStacks)):
        inside = (f"{name}={_text(each, makers)}" for name, each in vars(value).items())
        return f"{type(value).__name__}({', '.join(inside)})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(each, makers) for each in value)}]"
    return "function" if callable(value) else str(value)
