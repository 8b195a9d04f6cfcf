"""What happened on a patched model: counts of fast and stock tokens, with reason codes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from .pages import PageCounts
from .reasons import check, named

#: of what a reason code spoke, different things that are kept
MOST_DETAILS = 8


@dataclass
class Stats:
    """Counters since ``patch()``.

    Attributes:
        fast_tokens, fallback_tokens: generated tokens by the loop that made them.
        reasons: reason code -> number of calls that ran stock code because of it.
        details: reason code -> what it spoke of, each once: arguments, settings, modules; MOST_DETAILS at most.
        last_tokens_per_second: decoding speed of the newest ``generate()``, its prompt excluded where ours ran.
        pages: of the newest cache in pages that ``generate()`` used, or None.
    """

    fast_tokens: int = 0
    fallback_tokens: int = 0
    reasons: Counter = field(default_factory=Counter)
    details: dict[str, list[str]] = field(default_factory=dict)
    last_tokens_per_second: float | None = None
    pages: PageCounts | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _noted: set[tuple[str, int]] = field(default_factory=set, repr=False)

    def new_call(self) -> None:
        """A new generate() begins: each reason counts once in it, however many modules and tokens give it."""
        with self._lock:
            self._noted.clear()

    def note(self, reason: str, model: Any = None) -> None:
        """Count a call that ran stock code; ``model``: where a module has its name that ``reason`` speaks of."""
        code, module = check(reason), getattr(reason, "module", None)
        with self._lock:
            if (code, id(module)) in self._noted:
                return
            if not any(code == noted for noted, _ in self._noted):
                self.reasons[code] += 1
            self._noted.add((code, id(module)))
            what = named(reason, model).what
            known = self.details.setdefault(code, [])
            if what and what not in known and len(known) < MOST_DETAILS:
                known.append(what)

    def generated(self, tokens: int, started: float, reason: str | None = None, timed: int | None = None) -> None:
        """Count the tokens of one ``generate()``.

        Args:
            tokens: generated tokens, all rows.
            started: ``time.perf_counter()`` when the timed part began.
            reason: why stock code made them, or None.
            timed: how many of them fall into the timed part; None for all.
        """
        elapsed = time.perf_counter() - started
        timed = tokens if timed is None else timed
        with self._lock:
            if reason is None:
                self.fast_tokens += tokens
            else:
                self.fallback_tokens += tokens
            if timed > 0 and elapsed > 0:
                self.last_tokens_per_second = timed / elapsed

    def to_dict(self) -> dict:
        """The counters as plain data."""
        with self._lock:
            return {
                "fast_tokens": self.fast_tokens,
                "fallback_tokens": self.fallback_tokens,
                "reasons": dict(self.reasons),
                "details": {code: list(known) for code, known in self.details.items() if known},
                "last_tokens_per_second": self.last_tokens_per_second,
                "pages": None if self.pages is None else asdict(self.pages),
            }
