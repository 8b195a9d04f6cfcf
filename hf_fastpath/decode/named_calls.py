"""Calls of ops by the names of their arguments: what a step is made of, and what passes over it read and write.

An op's schema is flat. ``KVCache`` and :class:`Norm` stand in a call for the arguments that belong together, under the
names ``cache`` and ``norm``; they are taken apart where a call is bound to its op.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..choices import NormKind
from ..ops.kv_cache import KVCache

Emit = Callable[..., Any]
_NEEDED = object()


class Register:
    """Stands for a value that only exists once a program runs."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


@dataclass(frozen=True)
class Norm:
    """The norm of an op's input; no norm is None.

    Attributes:
        kind: RMS or LAYER.
        weight, bias: [features], or None where the norm has none.
        eps: added to the mean square, or to the variance.
    """

    kind: NormKind
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    def arguments(self) -> dict[str, Any]:
        """What it is as arguments of an op."""
        return {"norm": self.kind, "norm_weight": self.weight, "norm_bias": self.bias, "norm_eps": self.eps}


#: name in a call -> what stands there
_VALUES = {"cache": KVCache, "norm": Norm}


@dataclass(slots=True)
class Call:
    """One call of a step.

    Attributes:
        op: an overload of an op, or a function over tensors.
        arguments: by name; registers may lie in lists and in values.
        out: holds the result once the program ran.
    """

    op: Callable[..., Any]
    arguments: dict[str, Any]
    out: Register

    @property
    def name(self) -> str:
        return getattr(self.op, "__name__", str(self.op))


@dataclass(frozen=True)
class Step:
    """What the calls of a list are made for.

    Attributes:
        rows: tokens of all sequences.
        one_call: an op for all layers may take their place.
        many: ops for a few rows are to be replaced.
        beside: then, projections of one input may run beside each other: those behind the first, of a few rows each,
            leave most of a GPU idle.
        attention: register of the ``attend.Attention`` that takes the place of attention over a cache, or None.
        overlap: kernels start before those in front are complete.
    """

    rows: int
    one_call: bool = False
    many: bool = False
    beside: bool = False
    attention: Register | None = None
    overlap: bool = False


@functools.cache
def parameters(op: Callable[..., Any]) -> dict[str, Any]:
    """Names of an op's or a function's arguments in order, and their defaults; ``_NEEDED`` where there is none."""
    if isinstance(op, torch._ops.OpOverload):
        found = op._schema.arguments
        return {each.name: each.default_value if each.has_default_value() else _NEEDED for each in found}
    found = inspect.signature(op).parameters.values()
    return {each.name: _NEEDED if each.default is each.empty else each.default for each in found}


def by_name(op: Callable[..., Any], positional: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    return dict(zip(parameters(op), positional), **named) if positional else named


def positional(op: Callable[..., Any], arguments: dict[str, Any]) -> list[Any]:
    """The arguments in the op's order, up to the last that is not its default.

    Raises:
        TypeError: the op has no such argument, or lacks one.
    """
    known = parameters(op)
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        if type(value) is _VALUES.get(name):
            flat |= value.arguments()
        elif value is not None or name not in _VALUES:
            flat[name] = value
    if unknown := flat.keys() - known.keys():
        raise TypeError(f"{op} is given {', '.join(sorted(unknown))}, expected some of {', '.join(known)}")
    bound, length = [], 0
    for name, default in known.items():
        value = flat.get(name, default)
        if value is _NEEDED:
            raise TypeError(f"{op} is not given {name!r}")
        bound.append(value)
        if value is not default:
            length = len(bound)
    return bound[:length]


def run(op: Callable[..., Any], /, *in_order: Any, **named: Any) -> Any:
    """Call ``op`` now."""
    return op(*positional(op, by_name(op, in_order, named)))
