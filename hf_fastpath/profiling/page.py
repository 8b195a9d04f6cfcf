"""A profile as a page: the picture over the tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from . import picture
from .times import StepTimes

_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:14px system-ui,sans-serif;max-width:1200px;margin:1.5rem auto;padding:0 1rem;"
    "background:#fff;color:#1c1c1c}"
    "svg{max-width:100%;height:auto}table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}"
    "td,th{padding:.15rem .6rem;text-align:right;border-bottom:1px solid #8884}"
    ".w{text-align:left}h2{font-size:1rem;margin:1.5rem 0 0}"
    "@media(prefers-color-scheme:dark){body{background:#16181d;color:#e8e8e8}}"
)
_COLUMNS = ("call", "module", "sizes", "us", "bytes", "% of R", "% of step", "by")
_WORDS = {"kind", "call", "module", "sizes", "by"}


def html(profile: StepTimes) -> str:
    """Return a page of its own, which loads nothing."""
    kinds = [
        (kind, str(count), *profile.cells(us, moved or None)) for kind, (count, us, moved) in profile.by_kind().items()
    ]
    parts = [
        f"<p>{'<br>'.join(escape(line.strip()) for line in profile.summary())}</p>",
        picture.svg(profile),
        _table(("kind", "calls", *_COLUMNS[3:7]), kinds),
    ]
    for title, calls in profile.layers():
        rows = [(call.op, call.module, call.sizes, *profile.cells(call.us, call.bytes), call.runs) for call in calls]
        parts.append(f"<h2>{escape(title)}</h2>{_table(_COLUMNS, rows)}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(profile.model)}: a decode step'
        f"</title><style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; columns of words are aligned to the left."""
    marks = [' class="w"' if name in _WORDS else "" for name in columns]
    head = "".join(f"<th{mark}>{escape(name)}</th>" for mark, name in zip(marks, columns))
    body = "".join(
        "<tr>" + "".join(f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, row)) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
