"""Shared by the benchmarks: clocks, medians with spread, the description of the machine, CSV rows."""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import nn

import hf_fastpath
from hf_fastpath.patching.state import state_of

_ROOT = Path(__file__).resolve().parents[2]
IS_CHECKOUT = (_ROOT / "benchmarks" / "bench_generate.py").is_file()
#: where CSV files go; an installed package has no folder for them, so they go to the working directory
DATA_DIR = _ROOT / "benchmarks" / "data" if IS_CHECKOUT else Path()


@dataclass(frozen=True)
class Spread:
    """Median of timings with the 20th and 80th percentile, in their unit; one timing alone has no percentiles."""

    p50: float
    p20: float | None
    p80: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Compute the spread of at least one value; percentiles are interpolated."""
        if len(values) == 1:
            return cls(values[0], None, None)
        fifths = statistics.quantiles(values, n=5, method="inclusive")
        return cls(statistics.median(values), fifths[0], fifths[-1])

    @property
    def percent(self) -> float | None:
        """Half the distance between the percentiles, in per cent of the median, with one decimal; None without any."""
        if self.p20 is None or self.p80 is None:
            return None
        return round(50 * (self.p80 - self.p20) / self.p50, 1) if self.p50 else 0.0


def plus_minus(percent: float | None, decimals: int = 0) -> str:
    """Return what tables show of :attr:`Spread.percent` behind a value: nothing if there is no spread."""
    return "" if percent is None else f" ±{percent:.{decimals}f}%"


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wait_for_pages(model: nn.Module) -> None:
    """Wait until ``patch()`` has moved a model's weights into huge pages, which change the speed of what follows."""
    state = state_of(model)
    if state is not None and state.huge_pages is not None:
        state.huge_pages.wait()


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the wall-clock time of one call, with the device's work."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


#: tokens of a short generation, whose time is taken off that of a long one
SHORT = 8


def seconds_per_token(call: Callable[[int], object], tokens: int, device: torch.device) -> float:
    """Return the seconds in which ``call(count)`` makes one of ``tokens``, without those of the prompt."""
    short = seconds(lambda: call(SHORT), device)
    return (seconds(lambda: call(SHORT + tokens), device) - short) / tokens


def alternate(timers: dict[str, Callable[[], float]], rounds: int) -> dict[str, Spread]:
    """Run every timer once in each round, every second round in reverse order, so that drift affects all alike."""
    values: dict[str, list[float]] = {name: [] for name in timers}
    for turn in range(rounds):
        for name in list(timers) if turn % 2 == 0 else reversed(list(timers)):
            values[name].append(timers[name]())
    return {name: Spread.of(found) for name, found in values.items()}


def graph_timer(step: Callable[[], object], device: torch.device, calls: int = 1) -> Callable[[], float]:
    """Capture ``step`` in a CUDA graph; return a function that replays it and gives the seconds of one of ``calls``."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):  # libraries choose algorithms and allocate workspaces before the capture
            step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    graph.replay()
    torch.cuda.synchronize(device)

    def replay() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # keeps the GPU busy while the host queues the replay that is timed
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / calls

    replay.kept = step, kept  # what the graph reads and writes lives as long as it does
    return replay


def device_name(device: torch.device) -> str:
    """Return the marketing name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {torch.get_num_threads()} threads"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _commit() -> str:
    if not IS_CHECKOUT:
        return ""  # an installed package may lie inside a repository of its user's
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return ""
    return result.stdout.strip()


def environment(device: torch.device) -> dict[str, str]:
    """Return the columns with which every CSV row begins."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": device_name(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_fastpath": getattr(hf_fastpath, "__version__", ""),
        "commit": _commit(),
    }


def append_csv(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Append ``rows``; a new file gets a header.

    Raises:
        ValueError: the file has other columns and has to be moved away first.
    """
    if not rows:
        return
    columns = list(rows[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    if not new:
        with path.open(newline="") as handle:
            found = next(csv.reader(handle), [])
        if found != columns:
            raise ValueError(f"{path} has the columns {found}, expected {columns}: move it away")
    with path.open("a", newline="") as handle:
        writer = csv.DictWriter(handle, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def csv_path(kind: str, device: torch.device) -> Path:
    """Return ``<kind>_<device>.csv`` in DATA_DIR, the device as a word: ``ops_h200.csv``, ``generate_cpu.csv``."""
    if device.type == "cpu":
        return DATA_DIR / f"{kind}_cpu.csv"
    words = torch.cuda.get_device_name(device).replace("NVIDIA", "").replace("GeForce", "").split()
    return DATA_DIR / f"{kind}_{'_'.join(words).lower()}.csv"


def add_csv_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--csv [PATH]``, as :func:`chosen_csv` takes it."""
    parser.add_argument("--csv", nargs="?", const="", help=f"append the rows; without a path to a file in {DATA_DIR}")


def parser_of(file: str, about: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser of what a benchmark of whole calls takes: rounds, a device and :func:`add_csv_argument`."""
    how = dict(prog=Path(file).name, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(**how)  # type: ignore[arg-type]
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--device", default="cpu")
    add_csv_argument(parser)
    return parser


def print_groups(
    groups: Iterable[list[dict]], text: Callable[[list[dict]], str], given: argparse.Namespace, kind: str
) -> None:
    """Print groups of rows as they are measured, and append them to where ``--csv`` wants them.

    Args:
        text: gives what is printed of a group.
        given: arguments of :func:`parser_of`.
        kind: as for :func:`csv_path`.
    """
    device = torch.device(given.device)
    path = chosen_csv(given.csv, kind, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in groups:
            print(text(rows), flush=True)
            if path is not None:
                append_csv(path, [environment(device) | row for row in rows])


def milliseconds(call: Callable[[], object]) -> float:
    """Return how long a call takes, which waits for its device itself."""
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1000


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``: the rows as data, and nothing else on stdout."""
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, with the columns of the CSV")


def no_echo(text: str, flush: bool = False) -> None:
    """Print nothing, if stdout is for data."""


def chosen_csv(argument: str | None, kind: str, device: torch.device) -> Path | None:
    """Return where ``--csv`` wants the rows: None without it, :func:`csv_path` without a path."""
    if argument is None:
        return None
    return Path(argument) if argument else csv_path(kind, device)


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
