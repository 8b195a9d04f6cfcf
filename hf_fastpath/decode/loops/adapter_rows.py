"""Calls of ``generate()`` that name an adapter for each of their rows.

Such a step is that of the model with all these adapters active at once, but for what each row takes: so the model is
looked at, recorded and compared as if they were.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ... import compat
from ...reasons import Cause
from ..sources.step_source import StepSource


class _RowsHere(threading.local):
    rows: compat.RowAdapters | None = None


_here = _RowsHere()


@contextmanager
def in_call(model: nn.Module) -> Iterator[None]:
    """Be in a call of ``generate()``, for the length of a ``with`` block."""
    before, _here.rows = _here.rows, compat.row_adapters(model)
    try:
        yield
    finally:
        _here.rows = before


def are_named() -> bool:
    """Whether this thread is in a call that names adapters for its rows."""
    return _here.rows is not None


@contextmanager
def looked_at(model: nn.Module) -> Iterator[compat.RowAdapters | None]:
    """Let a model be seen with all adapters that this thread's call names, for the length of a ``with`` block.

    Yields:
        What the call names for its rows; None if nothing, or more than a step may have.
    """
    rows = _here.rows
    if rows is None or not rows.may_be_in_a_step(model):
        yield None
        return
    with rows.all_active():
        yield rows


def reason_against(part: StepSource, rows: compat.RowAdapters, batch: int) -> str | None:
    """Return why no step of ours has an adapter for each row, or None."""
    what = None
    if len(rows.rows) != batch:
        what = f"{len(rows.rows)} names for {batch} rows"
    elif rows.numbers is None:
        what = "adapters that share a matrix"
    elif part.token_shape or part.has_encoder or part.is_multimodal or part.by_length.is_bounded(batch):
        what = "a model of more than one text"
    if what is not None:
        return Cause("adapter_names", what, part.source)
    return part.row_adapters_reason(batch, rows.numbers or {})
