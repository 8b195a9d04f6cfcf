"""A line on the terminal for what takes long. ``generate()`` prints nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: seconds before a line is worth it
PATIENCE = 2.0


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Say ``what`` on stderr if the block takes longer than PATIENCE and stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    line = threading.Timer(PATIENCE, lambda: print(f"hf_fastpath: {what} ...", file=sys.stderr, flush=True))
    line.daemon = True
    line.start()
    try:
        yield
    finally:
        line.cancel()
