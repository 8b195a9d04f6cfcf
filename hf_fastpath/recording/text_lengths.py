"""Lengths of a text, and of what an encoder has read, while a step is recorded: numbers that note what is done with
them.

The forward is given ``torch.SymInt`` for its lengths. What it asks of them (is it above 4,096? a multiple of 64?)
bounds the lengths that the recording serves; what it makes of them stays a formula.
"""

from __future__ import annotations

import functools
import itertools
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import TensorReferenceAnalysis

from .errors import LengthTaken
from .lines import is_of_model, line_of_frame
from .numbers_of_lengths import IntOfLength, known, multiple_of

_aten = torch.ops.aten

#: lengths that are looked at, at once
_AT_ONCE = 1 << 13
#: file whose ``_note`` calls functions and ops
_MODES = str(Path(__file__).parent / "modes.py")
#: functions that make tensors of the numbers that they are given
_OF_NUMBERS = frozenset({"tensor", "as_tensor", "new_tensor", "asarray", "scalar_tensor"})
#: lengths for which PyTorch's own questions are looked at
_MANY = 1 << 16
#: numbers of symbols
_NUMBERS = itertools.count()


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


class _Env(ShapeEnv):
    """Keeps the symbols of lengths, and who has asked something of them."""

    def __init__(self):
        super().__init__(
            duck_shape=False,
            specialize_zero_one=False,
            allow_scalar_outputs=False,
            allow_dynamic_output_shape_ops=False,
        )
        self.asked: dict[int, tuple[str, str, bool]] = {}  # number of a question -> see asked_by()

    def _get_user_frame(self) -> None:
        """Skip the search for a line to log: the list of files that it leaves out imports half of Inductor."""

    def evaluate_expr(self, *given: Any, **named: Any) -> Any:
        first = len(self.guards)
        found = super().evaluate_expr(*given, **named)
        for number in range(first, len(self.guards)):
            self.asked.setdefault(number, asked_by())
        return found


def new_env() -> _Env:
    """Return what keeps the symbols of lengths, for a mode that makes tensors without data."""
    return _Env()


