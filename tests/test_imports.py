"""No module and no folder of the package leads back to itself by its imports, also not inside functions or under
TYPE_CHECKING."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: known cycles, each as the sorted names of its modules; there is none, and there should be none
KNOWN: set[tuple[str, ...]] = set()
#: a folder with folders -> these, each of which may import those before it alone, also not inside functions
ORDERS = {
    "hf_fastpath": (
        *("compat", "native", "quantization", "ops", "cache", "linears", "patches", "decode", "recording", "batching"),
        *("replacing", "parity", "patching", "packed_files", "check", "bench", "profiling", "cli"),
    ),
    "hf_fastpath.decode": ("calls", "ranks", "run", "model", "lower", "sources", "state", "placed", "plans", "loops"),
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


def folder_of(name: str, inside: str = "hf_fastpath") -> str:
    """Return the folder below ``inside`` that a module is in; of a module beside the folders, its own name."""
    return name.removeprefix(inside).removeprefix(".").partition(".")[0]


def imports_of_folders(inside: str = "hf_fastpath") -> dict[tuple[str, str], list[str]]:
    """Return (folder, folder that it imports) -> what imports what, without imports within a folder and from outside
    of ``inside``."""
    files, found = modules(), defaultdict(list)
    within = {name for name in files if name == inside or name.startswith(f"{inside}.")}
    for name in within:
        for other in within.intersection(imported(name, files)):
            if folder_of(name, inside) != folder_of(other, inside):
                found[folder_of(name, inside), folder_of(other, inside)].append(f"{name} imports {other}")
    return dict(found)


@pytest.mark.parametrize(("inside", "pairs"), (("hf_fastpath", 50), ("hf_fastpath.decode", 20)))
def test_no_two_folders_import_each_other(inside, pairs):
    found = imports_of_folders(inside)
    assert len(found) > pairs
    mutual = [line for (one, other), lines in found.items() if (other, one) in found for line in lines]
    assert not mutual, "\n".join(mutual)


@pytest.mark.parametrize("inside", ORDERS)
def test_no_folder_imports_itself_by_way_of_others(inside):
    found = imports_of_folders(inside)
    graph = {name: {other for one, other in found if one == name} for name in {name for pair in found for name in pair}}
    assert cycles(graph) == KNOWN


@pytest.mark.parametrize("inside", ORDERS)
def test_folders_import_only_those_before_them(inside):
    order = ORDERS[inside]
    packages = (name for name, path in modules().items() if path.name == "__init__.py")
    folders = {folder_of(name, inside) for name in packages if name.startswith(f"{inside}.")}
    assert set(order) == folders
    place = {folder: index for index, folder in enumerate(order)}
    found = imports_of_folders(inside).items()
    wrong = [
        line for (one, other), lines in found if {one, other} <= folders for line in lines if place[one] < place[other]
    ]
    assert not wrong, "\n".join(wrong)


def includes_of_folders(files: dict[str, str]) -> dict[str, set[str]]:
    """Return which folders the files of a folder include; ``files``: folder/name -> text."""
    graph: dict[str, set[str]] = {}
    for path, text in files.items():
        folder = path.partition("/")[0]
        named = re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', text, flags=re.M)
        others = {name.partition("/")[0] for name in named if "/" in name}
        graph.setdefault(folder, set()).update(others - {folder})
    return {folder: others & set(graph) for folder, others in graph.items()}


def test_no_folder_of_csrc_includes_itself_by_way_of_others():
    csrc = ROOT / "csrc"
    files = {str(path.relative_to(csrc)): path.read_text() for path in csrc.glob("*/*.*")}
    graph = includes_of_folders(files)
    assert len(graph) > 30 and sum(map(len, graph.values())) > 50
    assert cycles(graph) == set()
    circle = {"a/a.h": '#include "b/b.h"', "b/b.h": "// free", "b/c.cu": ' # include "a/a.h"\n#include "c.h"\n'}
    assert cycles(includes_of_folders(circle)) == {("a", "b")}


#: folders of csrc that products are made of: each includes those before it alone
PRODUCTS = ("common", "weights", "rope_append", "gemv", "gemm", "packed_gemv", "packed_gemm", "products")


def test_arrows_of_products_go_from_tables_to_kernels_to_weights():
    csrc = ROOT / "csrc"
    graph = includes_of_folders({str(path.relative_to(csrc)): path.read_text() for path in csrc.glob("*/*.*")})
    for place, folder in enumerate(PRODUCTS):
        assert graph[folder] <= set(PRODUCTS[:place]), folder
    assert not [folder for folder, others in graph.items() if "products" in others], "ops ask common/routes_*.h"


def test_a_cycle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": {"d"}}
    assert cycles(graph) == {("b", "c"), ("d", "e")}
