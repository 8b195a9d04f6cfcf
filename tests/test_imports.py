"""No module and no folder of the package leads back to itself by its imports, also not inside functions or under
TYPE_CHECKING."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: known cycles, each as the sorted names of its modules; there is none, and there should be none
KNOWN: set[tuple[str, ...]] = set()
#: the folders of the package, each of which may import those before it alone, also not inside functions
ORDER = (
    *("compat", "native", "quantization", "ops", "cache", "linears", "patches", "decode", "recording", "replacing"),
    *("parity", "patching", "packed_files", "check", "bench", "cli"),
)


def modules() -> dict[str, Path]:
    """Return the name of each module -> its file; packages have the name of their folder."""
    files = {path.relative_to(ROOT): path for path in (ROOT / "hf_fastpath").rglob("*.py")}
    files |= {Path("hf_fastpath", path.relative_to(ROOT)): path for path in (ROOT / "patches").rglob("*.py")}
    return {".".join(name.with_suffix("").parts).removesuffix(".__init__"): path for name, path in files.items()}


def imported(name: str, files: dict[str, Path]) -> Iterator[str]:
    """Yield the modules that a module names in its imports, without the ``__init__`` of their packages."""
    package = name.split(".") if files[name].name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(files[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*start, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                if inner in files or origin in files:
                    yield inner if inner in files else origin


def cycles(graph: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Return the sets of modules that lead to each other."""
    reached = {name: _reached(name, graph) for name in graph}
    found = (tuple(sorted(o for o in reached[name] if name in reached[o])) for name in graph if name in reached[name])
    return set(found)


def _reached(name: str, graph: dict[str, set[str]]) -> set[str]:
    """Return all modules on the paths from one module, and that module itself if a path leads back."""
    found: set[str] = set()
    waiting = list(graph[name])
    while waiting:
        if (each := waiting.pop()) not in found:
            found.add(each)
            waiting += graph[each]
    return found


def test_no_module_imports_itself_by_way_of_others():
    files = modules()
    assert len(files) > 100
    graph = {name: set(imported(name, files)) - {name} for name in files}
    assert cycles(graph) == KNOWN


def folder_of(name: str) -> str:
    """Return the folder that a module of the package is in; of a module beside the folders, its own name."""
    return name.split(".")[1] if "." in name else ""


def imports_of_folders() -> dict[tuple[str, str], list[str]]:
    """Return (folder, folder that it imports) -> what imports what, without imports within a folder."""
    files, found = modules(), defaultdict(list)
    for name in files:
        for other in imported(name, files):
            if folder_of(name) != folder_of(other):
                found[folder_of(name), folder_of(other)].append(f"{name} imports {other}")
    return dict(found)


def test_no_two_folders_import_each_other():
    found = imports_of_folders()
    assert len(found) > 50
    mutual = [line for (one, other), lines in found.items() if (other, one) in found for line in lines]
    assert not mutual, "\n".join(mutual)


def test_no_folder_imports_itself_by_way_of_others():
    found = imports_of_folders()
    graph = {name: {other for one, other in found if one == name} for name in {name for pair in found for name in pair}}
    assert cycles(graph) == KNOWN


def test_folders_import_only_those_before_them():
    folders = {path.parent.name for path in (ROOT / "hf_fastpath").glob("*/__init__.py")} | {"patches"}
    assert set(ORDER) == folders
    place = {folder: index for index, folder in enumerate(ORDER)}
    found = imports_of_folders().items()
    wrong = [
        line for (one, other), lines in found if {one, other} <= folders for line in lines if place[one] < place[other]
    ]
    assert not wrong, "\n".join(wrong)


def test_a_cycle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": {"d"}}
    assert cycles(graph) == {("b", "c"), ("d", "e")}
