"""Pages with generated parts are as ``docs/make_pages.py`` makes them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
_spec = importlib.util.spec_from_file_location("make_pages", DOCS / "make_pages.py")
make_pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_pages)


@pytest.mark.parametrize("page", make_pages.PAGES)
def test_generated_parts_are_up_to_date(page):
    assert (DOCS / page).read_text() == make_pages.with_generated_parts(page), "run `python docs/make_pages.py`"


def test_a_page_without_markers_is_named(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text("<!-- generated: part -->\n")
    monkeypatch.setattr(make_pages, "DOCS", tmp_path)
    monkeypatch.setitem(make_pages.PAGES, "page.md", {"part": lambda: "text"})
    with pytest.raises(ValueError, match="docs/page.md needs the lines .*end of part"):
        make_pages.with_generated_parts("page.md")
