"""Shared by all tests: devices, a fixed seed, a header that says which native libraries are under test."""

from __future__ import annotations

import csv
import gc
import itertools
import os
import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from first_scales import first_scales

from hf_fastpath import bandwidth, logs
from hf_fastpath.native import build, loader
from hf_fastpath.patching import selftest
from hf_fastpath.recording import prompts
from hf_fastpath.registry import FLOAT_DTYPES

pytest.register_assert_rewrite("checks", "linear_checks", "memory", "parity", "models", "architecture_checks")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="everything, and not the selection that `make test` runs")
    parser.addoption("--sample", type=int, default=1, metavar="N", help="each N-th test, chosen by the tests' names")
    parser.addoption(
        "--record-golden",
        metavar="CSV",
        help="put the errors of the golden matrix into this file, in place of what it holds of the same cases",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-golden") and not config.getoption("--full"):
        raise pytest.UsageError("--record-golden records what --full compares: give both")
    if config.getoption("--record-golden") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--record-golden writes one file at the end of one process: make it JOBS=0")
    required = [name.strip() for name in os.environ.get("HF_FASTPATH_REQUIRE_NATIVE", "").split(",") if name.strip()]
    if unknown := sorted(set(required) - set(build.TARGETS)):
        raise pytest.UsageError(f"HF_FASTPATH_REQUIRE_NATIVE names {unknown}, known: {', '.join(build.TARGETS)}")
    status = loader.status()
    if missing := [f"{name}: {status[name]}" for name in required if not status[name].native]:
        raise pytest.UsageError(f"HF_FASTPATH_REQUIRE_NATIVE asks for kernels that are not there: {'; '.join(missing)}")


#: files with tests that take longest, which go first, so that no process waits for them at the end
LONGEST = ("test_places.py", "test_recorded_over_ranks.py", "test_ranks_that_differ.py", "test_moved_names.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that are marked ``full``, and the cases that ``every(n)``, ``each_value`` and ``each_pair`` do
    not take, unless all are asked for; pytest says how many these are."""
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    known = set(left_out)
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        is_skipped = any(each.args[0] is True for each in item.iter_markers("skipif"))
        if item not in known and not is_skipped and any(map(item.get_closest_marker, SAMPLES)):
            tests.setdefault((str(item.path), item.originalname), []).append(item)
    for cases in tests.values():
        taken = sampled(cases)
        left_out += [item for item in cases if item not in taken]
    known = set(left_out)
    if (sample := config.getoption("--sample")) > 1:
        left_out += [item for item in items if item not in known and zlib.crc32(item.nodeid.encode()) % sample]
        known = set(left_out)
    first = [item for item in items if item not in known and item.path.name in LONGEST]
    items[:] = first + [item for item in items if item not in known and item.path.name not in LONGEST]
    config.hook.pytest_deselected(items=left_out)


#: markers of tests of which some cases run -> how many arguments are looked at together; 0 where cases are counted
SAMPLES = {"each_value": 1, "each_pair": 2, "every": 0}


def sampled(cases: list[pytest.Item]) -> set[pytest.Item]:
    """Return which cases of a test run. Its function may say another thing than its file."""
    name = next(each.name for each in cases[0].iter_markers() if each.name in SAMPLES)
    if not SAMPLES[name]:
        apart = min(cases[0].get_closest_marker(name).args[0], len(cases))
        first = -zlib.crc32(cases[0].originalname.encode()) % apart  # tests of a file take different cases
        return set(cases[first::apart])
    if len(cases) == 1:
        return set(cases)
    taken: set[pytest.Item] = set()
    missing = {case: values_of(case, SAMPLES[name]) for case in cases}
    while any(missing.values()):
        best = max(missing, key=lambda case: (len(missing[case]), zlib.crc32(case.nodeid.encode())))
        taken.add(best)
        seen = missing.pop(best)
        missing = {case: values - seen for case, values in missing.items()}
    return taken


def values_of(case: pytest.Item, together: int) -> set[tuple]:
    """Return what a case has of what a sample has to cover: values of its arguments, or so many of them together, on
    each device."""
    params = case.callspec.params.items()
    given = {name: value if isinstance(value, (str, int)) else id(value) for name, value in params}
    device = given.pop("device", None)
    return {(device, *each) for each in itertools.combinations(sorted(given.items()), min(together, len(given)))}


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Name the native libraries: without one an op *is* its reference, and the comparisons below hold trivially."""
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    lines = [f"{versions}, {torch.get_num_threads()} threads, {cuda}"]
    return lines + [f"hf_fastpath library for {loader.status()[target]}" for target in build.TARGETS]


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that an op runs on."""
    return torch.device(request.param)


@pytest.fixture
def cuda() -> torch.device:
    """The GPU, for features that exist only there."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


@pytest.fixture
def few(request: pytest.FixtureRequest) -> Callable[[list, int], list]:
    """Take the first of an op's samples and others at equal distances, so many in all; with ``--full``, all.

    For tests of what is done around a kernel, which samples that differ in sizes and formats share.
    """
    is_full = request.config.getoption("--full")

    def taken(samples: list, count: int) -> list:
        step = 1 if is_full else max(1, -(-len(samples) // count))
        return samples[::step]

    return taken


@pytest.fixture(autouse=True, scope="session")
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory):
    """Keep what twins have shown out of the user's cache, where a run would find what an earlier one has kept."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # processes that share the tests share what one of them has recorded
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_FASTPATH_CACHE", str(folder / "cache"))
        yield


@pytest.fixture(autouse=True, scope="session")
def small_buffers():
    """Let bandwidths on a CPU be measured with a sixteenth of the memory: no test asks how large a bandwidth is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandwidth, "CPU_BYTES", bandwidth.CPU_BYTES // 16)
        yield


@pytest.fixture(autouse=True, scope="session")
def few_collections():
    """Collect garbage more rarely than Python does by itself, whose collections were a twelfth of the tests' time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(20_000, 20, 100)
    yield
    gc.set_threshold(*thresholds)


@pytest.fixture(autouse=True, scope="module")
def collected(few_collections):
    """Collect the garbage of a file's tests, and let no later collection look at what has stayed: modules, the tests
    themselves, caches. A test that asks who refers to an object takes this back with ``gc.unfreeze()``."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def repeatable(request: pytest.FixtureRequest):
    """Give the same random numbers whatever ran before, and leave no trace of a test in the next one's globals."""
    threads = torch.get_num_threads()
    torch.manual_seed(1729)
    logs.given.clear()
    if request.path.parent.name in ("ecosystem", "generation", "passes", "patches", "public", "recording"):
        torch.set_num_threads(1)  # for tiny models, handing a microsecond of work to a pool takes longer than the work
    yield
    torch.set_num_threads(threads)


#: files whose tests have prompts of recorded models read by lists of calls, each of which takes as long as many tests
READ_BY_LISTS = (
    *(
        "test_recorded_prompts.py",
        "test_token_rows.py",
        "test_recorded_once.py",
        "test_short_prompts.py",
        "test_ways.py",
    ),
    "test_all_types.py",
)


@pytest.fixture(autouse=True)
def prompts_of_recorded_models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Elsewhere than in these files, and without ``--full``, modules read the prompts of recorded models."""
    if request.path.name not in READ_BY_LISTS and not request.config.getoption("--full"):
        monkeypatch.setattr(prompts, "FIRST_RECORDED", sys.maxsize)


#: files whose tests are about twins, or about code that a twin may refuse
TRIED_BY_TWINS = (
    *("test_every_architecture.py", "test_foreign_code.py", "test_foreign_reasons.py"),
    *("test_habits.py", "test_packed_faults.py", "test_passed_twins.py", "test_patch.py", "test_proof.py"),
    *("test_structural.py", "test_twins.py", "test_verify_foreign.py", "test_versions.py"),
)


@pytest.fixture(autouse=True, scope="module")
def twins_of_recorded_models(request: pytest.FixtureRequest):
    """Elsewhere than in these files, and without ``--full``, a twin counts as one that has passed, as it does wherever
    its note is found: a twin takes longer than a small model, whose own tokens the tests compare with stock's."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in TRIED_BY_TWINS and not request.config.getoption("--full"):
            patch.setattr(selftest, "run", lambda model, recorded=None: (None, 0.0))
        yield


@pytest.fixture(autouse=True, scope="module")
def weights_of_samples(request: pytest.FixtureRequest):
    """The tests of ops make thousands of weights."""
    with first_scales() if request.path.parent.name == "ops" else nullcontext():
        yield


#: columns of the golden matrix that name a case; the others hold what was measured
GOLDEN_KEY = ("architecture", "device", "dtype", "case")
GOLDEN_COLUMNS = (*GOLDEN_KEY, "error", "stock_error", "positions", "hardware", "torch", "transformers")


@pytest.fixture(scope="session")
def golden_figures(request: pytest.FixtureRequest):
    """Collect the figures of each golden case; ``--record-golden`` writes them down."""
    rows: list[dict] = []

    def take(architecture: str, device: torch.device, dtype: torch.dtype, case: str, *figures) -> None:
        on_gpu = device.type == "cuda"
        hardware = torch.cuda.get_device_name(device) if on_gpu else torch.backends.cpu.get_cpu_capability()
        error, stock_error, positions = figures
        names = (architecture, device.type, str(dtype).removeprefix("torch."), case)
        versions = (hardware, torch.__version__, transformers.__version__)
        values = (*names, f"{error:.2e}", f"{stock_error:.2e}", positions, *versions)
        rows.append(dict(zip(GOLDEN_COLUMNS, values)))

    yield take
    if (path := request.config.getoption("--record-golden")) is not None:
        merge_golden(Path(path), rows)


def merge_golden(path: Path, rows: list[dict]) -> None:
    """Put ``rows`` into the file, in place of the rows of the same cases."""
    known = list(csv.DictReader(path.open(newline=""))) if path.is_file() else []
    by_case = {tuple(row[name] for name in GOLDEN_KEY): row for row in (*known, *rows)}
    dtypes = [str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES]
    merged = sorted(by_case.values(), key=lambda r: (r["architecture"], r["device"], dtypes.index(r["dtype"])))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, GOLDEN_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged)


@pytest.fixture
def one_process(tmp_path):
    """Make a process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
