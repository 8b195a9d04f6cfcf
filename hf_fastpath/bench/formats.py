"""Benchmark of formats: how close a product of one row with a quantized weight comes to the read bandwidth.

    hf-fastpath bench gemv --format q4_0 q4_k q8_0 int8 --layers 32

A format is one of ours (``packed_formats.py``) or a type of blocks of GGUF files, which stands for the format of ours
that holds its values. The products are those of a Llama's MLP: gate and up (4096 features to 16384) and down (16384 to
4096). There are as many distinct layers as ``--layers`` says, one after the other, so that no cache holds what the next
pass reads.

Method. Weights are random bytes, on a CPU in pages of 2 MB. A pass is one call for each product; on CUDA the calls of a
pass are in one CUDA graph, whose replay is timed, on a CPU the calls themselves are timed. ms/token is the median time
of a pass; GB/s is the bytes of quants, scales and zeros divided by it; % of R is the share of the read bandwidth that
was measured in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import arguments, ops
from ..bandwidth import measure_read_bandwidth
from ..choices import PackedFormat
from ..native import loader
from ..native.huge_pages import ask_for
from ..progress import counted
from ..quantization import FORMATS
from ..quantization.formats import Format, padded, scale_bits
from ..quantization.ggml_blocks import BLOCK_TYPES
from ..tables import table
from . import measure
from .measure import DTYPES

#: what ``--format`` takes -> the format that holds such weights
CHOICES = {**FORMATS, **{kind.name.lower(): FORMATS[kind.format] for kind in BLOCK_TYPES.values()}}
#: bytes that are drawn at random; weights repeat them, because drawing gigabytes takes longer than reading them
_PATTERN_BYTES = 1 << 24


@dataclass(frozen=True)
class Study:
    """What is measured: a name of :data:`CHOICES`, number of layers, features of the model and inside its MLP."""

    format: str
    layers: int
    hidden: int
    inner: int

    def shapes(self) -> list[tuple[int, int]]:
        """Return (out_features, in_features) of every product of a pass."""
        return [(self.inner, self.hidden), (self.inner, self.hidden), (self.hidden, self.inner)] * self.layers


def _random_bytes(device: torch.device, *shape: int, below: int = 256) -> torch.Tensor:
    out = torch.empty(shape, dtype=torch.uint8, device=device)
    ask_for(out)
    pattern = torch.randint(below, (min(_PATTERN_BYTES, out.numel()),), dtype=torch.uint8, device=device)
    for piece in out.view(-1).split(_PATTERN_BYTES):
        piece.copy_(pattern[: piece.numel()])
    return out


def _random_scales(device: torch.device, *shape: int) -> torch.Tensor:
    """Make float16 scales of about 1 / 256."""
    return (_random_bytes(device, *shape).half() + 128) / 2**16


def weight(format: Format, rows: int, columns: int, device: torch.device) -> tuple:
    """Make a random weight, as ``packed_gemv`` takes it after x."""
    groups = rows, format.groups(columns)
    quants = _random_bytes(device, rows, padded(columns) * format.bits // 8, below=format.finite_bytes)
    zeros = _random_bytes(device, *groups, below=16) if format.has_zeros else None
    scales = scale_bits(format, _random_scales(device, *groups).float())
    return quants, scales, zeros, 1.0, PackedFormat(format.number)


def measured(study: Study, device: torch.device, dtype: torch.dtype, rounds: int, bandwidth: float) -> dict:
    """Return one row: the time of a pass over all layers, and its speed."""
    format, op = CHOICES[study.format], ops.packed_gemv.overload
    inputs = {size: torch.randn(1, size, device=device, dtype=dtype) for size in (study.hidden, study.inner)}
    calls = [(inputs[k], *weight(format, n, k, device)) for n, k in study.shapes()]
    num_bytes = sum(part.nbytes for _, *parts in calls for part in parts if isinstance(part, torch.Tensor))

    def one_pass() -> list[torch.Tensor]:
        return [op(*call) for call in calls]

    with torch.inference_mode():
        timer: Callable[[], float]
        if device.type == "cuda":
            timer = measure.graph_timer(one_pass, device)
        else:
            timer = functools.partial(measure.seconds, one_pass, device)
            timer()
        spread = measure.Spread.of([timer() for _ in range(rounds)])
    return {
        **measure.environment(device),
        "format": study.format,
        "packed_format": format.name,
        "layers": study.layers,
        "hidden": study.hidden,
        "inner": study.inner,
        "dtype": measure.DTYPE_NAMES[dtype],
        "weight_bytes": num_bytes,
        "ms_per_token": round(1e3 * spread.p50, 4),
        "spread_percent": spread.percent,
        "gb_s": round(num_bytes / spread.p50 / 1e9, 1),
        "percent_of_r": round(100 * num_bytes / spread.p50 / bandwidth, 1),
        "r_gb_s": round(bandwidth / 1e9, 1),
    }


def _shown(rows: Sequence[dict]) -> str:
    columns = ("format", "packed as", "GB", "ms/token", "GB/s", "% of R", "R, GB/s")
    cells = [
        (
            *(row["format"], row["packed_format"], f"{row['weight_bytes'] / 1e9:.2f}"),
            *(f"{row['ms_per_token']:.4f}{measure.plus_minus(row['spread_percent'], 1)}", f"{row['gb_s']:.1f}"),
            *(f"{row['percent_of_r']:.1f}", f"{row['r_gb_s']:.1f}"),
        )
        for row in rows
    ]
    return table(columns, cells, left=("format", "packed as"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="hf-fastpath bench gemv", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--format", nargs="+", default=("q4_0",), choices=CHOICES, metavar="FORMAT", help=", ".join(CHOICES)
    )
    parser.add_argument("--layers", type=arguments.count, default=32)
    parser.add_argument("--hidden", type=arguments.count, default=4096)
    parser.add_argument("--inner", type=arguments.count, default=16384)
    parser.add_argument("--dtype", default="fp16", choices=list(DTYPES), help="of x")
    parser.add_argument("--rounds", type=arguments.count, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=arguments.device)
    measure.add_csv_argument(parser)
    measure.add_json_argument(parser)
    given = parser.parse_args(argv)
    device = torch.device(given.device)
    status = loader.ensure(device.type)
    path = measure.chosen_csv(given.csv, "formats", device)
    rows = []
    with counted(len(given.format), "formats") as bar:
        for name in given.format:
            bar.set_description_str(name, refresh=False)
            study = Study(name, given.layers, given.hidden, given.inner)
            bandwidth = measure_read_bandwidth(device)
            rows.append(measured(study, device, DTYPES[given.dtype], given.rounds, bandwidth))
            if path:
                measure.append_csv(path, rows[-1:])
            bar.update()
    print(json.dumps(rows, indent=1) if given.json else f"{status}\n{_shown(rows)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
