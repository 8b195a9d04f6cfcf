"""The logger ``hf_fastpath``: what the package says, but for the report of ``patch()``, bars and the command line.

The logger follows ``transformers.utils.logging``: it has the level of transformers' logger, which
``TRANSFORMERS_VERBOSITY`` and ``set_verbosity()`` choose, and its records go to the handlers of that logger. Lines on
stderr do not say "[transformers]".
"""

from __future__ import annotations

import logging
import sys
from typing import Any

_LIBRARY = "transformers"
logger = logging.getLogger("hf_fastpath")
#: warnings that this process has given; each is given once, as Python's own are
given: set[str] = set()


def _their_logging() -> Any:
    """Return transformers' module of logging, which has made its logger ready; it is imported at the first line."""
    from transformers.utils import logging as theirs

    theirs.get_verbosity()
    return theirs


class _AsTransformers(logging.Handler):
    """Passes records on to where transformers' records go."""

    def emit(self, record: logging.LogRecord) -> None:
        library, own = logging.getLogger(_LIBRARY), getattr(_their_logging(), "_default_handler", None)
        handlers = dict.fromkeys((*library.handlers, *(logging.getLogger().handlers if library.propagate else ())))
        for handler in handlers:
            if record.levelno < handler.level or handler in logger.handlers:
                continue
            if own is not None and handler is own:  # it writes to what stderr was at its import, in transformers' name
                print(handler.format(record).removeprefix(f"[{_LIBRARY}] "), file=sys.stderr, flush=True)
            else:
                handler.handle(record)


def _follow() -> None:
    logger.parent, logger.propagate = logging.getLogger(_LIBRARY), False
    if not any(isinstance(handler, _AsTransformers) for handler in logger.handlers):
        logger.addHandler(_AsTransformers())


_follow()


def says_more() -> bool:
    """Whether the user asks for more than warnings."""
    _their_logging()
    return logger.isEnabledFor(logging.INFO)


def say(line: str, level: int = logging.WARNING) -> None:
    """Log a line; the default is for what a user should see who has not asked for more."""
    _their_logging()
    logger.log(level, line, stacklevel=2)


def bars_are_off() -> bool:
    """Whether the user has switched transformers' bars off, with ``disable_progress_bar()``."""
    theirs = sys.modules.get(f"{_LIBRARY}.utils.logging")  # a build has none
    return theirs is not None and not theirs.is_progress_bar_enabled()


def warn(text: str) -> None:
    """Log a warning, once for each text."""
    _their_logging()
    if text not in given:
        given.add(text)
        logger.warning(text, stacklevel=2)
