"""CONTRIBUTING.md takes a reader through adding an op, a pass, a format and a family: its lists of places are true.

What a list says of a new one holds of each one that there is: a place without a condition has it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hf_fastpath  # noqa: F401  (defines the ops)
from hf_fastpath import registry
from hf_fastpath.architecture import architectures
from hf_fastpath.decode.run import passes as of_steps
from hf_fastpath.packed_formats import FORMATS
from hf_fastpath.recording.passes import PASSES

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
#: heading -> placeholder in its paths -> all that there are
SECTIONS = {
    "A new op": ("<op>", sorted(registry.all_ops())),
    "A new pass": ("<pass>", list(dict.fromkeys(row.name for table in (PASSES, of_steps.PASSES) for row in table))),
    "A new format of quantized weights": ("<format>", list(FORMATS)),
    "A new family": ("<family>", [architecture.name for architecture in architectures()]),
}


def section(heading: str) -> str:
    return re.search(rf"^## {heading}\n(.*?)(?=^## )", TEXT, flags=re.S | re.M)[1]


def rows(text: str) -> list[tuple[str, ...]]:
    """Return the cells of a section's first table, without its head."""
    lines = re.search(r"((?:^\|.*\n)+)", text, flags=re.M)[1].splitlines()
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines[2:]]


def places(heading: str) -> list[tuple[str, str, list[str]]]:
    """Return a list's places: the condition, "" for none; whether all paths of a row are meant, or one; the paths."""
    found = []
    for cell, _ in rows(section(heading)):
        condition, colon, named = cell.rpartition(": ")
        assert not condition or condition.startswith("if "), cell
        how = "one" if ", or " in named or " or " in named else "all"
        found.append((condition if colon else "", how, re.findall(r"`([^`]+)`", named)))
    return found


def contents(path: Path) -> str:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.suffix in (".py", ".h", ".md")]
    return "\n".join(file.read_text() for file in files)


@pytest.mark.parametrize("heading", SECTIONS)
def test_places_exist(heading):
    placeholder, names = SECTIONS[heading]
    found = places(heading)
    assert len(found) >= 5 and len(names) > 5
    for _, _, paths in found:
        assert paths
        for path in paths:
            assert any((ROOT / path.replace(placeholder, name)).exists() for name in names), path


def has(path: str, heading: str, name: str) -> bool:
    placeholder, _ = SECTIONS[heading]
    if placeholder in path:
        return (ROOT / path.replace(placeholder, name)).exists()
    named = name.removesuffix("_text") if path.endswith("tested_code.py") else name  # files of a model, not of a type
    return re.search(rf"(?<![a-z0-9]){re.escape(named)}(?![a-z0-9])", contents(ROOT / path), flags=re.I) is not None


@pytest.mark.parametrize(
    ("heading", "name"), [(heading, name) for heading, (_, names) in SECTIONS.items() for name in names]
)
def test_every_one_is_in_all_places(heading, name):
    for condition, how, paths in places(heading):
        if condition:
            continue
        missing = [path for path in paths if not has(path, heading, name)]
        assert not missing if how == "all" else len(missing) < len(paths), f"{name} is not in {', '.join(missing)}"


def test_stretches_hold_every_pass_in_turn():
    table = rows(section("A new pass").partition("### Where among the passes it belongs")[2])
    keys = list(PASSES.keys)
    begin = 0
    for _, first, last, _ in table:
        assert keys[begin] == first.strip("`"), f"the stretch that begins with {first} has to begin with {keys[begin]}"
        begin = keys.index(last.strip("`")) + 1
    assert begin == len(keys) and len(table) == 8


def test_every_command_is_a_target():
    known = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.M))
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", TEXT, flags=re.M))
    assert len(named) > 15 and named <= known, named - known
