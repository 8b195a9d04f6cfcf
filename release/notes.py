"""Print what CHANGELOG.md says of a version: ``python release/notes.py 0.2.0``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parent.parent / "CHANGELOG.md"


def notes(version: str, text: str) -> str:
    """Return the section of a version, without its heading.

    Raises:
        ValueError: the changelog has no section of that version, or says that it is not released.
    """
    headings = re.findall(r"^## \[([^]]+)\] - (.+)$", text, flags=re.M)
    sections = re.split(r"^## .*$", text, flags=re.M)[1:]
    for (name, date), section in zip(headings, sections):
        if name == version and re.fullmatch(r"\d{4}-\d\d-\d\d", date):
            return section.strip()
    known = ", ".join(f"{name} ({date})" for name, date in headings)
    raise ValueError(f"CHANGELOG.md needs a line '## [{version}] - YYYY-MM-DD'; it has {known}")


if __name__ == "__main__":
    try:
        print(notes(sys.argv[1], CHANGELOG.read_text(encoding="utf-8")))
    except ValueError as error:
        raise SystemExit(str(error)) from None
