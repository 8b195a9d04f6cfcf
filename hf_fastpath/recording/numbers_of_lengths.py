"""Numbers that a step makes of lengths, as its calls hold them: plain numbers that remember how they were made."""

from __future__ import annotations

from typing import Any

import torch


class IntOfLength(int):
    """A number that a step makes of its text's length, as the number was when the step was recorded.

    Attributes:
        formula: of sympy.
    """

    formula: Any = None


class FloatOfLength(float):
    """Do as :class:`IntOfLength` for a number in floating point."""

    formula: Any = None


#: no tensor is as large; PyTorch's "to the end" is larger
_LARGEST_SIZE = 1 << 48


def multiple_of(value: Any, count: int, symbol: Any) -> Any:
    """Return a plain number that is a multiple of ``count`` as the same multiple of a symbol; return any other value as
    it is."""
    if type(value) is not int or not 0 < value < _LARGEST_SIZE or value % count:
        return value
    made = IntOfLength(value)
    made.formula = value // count * symbol
    return made


def follow_sizes(arguments: dict[str, Any], count: int, symbol: Any) -> None:
    """Do as :func:`multiple_of` for all numbers in a call's arguments but those that name dimensions."""
    for name, value in arguments.items():
        if not name.startswith("dim"):
            arguments[name] = _following(value, count, symbol)


def _following(value: Any, count: int, symbol: Any) -> Any:
    if isinstance(value, (list, tuple)) and any(type(each) is int for each in value):
        return [_following(each, count, symbol) for each in value]
    return multiple_of(value, count, symbol)


def holds_multiple(value: Any, count: int) -> bool:
    """Whether an argument holds a plain number that :func:`multiple_of` would take for one of a symbol."""
    if isinstance(value, (list, tuple)):
        return any(holds_multiple(each, count) for each in value)
    return isinstance(multiple_of(value, count, 1), IntOfLength) and not isinstance(value, IntOfLength)


def follows_length(value: Any) -> bool:
    """Whether an argument is made of a length, or holds a number that is."""
    return isinstance(value, (IntOfLength, FloatOfLength)) or (
        isinstance(value, (list, tuple)) and any(map(follows_length, value))
    )


def is_multiple(value: Any, count: Any) -> bool:
    """Whether an argument holds no numbers but such as are multiples of the symbol ``count``, or do not follow it."""
    if isinstance(value, (list, tuple)):
        return all(is_multiple(each, count) for each in value)
    formula = getattr(value, "formula", None)
    if formula is None or count not in formula.free_symbols:
        return True
    return isinstance(value, int) and bool((formula / count).is_Integer)


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
    return torch.empty_strided(*sizes_of(tensor), dtype=tensor.dtype, device=tensor.device)


def sizes_of(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return a tensor's sizes and strides as plain numbers, those of the recording where they stand for lengths."""
    return [_hint(each) for each in tensor.shape], [_hint(each) for each in tensor.stride()]


def _hint(size: Any) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else size
