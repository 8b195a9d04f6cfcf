"""Draws the plots of ``docs/plots`` from the CSV files of ``benchmarks/data``.

    python benchmarks/plot.py [--data benchmarks/data] [--output docs/plots]

``generate_<device>.csv`` gives ``decode_<device>.svg``: tokens a second of each engine, beside the limit that
the read bandwidth sets. ``ops_<device>.csv`` gives ``ops_<device>.svg``: per cent of R of each op. Where a
file has several rows of one measurement, the last one counts. ``trace_step_<device>.csv`` gives
``stages_<device>.svg``: where a layer's time goes, beside what its bytes take at R.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch

from hf_fastpath import traffic
from hf_fastpath.bench import shapes
from hf_fastpath.bench.measure import DATA_DIR, DTYPES

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (after the backend is chosen)

PLOT_DIR = DATA_DIR.parent.parent / "docs" / "plots"
#: engine -> name in the legend, color; ours stands out
ENGINES = {
    "stock": ("transformers", "#b0b7bf"),
    "static": ("transformers, static cache + compile", "#6f7d8c"),
    "llama.cpp": ("llama.cpp", "#6f9a6b"),
    "ours": ("hf_fastpath", "#d9541e"),
}
#: a layer's kernels in the order of a trace, from attention to the next layer's projections; colors
STAGES = {
    "attention": "#e8b04a",
    "output projection": "#9bb8d3",
    "up (and gate)": "#d9541e",
    "down": "#e98b5f",
    "projections of the next layer": "#6f9a6b",
}
LIMIT_COLOR, OURS_COLOR, OTHER_COLOR = "#1a1a1a", "#d9541e", "#8a97a5"


def _rows(path: Path, key: Sequence[str]) -> list[dict[str, str]]:
    """The last row of every combination of the columns ``key``, in order of first appearance."""
    with path.open(newline="") as handle:
        latest = {tuple(row[name] for name in key): row for row in csv.DictReader(handle)}
    return list(latest.values())


def _short(number: str) -> str:
    """Three digits, or all of them before the point."""
    return f"{float(number):.0f}" if float(number) >= 100 else f"{float(number):.3g}"


def _save(figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date in the file: the same data gives the same bytes.
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return path


def plot_decode(source: Path, target: Path) -> Path:
    """Grouped bars: a group a model, dtype, context and batch; a bar an engine; a line at the limit."""
    rows = _rows(source, ("model", "dtype", "context", "batch", "engine"))
    groups: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        batch = f", batch {row['batch']}" if row["batch"] != "1" else ""
        label = f"{row['model']}\n{row['dtype']}, {row['context']}{batch}"
        groups.setdefault(label, {})[row["engine"]] = row
    drawn = {engine: look for engine, look in ENGINES.items() if any(engine in found for found in groups.values())}
    width = 0.8 / max(3, len(drawn))
    figure, axes = pyplot.subplots(figsize=(max(6.0, 2.5 + 1.5 * len(groups)), 3.6))
    for number, (engine, (name, color)) in enumerate(drawn.items()):
        seen = [(at, found[engine]) for at, found in enumerate(groups.values()) if engine in found]
        places = [at + (number - (len(drawn) - 1) / 2) * width for at, _ in seen]
        # Share of the limit, so that models of all sizes fit one scale; the bar says the tokens a second.
        shares = [100 * float(row["decode_tok_s"]) / float(row["limit_tok_s"]) for _, row in seen]
        bars = axes.bar(places, shares, width * 0.94, color=color, label=name)
        axes.bar_label(bars, [_short(row["decode_tok_s"]) for _, row in seen], fontsize=7, padding=1)
    axes.axhline(100, color=LIMIT_COLOR, linewidth=1, linestyle="--", label="limit: bytes a token at R")
    for at, found in enumerate(groups.values()):
        limit = next(iter(found.values()))["limit_tok_s"]
        axes.text(at, 101, _short(limit), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axes.set_ylabel("decode, % of the limit\n(labels: tokens/s)")
    axes.set_ylim(0, 132)
    axes.set_title(f"{rows[-1]['device']}, R = {float(rows[-1]['r_gb_s']):.0f} GB/s", fontsize=9)
    axes.legend(fontsize=7, ncol=2, loc="upper center", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return _save(figure, target)


def plot_ops(source: Path, target: Path) -> Path:
    """Horizontal bars: a bar a call, per cent of R, with a tick where the best of PyTorch's ways is."""
    rows = _rows(source, ("op", "call", "dtype", "implementation"))
    rows = [row for row in rows if row["cached"] == "False" and row["implementation"] != "copy"]
    calls: dict[str, dict[str, float]] = {}
    for row in rows:
        label = f"{row['op']}: {row['call']}, {row['dtype']}"
        calls.setdefault(label, {})[row["implementation"]] = float(row["percent_of_r"])
    calls = {label: found for label, found in calls.items() if "hf_fastpath" in found}
    figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.2 * len(calls)))
    places = range(len(calls))
    axes.barh(places, [found["hf_fastpath"] for found in calls.values()], 0.7, color=OURS_COLOR, label="hf_fastpath")
    best = [
        (at, max(share for name, share in found.items() if name != "hf_fastpath"))
        for at, found in enumerate(calls.values())
        if len(found) > 1
    ]
    axes.scatter(
        [share for _, share in best],
        [at for at, _ in best],
        marker="|",
        s=60,
        color=LIMIT_COLOR,
        label="best of torch",
    )
    axes.axvline(100, color=LIMIT_COLOR, linewidth=1, linestyle="--")
    axes.set_yticks(places, list(calls), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 110)
    axes.set_xlabel("% of R")
    axes.set_title(f"{rows[-1]['device']}, R = {float(rows[-1]['r_gb_s']):.0f} GB/s", fontsize=9)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.25 / (0.3 + 0.05 * len(calls))), ncol=2)
    axes.spines[["top", "right"]].set_visible(False)
    return _save(figure, target)


