"""Which line of a model's own code something came from."""

from __future__ import annotations

import traceback

from .. import compat

#: letters of a line that are shown
_LONGEST = 120


def line_of_frame(frame: traceback.FrameSummary | None) -> str:
    """Return the line of a frame of a model as ``file.py:number: text``; "" if the frame is of no model."""
    if frame is None or not is_of_model(frame.filename):
        return ""
    line = frame.line or ""
    if line.endswith("("):  # the arguments are on further lines
        line += "...)"
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}: {line}"


def where(error: BaseException) -> str:
    """Return which line of the model an exception came through."""
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if is_of_model(frame.filename)]
    return f", at {line_of_frame(theirs[-1])}" if theirs else ""


def is_of_model(file: str) -> bool:
    """Whether a file is none of PyTorch's, Python's and this project's, and none that transformers' models share."""
    is_shared = "/transformers/" in file and "/transformers/models/" not in file
    return compat.is_elsewhere(file) and not is_shared
