"""What the pages tell to run, runs: from the root of a clone and from elsewhere, with the package installed.

The install is a copy of what a wheel holds, in a folder of its own, and Python starts without the environment's
``.pth`` files: no editable install helps to find the package or its parts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from models import CPU, require_native

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
DOCS, README = ROOT / "docs", ROOT / "README.md"
PLACES = ("clone", "elsewhere")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.S | re.M)


#: start of a command that is not run here -> why
NOT_RUN = {
    "pip install": "changes the environment",
    "git clone": "fetches this repository",
    "make demo": "sets an environment up; test_make_sets_everything_up, and the example demo.py",
    "make test": "sets an environment up; test_make_sets_everything_up",
    "python examples/": "a server; tests/test_examples.py runs the examples",
}
#: part of a snippet that is not run here -> why
NOT_RUN_CODE = {'tp_plan="auto"': "several processes; tests/distributed runs them"}


def commands(page: Path) -> list[str]:
    """Return the commands of a page that run here."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines() if line.strip()]
    return [shlex.join(shlex.split(line, comments=True)) for line in lines if not line.startswith(tuple(NOT_RUN))]


#: commands of these, and of the lab pages, need machines and time
MEASURED = ("performance.md", "model-speeds.md")
PAGES = [page for page in (README, *sorted(DOCS.glob("*.md"))) if page.name not in MEASURED]
COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands(page)))
SNIPPETS = {
    page.name: [b for b in blocks(page, "python") if not any(part in b for part in NOT_RUN_CODE)] for page in PAGES
}
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
#: what the examples import besides, where it may be missing
_MISSING = r"No module named '(fastapi|peft|trl|uvicorn|datasets|requests)'|pip install gguf$"


def cells() -> list[str]:
    found = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def copied(to: Path, **names: str) -> Path:
    """Copy folders of this clone into a folder: the name there -> the name here. The libraries are not copied."""
    leave = shutil.ignore_patterns("__pycache__", "lib")
    for new, old in names.items():
        shutil.copytree(ROOT / old, to / new.replace("__", "/"), ignore=leave)
    (to / "hf_fastpath" / "lib").symlink_to(ROOT / "hf_fastpath" / "lib")
    return to


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """Make the folders: a clone, the installed package as a wheel has it with its program, and another folder."""
    require_native(CPU)
    clone, site, elsewhere = (tmp_path_factory.mktemp(name) for name in ("clone", "site", "elsewhere"))
    copied(clone, hf_fastpath="hf_fastpath", patches="patches", csrc="csrc")
    copied(site, hf_fastpath="hf_fastpath", hf_fastpath__patches="patches", hf_fastpath__csrc="csrc")
    (site / "hf-fastpath").write_text("import sys\nfrom hf_fastpath.cli.main import main\nsys.exit(main())\n")
    for folder in (clone, elsewhere):
        (folder / "examples").symlink_to(ROOT / "examples")  # paths in the pages are those of a clone
    return {"clone": clone, "site": site, "elsewhere": elsewhere}


