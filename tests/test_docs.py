"""Pages with generated parts are as ``docs/make_pages.py`` makes them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import conftest
import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
_spec = importlib.util.spec_from_file_location("make_pages", DOCS / "make_pages.py")
make_pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_pages)


@pytest.mark.parametrize("page", make_pages.PAGES)
def test_generated_parts_are_up_to_date(page):
    assert (DOCS / page).read_text() == make_pages.with_generated_parts(page), "run `make docs`"


def test_a_page_without_markers_is_named(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text("<!-- generated: part -->\n")
    monkeypatch.setattr(make_pages, "DOCS", tmp_path)
    monkeypatch.setitem(make_pages.PAGES, "page.md", {"part": lambda: "text"})
    with pytest.raises(ValueError, match="docs/page.md needs the lines .*end of part"):
        make_pages.with_generated_parts("page.md")


def test_a_family_without_figures_is_named(tmp_path, monkeypatch):
    lines = make_pages.GOLDEN.read_text().splitlines(keepends=True)
    (tmp_path / "golden.csv").write_text("".join(line for line in lines if not line.startswith("gpt2,")))
    monkeypatch.setattr(make_pages, "GOLDEN", tmp_path / "golden.csv")
    with pytest.raises(ValueError, match="no figures of .*gpt2.*: run `make test-full .*--record-golden"):
        make_pages.golden_matrix()


def test_new_figures_take_the_place_of_old_ones(tmp_path):
    path = tmp_path / "golden.csv"
    row = dict.fromkeys(conftest.GOLDEN_COLUMNS, "x") | {"architecture": "b", "dtype": "float16", "error": "1"}
    conftest.merge_golden(path, [row, row | {"dtype": "float32"}])
    conftest.merge_golden(path, [row | {"error": "2"}, row | {"architecture": "a", "error": "3"}])
    lines = path.read_text().splitlines()
    assert [line.split(",")[4] for line in lines[1:]] == ["3", "1", "2"] and len(lines) == 4
