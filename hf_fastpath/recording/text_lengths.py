"""Lengths of a text, and of what an encoder has read, while a step is recorded: numbers that note what is done with
them.

The forward is given ``torch.SymInt`` for its lengths. What it asks of them (is it above 4,096? a multiple of 64?)
bounds the lengths that the recording serves; what it makes of them stays a formula.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import TensorReferenceAnalysis

from ..ops.decode_attention import MAX_QUERY_LEN
from .errors import LengthTaken

_aten = torch.ops.aten

#: lengths that are looked at, at once
_AT_ONCE = 1 << 13
#: lengths for which PyTorch's own questions are looked at
_MANY = 1 << 16
#: numbers of symbols
_NUMBERS = itertools.count()
#: functions of ``math`` that would look at the number behind a length
_FUNCTIONS = ("sqrt", "log2", "log10", "log")


class IntOfLength(int):
    """A number that a step makes of its text's length, as the number was when the step was recorded.

    Attributes:
        formula: of sympy.
    """

    formula: Any = None


class FloatOfLength(float):
    """Do as :class:`IntOfLength` for a number in floating point."""

    formula: Any = None


class _OverTensors(TensorReferenceAnalysis):
    """Computes formulas over tensors of lengths, which are positive."""

    device = torch.device("cpu")

    @classmethod
    def constant(cls, c, dtype):
        number = {torch.int64: int, torch.float64: float, torch.bool: bool}[dtype](c)
        return _aten.full.default([], number, dtype=dtype, device=cls.device)

    @staticmethod
    def int_truediv(a, b):
        return _aten.div.Tensor(*(_aten._to_copy.default(each, dtype=torch.float64) for each in (a, b)))

    truediv = int_truediv

    @staticmethod
    def round_to_int(a, dtype):
        return _aten._to_copy.default(_aten.round.default(a), dtype=dtype)

    @staticmethod
    def mod(a, b):
        return _aten.remainder.Tensor(a, b)

    c_mod = python_mod = mod


def new_env() -> ShapeEnv:
    """Return what keeps the symbols of lengths, for a mode that makes tensors without data."""
    return ShapeEnv(
        duck_shape=False,
        specialize_zero_one=False,
        allow_scalar_outputs=False,
        allow_dynamic_output_shape_ops=False,
    )


def computed(formula: Any, values: dict[Any, torch.Tensor]) -> torch.Tensor:
    """Return what a formula gives for tensors of its symbols, int64 on one device."""
    where = {"device": next(iter(values.values())).device}
    return sympy_interp(type("_OverTensors", (_OverTensors,), where), values, formula)


@dataclass(frozen=True)
class Served:
    """The lengths for which a recorded step is the model's.

    Attributes:
        past: symbol of the number of tokens that the cache holds before the step.
        encoded: symbol of the places that an encoder has read.
        conditions: formulas that have to hold, each with the line that asked, or "".
    """

    past: Any
    encoded: Any
    conditions: tuple[tuple[Any, str], ...] = ()

    @property
    def is_all(self) -> bool:
        """Whether there is no bound."""
        return not self.conditions

    def up_to(self, longest: int, of_encoded: bool = False) -> Served:
        """Return the same of a step of which nobody has looked at what it does of longer texts."""
        formula = sympy.Le(self.encoded if of_encoded else self.past, longest)
        return replace(self, conditions=(*self.conditions, (formula, "")))

    def among(self, first: int, end: int, encoded: int | None = None) -> torch.Tensor:
        """Return bool [end - first]: whether steps of ``first``, ``first + 1``, ... tokens in the cache are served."""
        past = torch.arange(first, end, device="cpu")
        found = torch.ones(end - first, dtype=torch.bool, device="cpu")
        values = {self.past: past}
        if encoded is not None:
            values[self.encoded] = torch.full_like(past, encoded)
        for formula, _ in self.conditions:
            if encoded is not None or self.encoded not in formula.free_symbols:
                found &= computed(formula, values)
        return found

    def serves(self, past: int, encoded: int | None = None) -> bool:
        """Whether the step of ``past`` tokens in the cache is served."""
        return self.is_all or bool(_blocks(self, past // _AT_ONCE, encoded)[past % _AT_ONCE])

    def bounds(self, end: int) -> list[int]:
        """Return the numbers of tokens in a cache, below ``end``, from which on some condition holds or does not."""
        found: set[int] = set()
        for each in self.conditions:
            holds = replace(self, conditions=(each,)).among(0, end)
            found.update((1 + (holds[1:] != holds[:-1]).nonzero().flatten()).tolist())
        return sorted(found)

    @property
    def lines(self) -> str:
        """Where the model asks for the length."""
        found = dict.fromkeys(line for _, line in self.conditions if line)
        return "; ".join(found) if found else "the model's code"


@functools.lru_cache(maxsize=64)
def _blocks(served: Served, number: int, encoded: int | None) -> torch.Tensor:
    return served.among(number * _AT_ONCE, (number + 1) * _AT_ONCE, encoded)


class Lengths:
    """The lengths of one recording.

    Args:
        env: of the mode that makes tensors without data.
        past: tokens that the cache is said to hold.
        encoded: places that an encoder is said to have read.
        line_of: returns which line of the model a frame is, or "".
        is_plain: the model's code gets plain numbers.

    Attributes:
        past, encoded: the lengths as the model's code gets them.
    """

    def __init__(self, env: ShapeEnv, past: int, encoded: int, line_of: Callable[[Any], str], is_plain: bool = False):
        self._env, self._line_of, self._first = env, line_of, len(env.guards)
        symbols = self._new("past", past), self._new("encoded", encoded)
        self._symbols = tuple(each.node.expr for each in symbols)
        self._is_plain = is_plain
        self.past, self.encoded = (past, encoded) if is_plain else symbols

    def _new(self, name: str, hint: int) -> torch.SymInt:
        source = ConstantSource(f"{name}_{next(_NUMBERS)}")
        symbol = self._env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        return self._env.create_symintnode(symbol, hint=hint, source=source)

    def served(self) -> Served:
        """Return the lengths of which the model's code would have asked for the same calls."""
        found = {}
        for guard in self._env.guards[self._first :]:
            line = self._line_of(guard.sloc.framework_loc)
            if guard.expr.free_symbols & set(self._symbols) and (line or not self._is_of_sizes(guard.expr)):
                found.setdefault(guard.expr, line)
        return Served(*self._symbols, tuple(found.items()))

    def _is_of_sizes(self, formula: Any) -> bool:
        """Whether PyTorch asks whether a size is 1, whose result is the same in any case: a formula holds for all
        others."""
        every = torch.arange(2, _MANY, device="cpu")
        return bool(computed(formula, dict.fromkeys(self._symbols, every)).all())

    def values(self, past: torch.Tensor) -> dict[Any, torch.Tensor]:
        """Return the symbol of the text's length with a tensor that holds the length."""
        return {self._symbols[0]: past}

    def is_made_of(self, value: Any) -> bool:
        """Whether a number is made of the text's length alone."""
        formula = getattr(value, "formula", None)
        return formula is not None and formula.free_symbols == {self._symbols[0]}

    def counts_tokens(self, value: Any) -> bool:
        """Whether a number is the text's length with or without new tokens, for which passes look."""
        return self.is_made_of(value) and bool((value.formula - self._symbols[0]).is_number)

    def check(self) -> None:
        """Refuse a step of which somebody has looked at the number behind a length, so that it serves no other.

        Raises:
            LengthTaken: there is such a number.
        """
        for guard in self._env.guards[self._first :]:
            if isinstance(guard.expr, sympy.Eq) and guard.expr.free_symbols & set(self._symbols):
                frame = guard.sloc.framework_loc
                line = self._line_of(frame)
                error = LengthTaken(f"a number that is made of a length{', at ' * bool(line)}{line}")
                error.is_known = "/transformers/models/" in getattr(frame, "filename", "")
                raise error

    def noted(self, value: Any) -> Any:
        """Return an argument as calls hold it, see :func:`known`. Of plain lengths, numbers that are the same are taken
        for them."""
        if not self._is_plain:
            return known(value)
        if isinstance(value, (list, tuple)) and any(type(each) is int for each in value):
            return [self.noted(each) for each in value]
        if type(value) is not int or not 0 <= value - self.past <= MAX_QUERY_LEN:
            return value
        made = IntOfLength(value)
        made.formula = self._symbols[0] + (value - self.past)
        return made


