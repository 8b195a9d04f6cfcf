"""The list of calls behind each pass that changed it, as files in the folder that ``HF_FASTPATH_DUMP`` names.

Whatever goes wrong here is a warning: a step decodes the same with and without its files.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from ... import logs, switches
from .call_text import texts
from .named_calls import Call

DUMP = "HF_FASTPATH_DUMP"
#: lists of calls that one process writes at most: prompts of other lengths are lists of their own
MOST_LISTS = 200
#: characters of a call, and of a file, that are written at most
_MOST_OF_CALL, _MOST_OF_FILE = 4_000, 4_000_000
_lists, _numbers = itertools.count(1), itertools.count(1)


class Dump:
    """The files of one list of calls: ``<folder>/<number>-<title>/<number of the pass>-<name of the pass>.txt``.

    Args:
        folder: holds a folder for each list; it is made when the first file is written.
        title: says which list it is.
        calls: in front of the first pass.
    """

    def __init__(self, folder: Path, title: str, calls: Sequence[Call]):
        self._root, self._title = folder, re.sub(r"[^\w.-]+", "_", title)
        self._folder: Path | None = None
        self._before: list[str] = []
        self._has_failed = False
        self.note(0, "no_pass", calls)

    def note(self, number: int, name: str, calls: Sequence[Call]) -> None:
        """Write the list behind a pass, if it is another one than before."""
        if self._has_failed:
            return
        try:
            found = texts(calls)
            if found != self._before:
                self._before = found
                self._write(f"{number:02}-{name}.txt", found)
        except Exception as error:  # a full disk, or a value whose text fails: the step needs none of it
            self._has_failed = True
            why = getattr(error, "strerror", None) or error  # without the path: the same fault warns once
            logs.warn(f"{DUMP}: lists of calls are not written to {self._root}: {type(error).__name__}, {why}")

    def _write(self, name: str, found: list[str]) -> None:
        if self._folder is None:
            self._folder = self._made_folder()
        (self._folder / name).write_text(_numbered(found))

    def _made_folder(self) -> Path:
        """Make a folder that no list has yet; other processes may write beside this one."""
        self._root.mkdir(parents=True, exist_ok=True)
        while True:
            made = self._root / f"{next(_numbers):03}-{self._title}"
            try:
                made.mkdir()
            except FileExistsError:
                continue
            return made


def _numbered(found: list[str]) -> str:
    lines, length = [], 0
    for place, text in enumerate(found):
        text = text if len(text) <= _MOST_OF_CALL else f"{text[:_MOST_OF_CALL]} ..."
        lines.append(f"%{place} = {text}")
        length += len(lines[-1])
        if length > _MOST_OF_FILE:
            lines.append(f"... and {len(found) - place - 1} calls more")
            break
    return "\n".join([*lines, ""])


def dump_of(title: str, calls: Sequence[Call]) -> Dump | None:
    """Return the files of a list of calls; None if nobody asks for them, or this process has written enough."""
    folder = switches.text(DUMP)
    if not folder or not calls or next(_lists) > MOST_LISTS:
        return None
    return Dump(Path(folder), title, calls)
