"""Writes the parts of the docs that are made from code and data: ``python docs/make_pages.py``.

Such a part stands between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from hf_fastpath.reasons import markdown_table

DOCS = Path(__file__).resolve().parent

#: page -> name of a generated part -> what makes it
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "reason-codes.md": {"reason codes": markdown_table},
}


def with_generated_parts(page: str) -> str:
    """The text of ``docs/<page>`` with its generated parts made anew.

    Raises:
        ValueError: a part's markers are not in the page.
    """
    text = (DOCS / page).read_text()
    for name, make in PAGES[page].items():
        begin, end = f"<!-- generated: {name} -->\n", f"<!-- end of {name} -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        if len(re.findall(pattern, text, flags=re.S)) != 1:
            raise ValueError(f"docs/{page} needs the lines {begin.strip()!r} and {end!r}, once each and in this order")
        made = f"{begin}\n{make()}\n\n{end}"
        text = re.sub(pattern, lambda _, made=made: made, text, flags=re.S)
    return text


def main() -> None:
    for page in PAGES:
        (DOCS / page).write_text(with_generated_parts(page))


if __name__ == "__main__":
    main()
