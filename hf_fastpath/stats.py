"""What happened on a patched model: numbers of fast and stock tokens, with reason codes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from .cache.pages import PageCounts
from .reasons import check, named

#: number of different things that are kept for a reason code
MOST_DETAILS = 8


@dataclass
class PrefixCounts:
    """What became of prompts whose beginnings are kept, see ``patch(prefix_cache=)``.

    Attributes:
        limit_bytes, kept_bytes: what may be kept, and what is.
        prompt_tokens: tokens of prompts that were looked up.
        known_tokens: those of them that were not read again.
    """

    limit_bytes: int
    kept_bytes: int = 0
    prompt_tokens: int = 0
    known_tokens: int = 0

    def add(self, prompt_tokens: int, known_tokens: int) -> None:
        """Count the prompts of a call."""
        self.prompt_tokens += prompt_tokens
        self.known_tokens += known_tokens

    def __str__(self) -> str:
        kept, limit = (f"{count / 1e9:.3f} GB" for count in (self.kept_bytes, self.limit_bytes))
        return f"{self.known_tokens} of {self.prompt_tokens} tokens of prompts not read again; {kept} of {limit} kept"


@dataclass
class Stats:
    """Counters since ``patch()``.

    Attributes:
        fast_tokens, fallback_tokens: generated tokens, made by our loops and by stock code.
        reasons: reason code -> number of calls that ran stock code because of it.
        details: reason code -> the arguments, settings and modules that it was about, each once, MOST_DETAILS at most.
        last_tokens_per_second: decoding speed of the newest ``generate()``, without the prompt if our loop ran.
        pages: counts of the newest cache with pages that ``generate()`` used, or None.
        prefixes: counts of prompts that begin as others did, or None if nothing is kept of these.
        shared_steps: rows that read a token -> number of steps that calls have shared with so many.
        given_up_slots: how often a call has given up its place in these steps, to read its text again later.
    """

    fast_tokens: int = 0
    fallback_tokens: int = 0
    reasons: Counter = field(default_factory=Counter)
    details: dict[str, list[str]] = field(default_factory=dict)
    last_tokens_per_second: float | None = None
    pages: PageCounts | None = None
    prefixes: PrefixCounts | None = None
    shared_steps: Counter = field(default_factory=Counter)
    given_up_slots: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    #: of the thread: ``reasons``, (code, id of its module) of each reason noted in the call that it is in; ``made``,
    #: the tokens that it has counted; ``left`` and ``unseen``, see the methods that set them
    _noted: threading.local = field(default_factory=threading.local, repr=False)

    def new_call(self) -> None:
        """Begin a new generate(), in which each reason counts once, however many modules and tokens give it."""
        self._noted.reasons = set()

    def note(self, reason: str, model: Any = None) -> None:
        """Count a call that ran stock code; ``model`` is searched for the name of the module in ``reason``."""
        code, module = check(reason), getattr(reason, "module", None)
        noted: set[tuple[str, int]] = vars(self._noted).setdefault("reasons", set())
        if (code, id(module)) in noted:
            return
        is_new = not any(code == known for known, _ in noted)
        noted.add((code, id(module)))
        what = named(reason, model).what
        with self._lock:
            self.reasons[code] += is_new
            known = self.details.setdefault(code, [])
            if what and what not in known and len(known) < MOST_DETAILS:
                known.append(what)

    def has_noted(self, code: str) -> bool:
        """Whether a reason that names no module is counted already in the call that the thread is in."""
        return (code, id(None)) in vars(self._noted).get("reasons", ())

    @property
    def made_here(self) -> int:
        """The tokens that this thread has counted so far."""
        return vars(self._noted).get("made", 0)

    @property
    def is_left_to_stock(self) -> bool:
        """Whether the thread is in a call of ``generate()`` that has been left to stock code, with a reason."""
        return vars(self._noted).get("left", False)

    def left_to_stock(self) -> Any:
        """Note, for the length of a ``with`` block, that the call of ``generate()`` has been left to stock code."""
        return self._flagged("left")

    def uncounted(self) -> Any:
        """Count no tokens of this thread for the length of a ``with`` block: they are drafts of a call's tokens."""
        return self._flagged("unseen")

    @contextmanager
    def _flagged(self, name: str) -> Iterator[None]:
        before = vars(self._noted).get(name, False)
        setattr(self._noted, name, True)
        try:
            yield
        finally:
            setattr(self._noted, name, before)

    def shared_step(self, rows: int) -> None:
        """Count a step of calls that share steps, in which so many rows have read a token."""
        with self._lock:
            self.shared_steps[rows] += 1

    def gave_up_slots(self) -> None:
        """Count a call that gives up its slots, because memory does not suffice."""
        with self._lock:
            self.given_up_slots += 1

    def renew_lock(self) -> None:
        """Make a new lock: after a fork, a thread that the child does not have may hold the old one."""
        self._lock = threading.Lock()

    def generated(self, tokens: int, started: float, stock: bool = False, timed: int | None = None) -> None:
        """Count the tokens of one ``generate()``.

        Args:
            tokens: generated tokens, all rows.
            started: ``time.perf_counter()`` when the timed part began.
            stock: whether stock code made them.
            timed: number of tokens that fall into the timed part; None for all.
        """
        if vars(self._noted).get("unseen"):
            return
        self._noted.made = self.made_here + tokens
        elapsed = time.perf_counter() - started
        timed = tokens if timed is None else timed
        with self._lock:
            if stock:
                self.fallback_tokens += tokens
            else:
                self.fast_tokens += tokens
            if timed > 0 and elapsed > 0:
                self.last_tokens_per_second = timed / elapsed

    def to_dict(self) -> dict:
        """Return the counters as plain data."""
        with self._lock:
            return {
                "fast_tokens": self.fast_tokens,
                "fallback_tokens": self.fallback_tokens,
                "reasons": dict(self.reasons),
                "details": {code: list(known) for code, known in self.details.items() if known},
                "last_tokens_per_second": self.last_tokens_per_second,
                "pages": None if self.pages is None else asdict(self.pages),
                "prefixes": None if self.prefixes is None else asdict(self.prefixes),
                "shared_steps": dict(sorted(self.shared_steps.items())),
                "given_up_slots": self.given_up_slots,
            }
