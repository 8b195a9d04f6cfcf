"""Lines and bars on the terminal for what takes long. ``generate()`` prints nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
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


@contextmanager
def counted(total: int, what: str, unit: str, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that counts to ``total``, where stderr is a terminal and not ``quiet``.

    Yields:
        A function that is told how many are done so far.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=f"hf_fastpath: {what}", unit=unit, file=sys.stderr, leave=False) as bar:
        yield lambda done: bar.update(done - bar.n)
