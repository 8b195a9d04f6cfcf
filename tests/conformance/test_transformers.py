"""transformers' own tests of the families in our loop pass on patched models if they pass on stock ones.

Each family's tests run in a separate pytest, with every model patched that generates (``patched_models.py``). Tests
that do not pass there run again on stock models, and must not pass there either. Of recorded families, whose modules
stay transformers' own, the tests of generation run.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sources
from models import CPU, require_native
from transformers.models.auto.configuration_auto import model_type_to_module_name

import hf_fastpath
from hf_fastpath.architecture import architectures

HERE = Path(__file__).resolve().parent
TYPES = HERE.parents[1] / "docs" / "data"
#: names of transformers' folders of models
LISTED = {architecture.module.split(".")[2] for architecture in architectures()}


def recorded() -> set[str]:
    """Return the folders of types whose steps are recorded, by the tables of types."""
    found = set()
    for table in ("recorded_types.csv", "multimodal_types.csv", "encoder_decoder_types.csv"):
        with (TYPES / table).open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["how"] == "recorded"]
        found |= {model_type_to_module_name(row["model_type"]) for row in rows}
    return found - LISTED


#: families whose tests of generation `make test` runs
QUICK = ("gpt2", "llama", "qwen3_5", "t5")
#: families whose tests of torch.compile run as well; these take longer than all others together
COMPILED = ("gpt2", "llama")
#: tests of what ``patch()`` is there to change; every test that fails only on patched models is here
DECLARED = {"test_generate_compile_model_forward_fullgraph": "asserts that generate() fills a DynamicCache"}
TIMEOUT = 1800


@pytest.fixture(scope="session")
def tests() -> Path:
    """Return a checkout with transformers' tests, if what they import is installed and there are kernels."""
    require_native(CPU)
    for name in ("datasets", "httpx", "parameterized", "timeout_decorator"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"transformers' tests import {name}: `make test-conformance` installs it")
    if (why := sources.missing()) is not None:
        pytest.skip(why)
    return sources.checkout()


def outcomes(tests: Path, folder: Path, arguments: list[str], *options: str) -> dict:
    """Return what ``patched_models.py`` notes of a run of transformers' tests.

    Args:
        tests: a checkout of transformers.
        folder: folder for what is written.
        arguments: the tests to run.
        options: options of pytest.
    """
    noted, listed = folder / "outcomes.json", folder / "arguments.txt"
    noted.unlink(missing_ok=True)
    listed.write_text("\n".join(arguments))
    paths = (str(HERE), str(Path(hf_fastpath.__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "patched_models",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:warnings",
    )
    result = subprocess.run(
        (*command, "--outcomes", noted, *options, f"@{listed}"),
        **dict(cwd=tests, env=environment, timeout=TIMEOUT, capture_output=True, text=True),
    )
    ended = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED
    assert noted.is_file() and result.returncode in ended, result.stdout[-4000:] + result.stderr[-4000:]
    return json.loads(noted.read_text())


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each in QUICK else pytest.mark.full) for each in sorted(LISTED | recorded())],
)
def test_no_failure_that_stock_has_not(family, tests, tmp_path, request):
    full = request.config.getoption("--full") and family in LISTED
    options = () if full and family in COMPILED else ("-k", "not compil")
    options += () if full else ("-m", "generate")
    file = f"tests/models/{family}/test_modeling_{family}.py"
    if not (tests / file).is_file():
        pytest.skip(f"transformers has no {file}")
    patched = outcomes(tests, tmp_path, [file], *options)
    if not patched["outcomes"]:
        pytest.skip(f"there is no such test in {file}")
    assert patched["fast_tokens"] and not (family in LISTED and patched["refused"]), {**patched, "outcomes": ...}
    found = patched["outcomes"]
    unlike = [name for name, (outcome, _) in found.items() if outcome == "failed" or (full and outcome == "skipped")]
    stock = outcomes(tests, tmp_path, unlike, "--stock")["outcomes"] if unlike else {}
    assert set(stock) == set(unlike)
    ours = [name for name in unlike if stock[name][0] == "passed" and name.rpartition("::")[2] not in DECLARED]
    details = "\n\n".join(f"{name} {found[name][0]}:\n{found[name][1]}" for name in ours)
    assert not ours, f"{len(ours)} tests pass on stock models and not on patched ones:\n{details}"
