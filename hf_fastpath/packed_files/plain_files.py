"""Reading small files of folders that anybody may have made: a pipe blocks for ever, a device never ends."""

from __future__ import annotations

import os
import stat
from pathlib import Path

#: bytes of a config or an index at most: an index of 100,000 tensors takes 20 MB
MOST_BYTES = 1 << 26
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def read_plain(path: Path) -> bytes:
    """Return what a file holds.

    Raises:
        FileNotFoundError: there is none.
        OSError: the file cannot be read.
        ValueError: something else is in its place, or it is longer than a config or an index is.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except NotADirectoryError as error:
        raise FileNotFoundError(*error.args) from None
    try:
        found = os.fstat(handle)
        kind = next((name for is_kind, name in _KINDS if is_kind(found.st_mode)), None)
        if kind is not None:
            raise ValueError(f"it is {kind}, expected a file")
        if found.st_size > MOST_BYTES:
            raise ValueError(f"it has {found.st_size:,} bytes, expected {MOST_BYTES:,} at most")
        with open(handle, "rb", closefd=False) as file:
            return file.read(MOST_BYTES)
    finally:
        os.close(handle)
