"""Adapters by request: those that name the same one run together, and others wait for their turn."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from .. import compat
from .request import Request


class AdapterTurns:
    """Which adapter of a model is active for the requests of a batch.

    A step computes one set of adapters for all of its rows. So an adapter has a turn: of the requests that wait for it
    when the turn begins, and of others while nobody else waits in front of them. Turns follow the order of requests.

    Args:
        model: with the adapters.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._now: str | None = None
        self._undo: Callable[[], None] | None = None
        self._turn: set[Request] = set()

    def check(self, name: str | None, given: dict[str, Any]) -> None:
        """Refuse an adapter that the model does not have.

        Raises:
            ValueError: there is no such adapter, or the arguments of ``generate()`` name some by row.
        """
        if given.get("adapter_names") is not None:
            raise ValueError(
                f"adapter_names is {given['adapter_names']!r}, which PEFT would take for the rows of all requests that "
                "share a step: submit(prompt, adapter='name') names the adapter of one request"
            )
        if name is None:
            return
        known = compat.adapter_names(self._model)
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            expected = f"one of {', '.join(known)}" if known else "None: the model has no adapters, see load_adapter()"
            raise ValueError(f"adapter is {name!r}, expected {expected}.{hint}")

    def next_of(self, waiting: Sequence[Request], running: Iterable[Request]) -> Request | None:
        """Return the request that is to be run next; None if it has to wait until those that run have ended.

        Args:
            waiting: requests in their order, at least one.
            running: those that have not ended.
        """
        first = waiting[0]
        if not any(True for _ in running):
            if first.adapter != self._now:
                self.give_back()
            if first.adapter is not None and self._now is None:
                self._undo = compat.use_adapter(self._model, first.adapter)
                self._now = first.adapter
            self._turn = {each for each in waiting if each.adapter == self._now}
            return first
        if first.adapter == self._now:
            return first
        return next((each for each in waiting if each in self._turn), None)

    def give_back(self) -> None:
        """Let those adapters be active that were so before the batch."""
        undo, self._undo, self._now = self._undo, None, None
        self._turn = set()
        if undo is not None:
            undo()