def stage_bytes(config, context: int, batch: int, dtype: torch.dtype) -> list[int]:
    """Bytes a layer's kernels have to read, in the order of ``STAGES``."""
    hidden = config.hidden_size
    width, kv_width, inner = traffic.layer_widths(config)
    ups = 1 if config.model_type == "gpt2" else 2
    weights = (width * hidden, ups * hidden * inner, inner * hidden, hidden * (width + 2 * kv_width))
    kv = traffic.kv_bytes(config, context, dtype, batch) // config.num_hidden_layers
    return [kv, *(dtype.itemsize * count for count in weights)]


def plot_stages(source: Path, target: Path) -> Path:
    """Two bars a traced step: a layer's kernels as measured, and their bytes at R."""
    keys = ("model", "dtype", "context", "batch")
    rows = [row for row in _rows(source, (*keys, "kernel")) if row["kernel"].startswith("layer.")]
    steps: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        steps.setdefault(tuple(row[key] for key in keys), []).append(row)
    height = 1.0 + 0.75 * len(steps)
    figure, axes = pyplot.subplots(figsize=(7, height))
    ticks = []
    for number, ((model, dtype, context, batch), kernels) in enumerate(steps.items()):
        config = shapes.shape(model).build_config()
        sizes = stage_bytes(config, int(context), int(batch), DTYPES[dtype])
        measured = [float(row["adds"]) for row in sorted(kernels, key=lambda row: row["kernel"])]
        at_limit = [size / float(kernels[0]["r_gb_s"]) / 1e3 for size in sizes]
        label = f"{shapes.shape(model).label} {dtype}, {context}"
        for place, name, times in ((number - 0.19, label, measured), (number + 0.19, "bytes at R", at_limit)):
            ticks.append((place, name))
            left = 0.0
            for time, color in zip(times, STAGES.values()):
                share = time / sum(measured) * 100
                axes.barh(place, share, 0.34, left=left, color=color)
                if share > 3.5:
                    axes.text(left + share / 2, place, f"{time:.1f}", ha="center", va="center", fontsize=7)
                left += share
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 102)
    axes.set_xlabel("% of a layer's time (labels: microseconds)", fontsize=8)
    axes.set_title(f"{rows[-1]['device']}: where a layer's time goes", fontsize=9)
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in STAGES.values()]
    axes.legend(patches, list(STAGES), fontsize=7, ncol=5, loc="upper center", bbox_to_anchor=(0.45, -0.55 / height))
    axes.spines[["top", "right"]].set_visible(False)
    return _save(figure, target)


#: start of a CSV's name -> what draws it, start of the plot's name
PLOTS = {"generate": (plot_decode, "decode"), "ops": (plot_ops, "ops"), "trace_step": (plot_stages, "stages")}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA_DIR)
    parser.add_argument("--output", type=Path, default=PLOT_DIR)
    arguments = parser.parse_args(argv)
    matplotlib.rcParams["svg.hashsalt"] = "hf_fastpath"  # element ids that do not change from run to run
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: a third of the size
    for kind, (plot, name) in PLOTS.items():
        for source in sorted(arguments.data.glob(f"{kind}_*.csv")):
            device = source.stem.removeprefix(f"{kind}_")
            print(plot(source, arguments.output / f"{name}_{device}.svg"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