@pytest.fixture
def python(places):
    """Start Python in one of the places."""
    packages = [path for path in sys.path if path.endswith("-packages")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    environment |= {"PYTHONPATH": os.pathsep.join([str(places["site"]), *packages]), "CUDA_VISIBLE_DEVICES": ""}
    environment["HF_HUB_OFFLINE"] = "1"

    def start(place: str, *arguments: str) -> str:
        command = [sys.executable, "-S", *arguments]
        done = subprocess.run(command, cwd=places[place], env=environment, capture_output=True, text=True, timeout=900)
        said = f"{done.stdout[-2000:]}{done.stderr[-5000:]}"
        assert done.returncode == 0, f"{shlex.join(command)} in {places[place]}:\n{said}"
        return done.stdout

    return start


def package(place: str, places: dict[str, Path]) -> Path:
    """Return the package that Python finds in a place: at a clone's root the clone's own comes first."""
    return places["clone" if place == "clone" else "site"] / "hf_fastpath"


@pytest.mark.parametrize("place", PLACES)
def test_everything_that_the_pages_tell_to_run(place, python, places, tmp_path, request):
    """All of it in a clone. Elsewhere, the README, one page and one command of each kind: what differs is which package
    is found, and where files are."""
    examples = sorted(str(path) for path in (ROOT / "examples").glob("*.py") if path.name != "demo.py")
    pages, of_all, notebook = [name for name in SNIPPETS if name != "README.md"], COMMANDS, cells()
    if place != "clone" and not request.config.getoption("--full"):
        pages, of_all, notebook = ["using.md"], list({each.split()[1]: each for each in COMMANDS}.values()), []
    jobs: list[tuple] = [("code", SNIPPETS["README.md"]), ("code", notebook)]
    jobs += [("snippet", SNIPPETS[name]) for name in pages if SNIPPETS[name]]
    jobs += [("command", shlex.split(command)[1:]) for command in of_all]
    jobs += [("file", path) for path in examples]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    script = f"exec(open({str(TESTS / 'run_in_place.py')!r}).read())"
    python(place, "-c", script, str(tmp_path / "jobs.json"), str(tmp_path / "results.json"))
    found = json.loads((tmp_path / "results.json").read_text())
    assert Path(found["package"]).parent == package(place, places)
    wrong = []
    for (kind, what), result in zip(jobs, found["results"], strict=True):
        is_missing = kind in ("file", "snippet") and re.search(_MISSING, result["failed"].strip())
        if (result["failed"] and not is_missing) or result.get("status"):
            wrong.append(f"{kind} {what}: {result['failed'] or result['err']}")
        elif kind == "command":
            lines = [line for line in result["out"].splitlines() if "kernels" not in line and ".so)" not in line]
            assert lines and (what[0] not in ("bench", "verify") or max(map(len, lines)) <= 100), result["out"]
    assert not wrong, "\n\n".join(wrong)
    readme, printed = found["results"][:2]
    assert "decode loop: fast" in readme["out"] and "import os" in readme["out"], "the report, and the text"
    assert "hf_fastpath on mistral" in readme["err"] and "verify: ok" in readme["result"]
    assert printed["out"].count("same tokens: True") == (2 if notebook else 0)


@pytest.mark.parametrize("place", PLACES)
def test_the_program_and_the_module(place, python, places):
    """The program runs what is installed, wherever it is started; the module what Python finds first."""
    for arguments, home in (
        ((str(places["site"] / "hf-fastpath"),), places["site"] / "hf_fastpath"),
        (("-m", "hf_fastpath"), package(place, places)),
    ):
        info = json.loads(python(place, *arguments, "info", "--json"))
        assert "llama" in info["architectures"] and str(home) in info["kernels"]["cpu"]


def test_every_kind_of_command_is_found():
    assert {command.split()[0] for command in COMMANDS} == {"hf-fastpath"}, "run it here, or say in NOT_RUN why not"
    assert {command.split()[1] for command in COMMANDS} == {"info", "explain", "profile", "verify", "bench"}
    assert {name for name, found in SNIPPETS.items() if found} > {"README.md", "index.md", "using.md", "kv-cache.md"}
    first = SNIPPETS["README.md"][0]
    assert "from_pretrained" in first and "import hf_fastpath" in first, "the first snippet is complete"


@pytest.mark.parametrize("target", ("demo", "test"))
def test_make_sets_everything_up(target, tmp_path):
    """On a fresh machine: the environment, what it needs, the kernels, then the job. README names both."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    assert f"\nmake {target} " in README.read_text()
    copy = tmp_path / "clone"
    for name in ("hf_fastpath", "csrc"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, copy / name)
    done = subprocess.run(["make", "-n", target], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = ["-m venv .venv", "pip install", "ninja", "-e ", "native/build.py cpu"]
    steps.append("examples/demo.py" if target == "demo" else "-m pytest")
    places = [done.stdout.find(step) for step in steps]
    assert -1 not in places and places == sorted(places), done.stdout
