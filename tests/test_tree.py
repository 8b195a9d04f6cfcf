"""The tree itself: every op and architecture has all its files, and no file has forbidden contents."""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from pathlib import Path

import pytest

import hf_fastpath  # noqa: F401  (defines the ops)
from hf_fastpath import registry

ROOT = Path(__file__).resolve().parent.parent
OPS = sorted(registry.all_ops())
ARCHITECTURES = sorted(path.stem for path in (ROOT / "patches").glob("*.py") if not path.stem.startswith("_"))

#: the tests that every op's test file holds, under ``test_<op>_...``
OP_TESTS = (
    "matches_reference",
    "handles_views",
    "handles_odd_sizes",
    "writes_every_element",
    "opcheck",
    "rejects_bad_input",
)
_NOT_SOURCE = {"build", "dist", "lib", "__pycache__"}
_TEXT = set(".py .md .toml .cfg .cpp .cu .cuh .h .csv .json .yml .yaml .txt .sh".split()) | {""}


def project_files() -> list[Path]:
    """Return every text file of the project; hidden folders and build output are not the project's."""
    files = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        folders = parts[:-1]
        if any(part.startswith(".") and part != ".github" or part in _NOT_SOURCE for part in folders):
            continue
        if path.name == ".git":
            continue  # it is a file in a work tree beside the clone
        if path.is_file() and path.suffix in _TEXT and not any(part.endswith(".egg-info") for part in folders):
            files.append(path)
    return files


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "place",
    ("hf_fastpath/ops/{}.py", "csrc/{0}/{0}_cpu.cpp", "csrc/{0}/{0}_cuda.cpp", "tests/ops/test_{}.py"),
)
def test_op_has_its_room(op, place):
    path = place.format(op)
    device = path.rpartition("_")[2].removesuffix(".cpp") if path.startswith("csrc") else None
    wanted = device is None or device in registry.get(op).native
    assert (ROOT / path).is_file() == wanted, f"op {op}: {path} {'is missing' if wanted else 'is not named in native'}"


@pytest.mark.parametrize("op", OPS)
def test_op_has_the_common_tests(op, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "ops")
    module = vars(importlib.import_module(f"test_{op}"))
    missing = [f"test_{op}_{test}" for test in OP_TESTS if f"test_{op}_{test}" not in module]
    assert not missing, f"tests/ops/test_{op}.py lacks {', '.join(missing)}: call common_tests(SPEC)"


@pytest.mark.parametrize("op", OPS)
def test_op_is_importable_by_name(op):
    assert getattr(hf_fastpath.ops, op) is registry.get(op)
    assert op in hf_fastpath.ops.__all__


@pytest.mark.parametrize("op", OPS)
def test_op_has_a_complete_docstring(op):
    text = registry.get(op).reference.__doc__ or ""
    for heading in ("Args:", "Returns:", "Raises:", "Source:"):
        assert heading in text, f"op {op}: the reference's docstring has no {heading}"
    for argument in registry.get(op).overload._schema.arguments:
        assert re.search(rf"\b{argument.name}\b", text), f"op {op}: the docstring does not explain {argument.name}"


@pytest.mark.parametrize("op", OPS)
def test_op_is_benchmarked(op, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # because the scripts import each other
    shapes = importlib.import_module("op_shapes").SHAPES
    assert shapes.get(op), f"op {op}: benchmarks/op_shapes.py has no SHAPES entry for it"


@pytest.mark.parametrize("op", OPS)
def test_op_is_documented(op):
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert any(re.search(rf"\b{op}\b", page.read_text()) for page in pages), f"op {op}: no page in docs/ names it"


@pytest.mark.parametrize("op", OPS)
def test_kernel_headers_are_complete(op):
    """Files with kernels state the four headings and stay free of torch, which only the glue uses."""
    folder = ROOT / "csrc" / op
    for kernel in (*folder.glob("*.cu"), *folder.glob("*.cuh"), *folder.glob("*_avx*.cpp")):
        text = kernel.read_text()
        name = kernel.relative_to(ROOT)
        assert not re.search(r"#include [<\"](?:torch/|ATen/|c10/|common/torch_glue)", text), f"{name} includes torch"
        if "__global__" not in text and kernel.suffix != ".cpp":
            continue  # the file has helpers, or chooses among kernels
        head = "\n".join(line for line in text.splitlines() if line.lstrip().startswith(("//", "*", "/*")))
        for heading in ("What", "Work split", "Traffic", "Roofline"):
            assert re.search(rf"\b{heading}\b", head), f"{name}: no comment says {heading}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architecture_has_its_tests(architecture, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "patches")
    assert importlib.import_module("variants").VARIANTS.get(architecture), (
        f"architecture {architecture}: tests/patches/variants.py has no configs of it"
    )


@pytest.mark.parametrize(
    ("what", "pattern"),
    (
        ("an absolute path of a build machine", r"(?<![\w.])/(?:root|work|home/\w+)/"),
        ("unfinished work", r"\b(?:TO[D]O|FIX[M]E|X[X]X)\b"),
        ("a conflict marker", r"^(?:<{7}|>{7}) "),
        ("a package registry's host", r"(?i)(?:pypi|pythonhosted|npmjs|anaconda|crates)\.(?:or[g]|co[m]|i[o])"),
    ),
    ids=("paths", "unfinished", "conflicts", "registries"),
)
def test_no_file_contains(what, pattern):
    found = []
    for path in project_files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, f"{what}:\n" + "\n".join(found)


def test_files_of_the_package_can_be_read_in_one_go():
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "hf_fastpath").rglob("*.py")}
    long = {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > 400}
    assert len(lengths) > 100 and not long, f"more than 400 lines: {long}"


def test_a_name_of_a_class_has_one_meaning():
    homes = defaultdict(list)
    for path in sorted((ROOT / "hf_fastpath").rglob("*.py")):
        for name in re.findall(r"^class (\w+)|^(\w+) = \w+(?: \| \w+)+$", path.read_text(), flags=re.M):
            homes["".join(name)].append(str(path.relative_to(ROOT)))
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert len(homes) > 100 and not twice, f"names that stand for several classes: {twice}"


# ---- links -------------------------------------------------------------------------------------------------


def links(page: Path) -> list[str]:
    """Return the targets of the page's links and images that lie in the project, without code."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    text = re.sub(r"`[^`\n]*`", "", text)
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)", text) + re.findall(r"""(?:src|href)=["']([^"']+)["']""", text)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+\s+(.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_readme_exists():
    assert (ROOT / "README.md").is_file()


def test_links_resolve():
    broken = []
    for page in (path for path in project_files() if path.suffix == ".md"):
        for target in links(page):
            path, _, anchor = target.partition("#")
            goal = (page.parent / path).resolve() if path else page
            if not goal.exists() or (anchor and goal.suffix == ".md" and anchor not in anchors(goal)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken, "links that lead nowhere:\n" + "\n".join(broken)
