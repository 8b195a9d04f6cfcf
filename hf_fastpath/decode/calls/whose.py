"""Whose code runs a call: an op of this package, a function of PyTorch's, or neither."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...registry import NAMESPACE
from .named_calls import Call


def is_ours(op: Callable[..., Any]) -> bool:
    """Whether a call is an op of this package."""
    return isinstance(op, torch._ops.OpOverload) and op.namespace == NAMESPACE


def is_view(op: Callable[..., Any]) -> bool:
    """Whether a call computes nothing: it gives a part of what it is given."""
    if not isinstance(op, torch._ops.OpOverload):
        return op is operator.getitem
    returns = op._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def is_torchs(op: Callable[..., Any]) -> bool:
    """Whether PyTorch runs a call: a function of PyTorch's, also a view, or a function of ours that is made of such."""
    return not is_ours(op) and op is not operator.getitem


def op_name(op: Callable[..., Any]) -> str:
    """Return the name of what a call runs."""
    if isinstance(op, torch._ops.OpOverload):
        if op.namespace == NAMESPACE:
            return op._schema.name.partition("::")[2]
        return str(op).removesuffix(".default")
    return getattr(op, "__name__", str(op))


def torch_calls(calls: Sequence[Call]) -> dict[str, int]:
    """Return the names of PyTorch's calls in a list, and how many there are of each."""
    return dict(Counter(op_name(call.op) for call in calls if is_torchs(call.op)))
