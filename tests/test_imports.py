"""No module of the package leads back to itself by its imports, also not inside functions or under TYPE_CHECKING."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: known cycles, each as the sorted names of its modules; there is none, and there should be none
KNOWN: set[tuple[str, ...]] = set()
#: folder of the package -> what it must not import, also not inside functions
FORBIDDEN = {
    "ops": ("cache", "decode", "recording", "patching"),
    "native": ("cache", "decode", "ops", "recording", "patching", "check", "bench", "cli"),
    "cache": ("decode", "recording", "patching", "check", "bench", "cli"),
    "decode": ("recording", "patching", "check", "bench", "cli"),
    "recording": ("patching", "check", "bench", "cli"),
    "patching": ("bench", "cli", "check.verification", "check.quality", "check.explain"),
    "check": ("bench", "cli"),
}


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


def test_folders_import_only_what_they_may():
    files, found = modules(), []
    for name in files:
        folder = name.split(".")[1] if name.count(".") else ""
        forbidden = {f"hf_fastpath.{each}" for each in FORBIDDEN.get(folder, ())}
        for other in imported(name, files):
            if any(other == each or other.startswith(f"{each}.") for each in forbidden):
                found.append(f"{name} imports {other}")
    assert not found, "\n".join(found)


def test_a_cycle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": {"d"}}
    assert cycles(graph) == {("b", "c"), ("d", "e")}
