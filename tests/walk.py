"""The files of the project that one ``patch()`` and one token pass, in order: ``python tests/walk.py [--all]``.

A change of file is a call of a function that lies in another file of the project than its caller; what is called again
from the same file is folded, since every module of the model, and every layer, passes the same files. ``--all`` folds
nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from models import build, prompt

import hf_fastpath

PACKAGE = Path(hf_fastpath.__file__).parent
FOLDERS = {str(PACKAGE): "", str(PACKAGE.parent / "patches"): "patches/"}


def project_file(frame: FrameType) -> str | None:
    """The file of a frame, relative to its folder; None where it is none of the project's, or no function's."""
    name = frame.f_code.co_filename
    folder = next((folder for folder in FOLDERS if name.startswith(f"{folder}/")), None)
    if folder is None or frame.f_code.co_name.startswith("<"):  # a comprehension is no call
        return None
    return FOLDERS[folder] + name[len(folder) + 1 :]


class Walk:
    """Notes calls from one file of the project into another, while a ``with`` block runs.

    Attributes:
        changes: (from, to, function) of each, in order; from is "" for what other code calls.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[str, str, str]] = []

    def __enter__(self) -> Walk:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exception: Any) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or (file := project_file(frame)) is None:
            return
        caller, origin = frame.f_back, None
        while caller is not None and origin is None:
            origin, caller = project_file(caller), caller.f_back
        if file != origin:
            self.changes.append((origin or "", file, frame.f_code.co_name))

    def folded(self) -> list[tuple[str, str, str]]:
        """Each pair of files once, where it first came."""
        seen: dict[tuple[str, str], tuple[str, str, str]] = {}
        for change in self.changes:
            seen.setdefault(change[:2], change)
        return list(seen.values())


def walked(action: Callable[[], Any]) -> Walk:
    with Walk() as walk:
        action()
    return walk


def of_patch() -> Walk:
    """patch() of a small Llama, the libraries loaded."""
    hf_fastpath.unpatch(hf_fastpath.patch(build("llama"), quiet=True))
    model = build("llama")
    return walked(lambda: hf_fastpath.patch(model, quiet=True))


def of_token() -> Walk:
    """One more token of a greedy generate(): what twelve tokens pass and eleven do not."""
    model = hf_fastpath.patch(build("llama"), quiet=True)
    text = prompt(torch.device("cpu"))
    options = dict(do_sample=False, min_new_tokens=None)
    model.generate(text, max_new_tokens=11, **options)
    fewer = walked(lambda: model.generate(text, max_new_tokens=11, **options)).changes
    more = walked(lambda: model.generate(text, max_new_tokens=12, **options)).changes
    first = next(index for index, pair in enumerate(zip(fewer, more)) if pair[0] != pair[1])
    walk = Walk()
    walk.changes = more[first : first + len(more) - len(fewer)]
    return walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every change, folded nowhere")
    given = parser.parse_args()
    for name, walk in (("patch()", of_patch()), ("a token", of_token())):
        folded = walk.folded()
        files = dict.fromkeys(file for _, file, _ in folded)
        print(f"{name}: {len(files)} files, {len(folded)} changes of file, {len(walk.changes)} with those repeated")
        for origin, file, function in walk.changes if given.all else folded:
            print(f"  {origin or 'the caller':28} -> {file:28} {function}()")


if __name__ == "__main__":
    main()
