"""What the package says through its logger."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from hf_fastpath import logs


@contextmanager
def lines() -> Iterator[list[str]]:
    """Collect what is logged in a ``with`` block, also what was logged before it."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logs.given.clear()
    logs.logger.addHandler(handler)
    try:
        yield found
    finally:
        logs.logger.removeHandler(handler)


@contextmanager
def logged(match: str) -> Iterator[list[str]]:
    """Assert that a ``with`` block logs a line in which the pattern is found."""
    with lines() as found:
        yield found
    assert any(re.search(match, line) for line in found), f"no line has {match!r}: {found}"
