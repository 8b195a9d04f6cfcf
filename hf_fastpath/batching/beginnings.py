"""Prompts of a batch that begin alike: what is made of their first tokens is made once, and copied."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..cache.prefixes import PAGE
from ..decode.loops.patched import Patched
from ..decode.loops.prefixes import Prefixes


class Beginnings(Prefixes):
    """What is kept of the prompts of a batch.

    Only prompts are kept of which another request that has not ended has the first page, so that others pay nothing.

    Args:
        state: of the model.
        limit: bytes that are kept at most; fewer where the memory of slots is limited, of which texts come first.
    """

    def __init__(self, state: Patched, limit: int):
        super().__init__(limit)
        self._state, self._limit = state, limit
        self._lock = threading.Lock()
        self._first_pages: Counter[tuple[int, ...]] = Counter()

    def add(self, tokens: Sequence[int]) -> None:
        """Note a request."""
        if len(tokens) > PAGE:
            with self._lock:
                self._first_pages[tuple(tokens[:PAGE])] += 1

    def remove(self, tokens: Sequence[int]) -> None:
        """Note that a request has ended."""
        if len(tokens) > PAGE:
            with self._lock:
                first = tuple(tokens[:PAGE])
                self._first_pages[first] -= 1
                if not self._first_pages[first]:
                    del self._first_pages[first]

    def of(self, tokens: Sequence[int]) -> Beginnings | None:
        """Return what a request needs that is about to read its prompt; None if no other request begins alike."""
        with self._lock:
            is_known = self._first_pages[tuple(tokens[:PAGE])] > 1
        if not is_known:
            return None
        self._state.stats.prefixes = self.counts
        return self

    @contextmanager
    def keeping(self) -> Iterator[None]:
        room, sharing = self._state.sharing.room, self._state.sharing
        if room.limit is None:
            yield
            return
        with sharing.lock:  # so that slots do not grow meanwhile
            room.kept[self] = self.store
            self.store.limit = min(self._limit, self.store.num_bytes + room.spare())
            yield