def asked_by() -> tuple[str, str, bool]:
    """Return the file of a model's code that runs, its line as text, and whether an op of PyTorch's has asked for a
    number rather than this code; also if none of a model's code runs."""
    frame: FrameType | None = sys._getframe(1)
    is_op = False
    while frame is not None and frame.f_code.co_name != "record":  # behind which is who calls us
        file = frame.f_code.co_filename
        if is_of_model(file):
            return file, line_of_frame(traceback.FrameSummary(file, frame.f_lineno, frame.f_code.co_name)), is_op
        if frame.f_code.co_name == "_note" and file == _MODES:  # calls a function or op of PyTorch's
            is_op = is_op or getattr(frame.f_locals["func"], "__name__", "") not in _OF_NUMBERS
        frame = frame.f_back
    return "", "", True


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
        new: symbol of the number of new tokens of each sequence; None if the step is of a given number.
    """

    past: Any
    encoded: Any
    conditions: tuple[tuple[Any, str], ...] = ()
    new: Any = None

    @property
    def is_all(self) -> bool:
        """Whether there is no bound."""
        return not self.conditions

    def up_to(self, longest: int, of_encoded: bool = False) -> Served:
        """Return the same of a step of which nobody has looked at what it does of longer texts."""
        text = self.past if self.new is None else self.past + self.new
        formula = sympy.Le(self.encoded if of_encoded else text, longest)
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

    def serves_prompt(self, past: int, count: int) -> bool:
        """Whether the step of ``count`` new tokens behind ``past`` others is served, or so many steps one by one."""
        if self.new is None:
            return self.is_all or bool(self.among(past, past + count).all())
        values = {self.past: torch.tensor(past, device="cpu"), self.new: torch.tensor(count, device="cpu")}
        return all(bool(computed(formula, values)) for formula, _ in self.conditions)

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
        is_plain: the model's code gets plain numbers.
        are_given: these are lengths that other sizes may have, too.
        begins: the step is that of a text's first tokens alone.

    Attributes:
        past: tokens in the cache, as the model's code gets their number.
        size: the same in sizes of tensors: an op that takes the number behind a symbol takes it for all who have it.
        encoded: places that an encoder has read.
        query_len: new tokens of each sequence.
    """

    def __init__(
        self, env: _Env, past: int, encoded: int, is_plain: bool = False, are_given: bool = False, begins: bool = False
    ):
        self._env, self._first, self._number = env, len(env.guards), past
        self._is_plain, self._are_given, self.query_len = is_plain, are_given, 1
        self._count: Any = None  # symbol of the number of new tokens
        self._known_of: Served | None = None
        made = [self._new(*each) for each in (("past", past), ("size", past), ("encoded", encoded))]
        self._symbols = made[0].node.expr, made[2].node.expr
        self._of_sizes = made[1].node.expr
        self.past: Any
        self.size: Any
        self.encoded: Any
        self.past, self.size, self.encoded = (past, past, encoded) if is_plain else made
        if begins:
            self.past = self.size = 0

    def _new(self, name: str, hint: int) -> torch.SymInt:
        source = ConstantSource(f"{name}_{next(_NUMBERS)}")
        symbol = self._env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        made = self._env.create_symintnode(symbol, hint=hint, source=source)
        assert isinstance(made, torch.SymInt)
        return made

    def new_tokens(self, count: int, is_any: bool, known_of: Served | None = None) -> Any:
        """Return the number of new tokens of each sequence, as sizes of tensors have it.

        Args:
            is_any: the step is to be that of any number but 1.
            known_of: what is known of such a step already: for which lengths it is the same, and that its numbers are
                multiples of the number of new tokens, or do not follow this. Then a plain number will do.

        Raises:
            LengthTaken: the model's code gets plain numbers.
        """
        self.query_len = count
        if not is_any:
            return count
        if known_of is not None:
            self._known_of, self._count = known_of, known_of.new
            self.query_len = multiple_of(count, count, self._count)
            return count
        if self._is_plain:
            raise LengthTaken("a number that is made of the number of new tokens")
        made = self._new("new", count)
        self._count = made.node.expr
        self.query_len = known(made)
        return made

    def _questions(self) -> Iterator[tuple[Any, str, str, bool]]:
        """Yield what was asked of lengths: a formula of one symbol for each length, and who asked."""
        for number in range(self._first, len(self._env.guards)):
            formula = self._of_one(self._env.guards[number].expr)
            if not isinstance(formula, (bool, sympy.logic.boolalg.BooleanAtom)) and formula.free_symbols:
                yield formula, *self._env.asked[number]

    def _of_one(self, formula: Any) -> Any:
        """Return a formula with one symbol for the text's length."""
        return formula.xreplace({self._of_sizes: self._symbols[0]})

    def as_size(self, length: Any) -> Any:
        """Return a length of the text for the size of a tensor."""
        if not isinstance(length, torch.SymInt):
            return length
        further = length.node.expr - self._symbols[0]
        return self.size + int(further) if further.is_number else length

    @property
    def counts_any(self) -> bool:
        """Whether the number of new tokens is a symbol."""
        return self._count is not None and self._known_of is None

    def served(self) -> Served:
        """Return the lengths of which the model's code would have asked for the same calls."""
        if self._known_of is not None:
            return self._known_of
        found: dict[Any, str] = {}
        for formula, _, line, is_op in self._questions():
            if isinstance(formula, sympy.Eq) and is_op and self._count not in formula.free_symbols:
                continue  # the number was taken, see check()
            if not is_op or not self._is_of_sizes(formula):
                found.setdefault(formula, line)
        return Served(*self._symbols, tuple(found.items()), self._count)

    def _is_of_sizes(self, formula: Any) -> bool:
        """Whether PyTorch asks whether a size is 1, whose result is the same in any case: a formula holds for all
        others."""
        return bool(self._holds(formula).all())

    def _holds(self, formula: Any) -> torch.Tensor:
        """Return for which of many numbers a formula holds."""
        every = torch.arange(2, _MANY, device="cpu")
        values = dict.fromkeys((*self._symbols, self._count), every)
        values[self._count] = every.flip(0)  # as if it were none of the others
        return computed(formula, values)

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
        """Refuse a step of which somebody has taken the number behind a length, so that it serves no other. If an op
        of PyTorch's did, numbers are known by their values, see :meth:`noted`.

        Raises:
            LengthTaken: there is such a number.
        """
        for formula, file, line, is_op in self._questions():
            if not isinstance(formula, sympy.Eq):
                continue
            is_of_count = self._count in formula.free_symbols
            if self._holds(formula).sum() <= 1 if is_of_count else is_op == self._are_given:
                error = LengthTaken(f"a number that is made of a length{', at ' * bool(line)}{line}")
                error.is_known = "/transformers/models/" in file
                raise error

    def noted(self, value: Any) -> Any:
        """Return an argument as calls hold it, see :func:`known`. Numbers that are the same as the text's length are
        taken for it, unless other sizes may be the same, too."""
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            made = known(value)
            if hasattr(made, "formula"):
                made.formula = self._of_one(made.formula)
            return made
        if isinstance(value, (list, tuple)) and any(isinstance(each, (int, torch.SymInt)) for each in value):
            return [self.noted(each) for each in value]
        if self._known_of is not None:
            value = multiple_of(value, int(self.query_len), self._count)
        if self._are_given or type(value) is not int or value - self._number not in (0, self.query_len):
            return value
        made = IntOfLength(value)
        further = value - self._number
        made.formula = self._symbols[0] + (further if self._count is None or not further else self._count)
        return made
