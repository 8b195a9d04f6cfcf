"""Tables on a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tabulate import tabulate


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] = (), indent: int = 0) -> str:
    """Return lines of text, without a newline at the end; a column is as wide as its widest cell.

    Args:
        columns: headings.
        rows: rows with a cell for each heading.
        left: headings of the columns of words; all other columns hold numbers, which are aligned to the right.
        indent: spaces in front of every line.
    """
    align = ["left" if name in left else "right" for name in columns]
    # tabulate would parse numbers in cells and print them in its own way, and it makes headings wider than needed
    # unless the headings are a row like the others.
    text = tabulate([columns, *rows], tablefmt="plain", disable_numparse=True, colalign=align)
    return "\n".join(f"{'':{indent}}{line}".rstrip() for line in text.splitlines())
