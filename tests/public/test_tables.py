"""Tables on the terminal."""

from __future__ import annotations

from hf_fastpath.tables import table


def test_columns_are_as_wide_as_their_widest_cell():
    text = table(("name", "of"), [("a", "10"), ("longer", "1,000")], left=("name",), indent=2)
    assert text.splitlines() == ["  name       of", "  a          10", "  longer  1,000"]


def test_cells_stay_as_they_are():
    """Numbers are not rewritten, and a table without rows or with an empty cell is nothing special."""
    assert table(("n",), [("1e3",), ("",), ("0010",)]).splitlines() == ["   n", " 1e3", "", "0010"]
    assert table(("n", "m"), []) == "n  m"
