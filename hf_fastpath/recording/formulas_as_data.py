"""Formulas of lengths as data: nothing of a text is evaluated, and nothing but known functions is called."""

from __future__ import annotations

import inspect
from typing import Any

import sympy
from sympy.logic.boolalg import BooleanFalse, BooleanTrue
from torch.utils._sympy import functions as torchs

from .errors import NotData

#: functions of formulas by name: those of sympy that sizes are made with, and PyTorch's own
_FUNCTIONS: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(sympy.Add, sympy.Mul, sympy.Pow, sympy.Max, sympy.Min, sympy.Mod, sympy.floor, sympy.ceiling, sympy.Abs),
        *(sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge, sympy.And, sympy.Or, sympy.Not, sympy.Xor),
        *(sympy.Piecewise, sympy.ITE),
    )
}
_FUNCTIONS |= {
    f"torch.{name}": each
    for name, each in vars(torchs).items()
    if inspect.isclass(each) and issubclass(each, sympy.Basic) and each.__module__ == torchs.__name__
}
_NAMES = {each: name for name, each in _FUNCTIONS.items()}


def to_data(formula: Any, symbols: dict[Any, str]) -> Any:
    """Return a formula as numbers, names and lists.

    Args:
        symbols: symbol -> its name.

    Raises:
        NotData: there is something else in it.
    """
    if formula in symbols:
        return symbols[formula]
    if isinstance(formula, (bool, BooleanTrue, BooleanFalse)):
        return bool(formula)
    if isinstance(formula, (int, sympy.Integer)):
        return int(formula)
    if isinstance(formula, (float, sympy.Float)):
        return ["float", repr(float(formula))]
    if isinstance(formula, sympy.Rational):
        return ["rational", int(formula.p), int(formula.q)]
    name = _NAMES.get(getattr(formula, "func", None))
    if name is None:
        raise NotData(f"a formula with {type(formula).__name__}")
    return [name, *(to_data(each, symbols) for each in formula.args)]


def from_data(data: Any, symbols: dict[str, Any]) -> Any:
    """Return the formula that :func:`to_data` was given.

    Args:
        symbols: name -> the symbol that stands for it now.

    Raises:
        NotData: it is no such data.
    """
    if isinstance(data, bool):
        return sympy.true if data else sympy.false
    if isinstance(data, int):
        return sympy.Integer(data)
    if isinstance(data, str) and data in symbols:
        return symbols[data]
    if not isinstance(data, list) or not data or not isinstance(data[0], str):
        raise NotData("no formula")
    name, *given = data
    if name == "float":
        return sympy.Float(float(given[0]))
    if name == "rational":
        return sympy.Rational(int(given[0]), int(given[1]))
    if name not in _FUNCTIONS:
        raise NotData(f"a formula with {name!r}")
    return _FUNCTIONS[name](*(from_data(each, symbols) for each in given))


def symbol(name: str) -> sympy.Symbol:
    """Return what stands for a length in formulas that are read."""
    return sympy.Symbol(name, integer=True, positive=True)
