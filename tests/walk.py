"""Print the files of the project that one ``patch()`` and one token pass, in order: ``python tests/walk.py [--all]``.

A change of file is a call of a function that lies in another file of the project than its caller; the indent is the
number of files above it. Repeated calls from the same file are folded, since every module of a model, and every layer,
passes the same files; ``--all`` folds nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from models import build, prompt

import hf_fastpath

PACKAGE = Path(hf_fastpath.__file__).parent
FOLDERS = {str(PACKAGE): "", str(PACKAGE.parent / "patches"): "patches/"}


class Change(NamedTuple):
    """A call into another file.

    Attributes:
        depth: number of files above it, 0 for what other code calls.
        origin, file: the caller's file and the called file; origin is "" for other code.
        function: the function that is called.
    """

    depth: int
    origin: str
    file: str
    function: str


def project_file(frame: FrameType) -> str | None:
    """Return the file of a frame's module, relative to its folder, or None if it is no file of the project."""
    if frame.f_code.co_name.startswith("<"):  # a comprehension is no call
        return None
    name = frame.f_globals.get("__file__", "")  # the code's own file would not do: dataclasses write functions
    folder = next((folder for folder in FOLDERS if name.startswith(f"{folder}/")), None)
    return None if folder is None else FOLDERS[folder] + name[len(folder) + 1 :]


class Walk:
    """Notes changes of file while a ``with`` block runs."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def __enter__(self) -> Walk:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exception: Any) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or (file := project_file(frame)) is None:
            return
        above: list[str] = []  # the files of the callers; equal neighbors count once
        caller = frame.f_back
        while caller is not None:
            origin = project_file(caller)
            if origin is not None and above[-1:] != [origin]:
                above.append(origin)
            caller = caller.f_back
        if above[:1] != [file]:
            self.changes.append(Change(len(above), above[0] if above else "", file, frame.f_code.co_name))

    def folded(self) -> list[Change]:
        """Return each pair of files once, where it first came."""
        seen: dict[tuple[str, str], Change] = {}
        for change in self.changes:
            seen.setdefault((change.origin, change.file), change)
        return list(seen.values())

    def own(self) -> list[Change]:
        """Return the changes that the outermost file makes, which a reader of that file follows."""
        first = min((change.depth for change in self.changes), default=0)
        return [change for change in self.folded() if change.depth <= first + 1]


def walked(action: Callable[[], Any]) -> Walk:
    with Walk() as walk:
        action()
    return walk


def of_patch() -> Walk:
    """Walk through patch() of a small Llama, with the libraries loaded."""
    hf_fastpath.unpatch(hf_fastpath.patch(build("llama"), quiet=True))
    model = build("llama")
    return walked(lambda: hf_fastpath.patch(model, quiet=True))


def of_token() -> Walk:
    """Walk through one more token of a greedy generate(): what twelve tokens pass and eleven do not."""
    model = hf_fastpath.patch(build("llama"), quiet=True)
    text = prompt(torch.device("cpu"))
    for count in (11, 12):
        model.generate(text, do_sample=False, max_new_tokens=count)
    fewer, more = (
        walked(lambda count=count: model.generate(text, do_sample=False, max_new_tokens=count)).changes
        for count in (11, 12)
    )
    first = next(index for index, pair in enumerate(zip(fewer, more)) if pair[0] != pair[1])
    walk = Walk()
    walk.changes = more[first : first + len(more) - len(fewer)]
    return walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every change, folded nowhere")
    given = parser.parse_args()
    for name, walk in (("patch()", of_patch()), ("a token", of_token())):
        folded, own = walk.folded(), walk.own()
        files = dict.fromkeys(change.file for change in folded)
        counts = f"{len(own)} changes of file on its own way, {len(folded)} with those below, in {len(files)} files"
        print(f"{name}: {counts}; {len(walk.changes)} if none is folded")
        least = min(change.depth for change in walk.changes)
        for change in walk.changes if given.all else folded:
            print(f"  {'    ' * (change.depth - least)}{change.file}: {change.function}()")


if __name__ == "__main__":
    main()
