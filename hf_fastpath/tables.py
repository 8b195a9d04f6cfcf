"""Tables on a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tabulate import tabulate


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] = (), indent: int = 0) -> str:
    """Lines of text, without a newline at the end; a column is as wide as its widest cell.

    Args:
        columns: headings.
        rows: cells, as many in each as there are headings.
        left: headings of the columns of words; the others hold numbers, which stand on the right.
        indent: spaces in front of every line.
    """
    align = ["left" if name in left else "right" for name in columns]
    # tabulate reads numbers out of text if it may, and writes them anew in a way of its own,
    # and makes headings wider than they are, unless they are a row like the others.
    text = tabulate([columns, *rows], tablefmt="plain", disable_numparse=True, colalign=align)
    return "\n".join(f"{'':{indent}}{line}".rstrip() for line in text.splitlines())
