"""Calls of ops with named arguments: a step is a list of such calls, and passes read and write such lists.

An op's schema is flat. In a call, ``KVCache``, :class:`Norm`, :class:`HeadNorms`, ``PackedWeight`` and ``PackedStacks``
stand for the arguments that belong together, under the names ``cache``, ``norm``, ``head_norms``, ``packed`` and
``stacks``. Binding a call to its op takes these values apart.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch

from ...choices import NormKind
from ...linears.packed_experts import PackedStacks
from ...ops.kv_cache import KVCache
from ...quantization import PackedWeight

Emit = Callable[..., Any]
_NEEDED = object()


class Register:
    """The place of a value that exists only while a program runs."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


@dataclass(frozen=True)
class Norm:
    """The norm of an op's input; None stands for no norm.

    Attributes:
        kind: RMS, RMS_OFFSET or LAYER.
        weight, bias: [features], or None if the norm has none.
        eps: added to the mean square, or to the variance.
    """

    kind: NormKind
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    @property
    def key(self) -> tuple:
        """What is equal of norms that do the same."""
        return self.kind, id(self.weight), id(self.bias), self.eps

    #: argument of an op -> attribute
    PARTS: ClassVar[dict[str, str]] = {"norm": "kind", "norm_weight": "weight", "norm_bias": "bias", "norm_eps": "eps"}


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of queries and keys between projection and rotation; None stands for no norms.

    Attributes:
        q, k: weights, of each head or of all heads at once; see ``ops.rope_append``.
        eps: added to the mean square.
        weight_offset: the factors are this + weight.
    """

    q: torch.Tensor
    k: torch.Tensor
    eps: float
    weight_offset: float = 0.0

    #: argument of an op -> attribute
    PARTS: ClassVar[dict[str, str]] = {
        "q_norm_weight": "q",
        "k_norm_weight": "k",
        "head_norm_eps": "eps",
        "head_norm_offset": "weight_offset",
    }


#: values that binding takes apart, by their name in a call
_VALUES: dict[str, Any] = {"cache": KVCache, "norm": Norm, "head_norms": HeadNorms, "packed": PackedWeight}
_VALUES["stacks"] = PackedStacks
_APART = frozenset(_VALUES.values())


@dataclass(slots=True)
class Call:
    """One call of a step.

    Attributes:
        op: an overload of an op, or a function over tensors.
        arguments: by name; registers may lie in lists and in values.
        out: holds the result once the program has run.
    """

    op: Callable[..., Any]
    arguments: dict[str, Any]
    out: Register

    @property
    def name(self) -> str:
        return getattr(self.op, "__name__", str(self.op))


#: most of what calls are given; there are thousands of calls, and passes ask again and again
_WITHOUT_REGISTERS = frozenset(
    {type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, PackedWeight}
    | {PackedStacks}
)
#: values that may hold tensors of the model
_OF_TENSORS = (Norm, HeadNorms, PackedWeight, PackedStacks)


def registers_in(value: Any) -> list[Register]:
    """Return the registers in an argument: the argument itself, those in a list, those in a value."""
    kind = type(value)
    if kind is Register:
        return [value]
    if kind in _WITHOUT_REGISTERS:
        return []
    if isinstance(value, (list, tuple)):
        inside: Iterable[Any] = value
    elif hasattr(kind, "__dataclass_fields__"):
        inside = (getattr(value, each.name) for each in fields(value))
    else:
        return []
    return [register for each in inside if type(each) not in _WITHOUT_REGISTERS for register in registers_in(each)]


def read_by(call: Call) -> list[Register]:
    """Return the registers that a call reads."""
    found: list[Register] = []
    for value in call.arguments.values():
        kind = type(value)
        if kind is Register:
            found.append(value)
        elif kind not in _WITHOUT_REGISTERS:
            found += registers_in(value)
    return found


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments: also those in lists, norms and weights."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)
    elif isinstance(value, _OF_TENSORS):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name))


def with_tensors(value: Any, here: dict[int, torch.Tensor]) -> Any:
    """Return arguments with others in the place of the tensors of these ids."""
    if isinstance(value, torch.Tensor):
        return here.get(id(value), value)
    if isinstance(value, dict):
        return {name: with_tensors(each, here) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(each, here) for each in value)
    if isinstance(value, _OF_TENSORS):
        return replace(value, **{each.name: with_tensors(getattr(value, each.name), here) for each in fields(value)})
    return value


@dataclass(frozen=True)
class Step:
    """The circumstances of a list of calls, which passes look at.

    Attributes:
        rows: tokens of all sequences.
        one_call: an op for all layers may replace the layers; caches have the model's type.
        programmatic_launch: kernels use programmatic dependent launch: they start before the kernels in front are
            complete.
    """

    rows: int
    one_call: bool = False
    programmatic_launch: bool = False


@functools.cache
def parameters(op: Callable[..., Any]) -> dict[str, Any]:
    """Return the names of an op's or a function's arguments in order, with their defaults or ``_NEEDED``."""
    if isinstance(op, torch._ops.OpOverload):
        declared = op._schema.arguments
        return {each.name: each.default_value if each.has_default_value() else _NEEDED for each in declared}
    found = inspect.signature(op).parameters.values()
    return {each.name: _NEEDED if each.default is each.empty else each.default for each in found}


def by_name(op: Callable[..., Any], positional: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    return dict(zip(parameters(op), positional), **named) if positional else named


@functools.cache
def _binder(op: Callable[..., Any], names: tuple[str, ...]) -> Callable[[dict[str, Any]], list[Any]]:
    """Make a function that puts arguments of these names into the op's order.

    Names with a star are values, which the function takes apart. The function is compiled from text because it runs at
    every call.

    Raises:
        TypeError: the op has no argument of such a name, or a needed argument is missing.
    """
    known = parameters(op)
    found = {name: f"given[{name!r}]" for name in names if not name.startswith("*")}
    lines = []
    for name in (name[1:] for name in names if name.startswith("*")):
        lines.append(f"{name} = given[{name!r}]")
        parts = _VALUES[name].PARTS
        if not parts.keys() & known.keys():
            raise TypeError(_no_such(op, name))
        found |= {part: f"{name}.{attribute}" for part, attribute in parts.items() if part in known}
        for part in parts.keys() - known.keys() - {"layer"}:  # layer is an index into the table
            lines.append(f"if {name}.{parts[part]} is not None: raise TypeError(no_such(op, {part!r}))")
    if unknown := found.keys() - known.keys():
        raise TypeError(_no_such(op, *sorted(unknown)))
    length = 1 + max((place for place, name in enumerate(known) if name in found), default=-1)
    expressions = []
    for name, default in list(known.items())[:length]:
        if name not in found and default is _NEEDED:
            raise TypeError(f"{op} is not given {name!r}")
        expressions.append(found.get(name, f"known[{name!r}]"))
    body = "".join(f"    {line}\n" for line in [*lines, f"return [{', '.join(expressions)}]"])
    scope: dict[str, Any] = {"op": op, "known": known, "no_such": _no_such}
    exec(f"def bind(given):\n{body}", scope)
    return scope["bind"]


def _no_such(op: Callable[..., Any], *names: str) -> str:
    return f"{op} is given {', '.join(names)}, expected some of {', '.join(parameters(op))}"


def in_order(op: Callable[..., Any], arguments: dict[str, Any]) -> list[Any]:
    """Return the arguments in the op's order.

    Raises:
        TypeError: the op has no argument of such a name, or a needed argument is missing.
    """
    names = tuple(
        f"*{name}" if type(value) in _APART else name
        for name, value in arguments.items()
        if value is not None or name not in _VALUES
    )
    return _binder(op, names)(arguments)


@functools.cache
def _only_by_name(op: Callable[..., Any]) -> frozenset[str]:
    """Return the names of an op's arguments that cannot be given by position."""
    if not isinstance(op, torch._ops.OpOverload):
        return frozenset()
    return frozenset(each.name for each in op._schema.arguments if each.kwarg_only)


def bound(op: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Return a function that takes a call's arguments in order, and these arguments.

    Arguments that the op takes by name only are part of the function.

    Raises:
        TypeError: the op has no argument of such a name, or a needed argument is missing.
    """
    named = _only_by_name(op) & arguments.keys()
    if not named:
        return op, in_order(op, arguments)
    constants = {name: arguments[name] for name in named}
    others = {name: value for name, value in arguments.items() if name not in named}
    return functools.partial(op, **constants), in_order(op, others)


def run(op: Callable[..., Any], /, *positional: Any, **named: Any) -> Any:
    """Call ``op`` at once."""
    return op(*in_order(op, by_name(op, positional, named)))