def follows_length(value: Any) -> bool:
    """Whether an argument is made of a length, or holds a number that is."""
    return isinstance(value, (IntOfLength, FloatOfLength)) or (
        isinstance(value, (list, tuple)) and any(map(follows_length, value))
    )


def known(value: Any) -> Any:
    """Return an argument with plain numbers in the place of those that stand for lengths, which remember how they were
    made."""
    if isinstance(value, torch.SymInt):
        return _remembering(IntOfLength, value)
    if isinstance(value, torch.SymFloat):
        return _remembering(FloatOfLength, value)
    if isinstance(value, torch.SymBool):
        return bool(value)
    if isinstance(value, (list, tuple)) and any(isinstance(each, torch.SymInt) for each in value):
        return [known(each) for each in value]
    return value


def _remembering(kind: type, value: Any) -> Any:
    node = value.node
    fixed = node.maybe_as_int() if kind is IntOfLength else node.maybe_as_float()
    if fixed is not None:
        return fixed
    made = kind(node.hint)
    made.formula = node.expr
    return made


def of_known_size(tensor: Any) -> Any:
    """Return a tensor without data whose sizes are plain numbers, in the place of one whose sizes stand for lengths."""
    if not isinstance(tensor, torch.Tensor) or not tensor._has_symbolic_sizes_strides:
        return tensor
    sizes = [[int(known(each)) for each in sizes] for sizes in (tensor.shape, tensor.stride())]
    return torch.empty_strided(*sizes, dtype=tensor.dtype, device=tensor.device)


@contextmanager
def functions_of_lengths() -> Iterator[None]:
    """Let functions of ``math`` keep the formula of a length, for the length of a ``with`` block."""
    before = {name: getattr(math, name) for name in _FUNCTIONS}
    for name, function in before.items():
        setattr(math, name, functools.partial(_kept_formula, name, function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(math, name, function)


def _kept_formula(name: str, function: Callable[..., float], *given: Any) -> Any:
    if not any(isinstance(each, (torch.SymInt, torch.SymFloat)) for each in given):
        return function(*given)
    if name == "sqrt":
        return torch.sym_sqrt(given[0])
    of_two = _log2(given[0])
    if name == "log2":
        return of_two
    return of_two / (_log2(10) if name == "log10" else _log2(*given[1:]) if len(given) > 1 else math.log2(math.e))


def _log2(value: Any) -> Any:
    is_length = isinstance(value, (torch.SymInt, torch.SymFloat))
    return torch._sym_log2(value) if is_length else math.log2(value)  # type: ignore[attr-defined]
