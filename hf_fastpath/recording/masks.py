"""What a mask function of a model lets tokens see: it is asked, and its answers are compared with those of windows."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from .. import compat
from ..options import USUAL_BATCH
from . import marks
from .recorded_step import Unrecordable

#: positions up to which a mask is compared with windows
POSITIONS = 4096
#: places of what an encoder has read for which a mask is looked at
ENCODED_PLACES = 2048
#: rows that are compared at once
_ROWS = 512

MaskFunction = Callable[..., Any]


def is_known(function: Any, looks_up: bool = False) -> bool:
    """Whether a mask function is one of transformers', or put together of such: a few rows tell which one it is.

    Args:
        looks_up: even if it looks something up for each position, so that few rows would not tell.
    """
    if not isinstance(function, types.FunctionType):
        return False
    inside = [cell.cell_contents for cell in function.__closure__ or ()]
    inside = [part for each in inside for part in (each if isinstance(each, (list, tuple)) else (each,))]
    if not looks_up and any(each.numel() > USUAL_BATCH for each in inside if isinstance(each, torch.Tensor)):
        return False
    return compat.is_mask_function(function) and all(is_known(each, looks_up) for each in filter(callable, inside))


def sees_all(function: MaskFunction) -> bool:
    """Whether a mask function lets tokens at any position see all keys."""
    count = 8 if is_known(function) else ENCODED_PLACES
    places = torch.arange(count)
    rows = range(0, count, _ROWS)
    return all(bool(compat.mask_sees(function, places[row : row + _ROWS], places).all()) for row in rows)


def window_of(function: MaskFunction, sizes: list[int], past: int) -> int | None:
    """Return the window of a causal mask function, None if it has none.

    Args:
        sizes: of windows of the cache, one of which a window has that begins anew.
        past: position up to which the function is asked: for each position, but of functions of transformers'.

    Raises:
        Unrecordable: the function makes another mask.
    """
    for size in sizes:
        keys = torch.arange(4 * size)
        few = torch.tensor([0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 4 * size - 1])
        with suppress(IndexError):  # of a function that looks positions up, and knows fewer
            if torch.equal(compat.mask_sees(function, few, keys), _expected(few, keys, marks.Chunk(size))):
                return _checked(function, marks.Chunk(size), past)
    keys = torch.arange(past + 1)
    count = int(compat.mask_sees(function, keys[-1:], keys)[0].sum())
    early = torch.arange(8)
    found = None if count == len(keys) else count
    for few in (early, keys[-1:]):
        if not torch.equal(compat.mask_sees(function, few, keys), _expected(few, keys, found)):
            raise Unrecordable("a mask that is neither causal nor a window")
    return _checked(function, found, past)


def _checked(function: MaskFunction, window: int | None, past: int) -> int | None:
    """Return ``window`` once all rows were compared with it, if the function is none of transformers'."""
    if not is_known(function):
        keys, index = torch.arange(past + 1), None if is_known(function, looks_up=True) else _Any()
        for rows in keys.split(_ROWS):
            if not torch.equal(compat.mask_sees(function, rows, keys, index), _expected(rows, keys, window)):
                raise Unrecordable("a mask that is neither causal nor a window")
    return window


class _Any:
    """Stands for the number of any sequence, and of any head: a mask that asks for these is no window."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise Unrecordable("a mask that differs from sequence to sequence, or from head to head")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = __int__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse
    __getitem__ = __getattr__ = __hash__ = __torch_function__ = _refuse


def _expected(rows: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    seen = keys <= rows[:, None]
    if isinstance(window, marks.Chunk):
        return seen & (keys >= (rows // window * window)[:, None])
    return seen if window is None else seen & (rows[:, None] - keys < window)
