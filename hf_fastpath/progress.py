"""A line, or a bar with a count, for work that takes long. ``generate()`` says nothing.

Lines go through the logger, bars to a terminal's stderr.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from . import logs

#: seconds of work before a line or a bar appears
PATIENCE = 2.0


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Log ``what`` if the block takes longer than PATIENCE and stderr is a terminal; at once at the level "info"."""
    text = f"hf_fastpath: {what} ..."
    if logs.says_more():
        logs.say(text, logging.INFO)
    if logs.says_more() or not sys.stderr.isatty():
        yield
        return
    line = threading.Timer(PATIENCE, logs.say, (text,))
    line.daemon = True
    line.start()
    try:
        yield
    finally:
        line.cancel()


@contextmanager
def counted(total: int, what: str, quiet: bool = False) -> Iterator[tqdm]:
    """Show a bar on stderr if the block takes longer than PATIENCE and stderr is a terminal, until the block ends.

    Args:
        total: steps of the block, which calls ``update()`` of the yielded bar after each step.
        what: text in front of the bar; ``set_description_str()`` changes it.
        quiet: show no bar; there is none either if transformers' bars are switched off.
    """
    hidden = quiet or not sys.stderr.isatty() or logs.bars_are_off()
    # The timer waits for PATIENCE: tqdm's own delay shows nothing before the first step ends, which may take minutes.
    with tqdm(total=total, desc=what, file=sys.stderr, disable=hidden, delay=1e9, leave=False, ncols=100) as bar:

        def show() -> None:
            bar.delay = 0
            bar.refresh()

        timer = threading.Timer(PATIENCE, show)
        timer.daemon = True
        if not hidden:
            timer.start()
        try:
            yield bar
        finally:
            timer.cancel()
