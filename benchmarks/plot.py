"""Draw the plots of ``docs/plots`` from the CSV files of ``benchmarks/data``.

    python benchmarks/plot.py [--data benchmarks/data] [--output docs/plots]

``speed.svg``, the picture of the README, is drawn from the rows that PANELS names. ``generate_<device>.csv`` gives
``decode_<device>.svg``: tokens a second of each engine, beside the limit that the read bandwidth sets, for all work
that several engines did. ``ops_<device>.csv`` gives ``ops_<device>.svg``: per cent of R of each op. If a file has
several rows of one measurement, the last one counts. ``trace_step_<device>.csv`` gives ``stages_<device>.svg``: the
time of each part of a layer, beside what its bytes take at R.
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
matplotlib.rcParams["svg.hashsalt"] = "hf_fastpath"  # makes element ids the same in every run
matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text, which takes a third of the size
from matplotlib import pyplot  # noqa: E402  (after the backend is chosen)

PLOT_DIR = DATA_DIR.parent.parent / "docs" / "plots"
#: width of every picture: it fits a page of GitHub, whose text is about 900 pixels wide; 1 pt is 4/3 pixels
WIDTH_PT = 640
OURS_COLOR, STOCK_COLOR, OTHER_COLOR, LIMIT_COLOR = "#d9541e", "#9aa5b1", "#6f9a6b", "#1a1a1a"
#: engine -> its name beside the bar, the color of its kind
ENGINES = {
    "stock": ("transformers", STOCK_COLOR),
    "static": ("transformers, static cache, compiled", STOCK_COLOR),
    "llama.cpp": ("llama.cpp", OTHER_COLOR),
    "gpt-fast": ("PyTorch by hand, compiled (as gpt-fast)", OTHER_COLOR),
    "ours": ("hf_fastpath", OURS_COLOR),
}
#: color -> what it stands for in the legend
KINDS = {STOCK_COLOR: "transformers", OTHER_COLOR: "other programs", OURS_COLOR: "hf_fastpath"}
#: the README's picture: device, model, dtype, context of rows with batch 1 -> heading
PANELS = {
    ("NVIDIA H200", "Mistral-7B", "fp16", "128"): "NVIDIA H200: Mistral-7B, fp16",
    ("NVIDIA H200", "Mistral-7B int4_g32", "fp16", "128"): "NVIDIA H200: Mistral-7B, 4-bit weights",
    ("NVIDIA H100 80GB HBM3", "Mistral-7B", "fp16", "128"): "NVIDIA H100: Mistral-7B, fp16",
    (
        "Intel(R) Xeon(R) Processor, 2 threads",
        "TinyLlama-1.1B",
        "fp16",
        "32",
    ): "2 CPU cores (Xeon): TinyLlama-1.1B, fp16",
}
#: pictures of decoding need rows that decoded at least so many tokens
MIN_NEW_TOKENS = 16
#: files with the rows of these panels
SPEED_FILES = ("generate_h200.csv", "generate_cpu.csv", "peers.csv")
#: a layer's kernels in the order of a trace, from attention to the next layer's projections, with colors
STAGES = {
    "attention": "#e8b04a",
    "output projection": "#9bb8d3",
    "up (and gate)": "#d9541e",
    "down": "#e98b5f",
    "projections of the next layer": "#6f9a6b",
}


def _rows(path: Path, key: Sequence[str]) -> list[dict[str, str]]:
    """Return the last row of every combination of the columns ``key``, in order of first appearance."""
    with path.open(newline="") as handle:
        latest = {tuple(row[name] for name in key): row for row in csv.DictReader(handle)}
    return list(latest.values())


def _short(number: str) -> str:
    """Write a number with three digits, or with all digits before the point if there are more."""
    return f"{float(number):.0f}" if float(number) >= 100 else f"{float(number):.3g}"


def _save(figure, path: Path, bbox: str | None = "tight") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # The file gets no date, so that the same data gives the same bytes.
    figure.savefig(path, bbox_inches=bbox, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _draw_shares(panels: dict[str, list[dict[str, str]]], target: Path, where_measured: str = "") -> Path:
    """Draw bars below a heading for each piece of work: how much of the limit each engine reached, and tokens a second.

    Bars are shares of the limit, so that models of all sizes fit one scale, and no bar hides behind another.
    """
    headings, bars, place = [], [], 0.0
    for heading, rows in panels.items():
        headings.append((place, heading, max(float(row["limit_tok_s"]) for row in rows)))
        order = list(ENGINES)
        for row in sorted(rows, key=lambda row: order.index(row["engine"])):
            place += 1
            bars.append((place, *ENGINES[row["engine"]], float(row["decode_tok_s"]), float(row["limit_tok_s"])))
        place += 1.6
    row_inches, margins = 0.24, 1.1
    height = row_inches * (place + 0.2) + margins
    figure = pyplot.figure(figsize=(WIDTH_PT / 72, height))
    axes = figure.add_axes((0.33, 0.73 / height, 0.56, 1 - margins / height))
    for at, _, color, speed, limit in bars:
        share = 100 * speed / limit
        axes.barh(at, share, 0.76, color=color)
        # The text stands beside a short bar and inside a long bar, so that it never crosses the line of the limit.
        inside = share > 60
        text = f"{_short(str(speed))} tok/s, {share:.0f} %"
        where = dict(ha="right", color="white") if inside else dict(ha="left")
        axes.text(share - 1 if inside else share + 1, at, text, va="center", fontsize=9, **where)
    for at, heading, limit in headings:
        axes.text(-0.57, at, heading, transform=axes.get_yaxis_transform(), va="center", fontsize=10, weight="bold")
        axes.text(100, at, f"{_short(str(limit))} tok/s", ha="center", va="center", fontsize=9, backgroundcolor="white")
    axes.axvline(100, color=LIMIT_COLOR, linewidth=1, linestyle="--", zorder=0)
    axes.set_yticks([at for at, *_ in bars], [name for _, name, *_ in bars], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(place - 0.8, -0.8)
    axes.set_xlim(0, 112)
    axes.set_xticks(range(0, 101, 20), [f"{share} %" for share in range(0, 101, 20)], fontsize=9)
    explained = "share of what the memory bus allows: R, its read bandwidth, over the bytes a token reads"
    axes.set_xlabel(f"{explained}\n{where_measured}".strip(), size=9)
    axes.xaxis.set_label_coords(0.22, -0.38 / (height - margins))
    axes.spines[["top", "right", "left"]].set_visible(False)
    colors = {color for _, _, color, *_ in bars}
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color, label=KINDS[color]) for color in KINDS if color in colors]
    handles.append(pyplot.Line2D([], [], color=LIMIT_COLOR, linewidth=1, linestyle="--", label="the limit, tok/s"))
    figure.legend(handles=handles, loc="upper center", ncol=4, fontsize=9, frameon=False)
    return _save(figure, target, bbox=None)


def _kept(rows: Sequence[dict[str, str]], *columns: str) -> dict[tuple[str, ...], list[dict[str, str]]]:
    """Return the rows of engines that are drawn, the last row of each, by the values of ``columns``.

    Rows of fewer than MIN_NEW_TOKENS were made to time prompts: what they say about decoding is noise.
    """
    found: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in rows:
        if row["engine"] in ENGINES and int(row.get("new_tokens") or MIN_NEW_TOKENS) >= MIN_NEW_TOKENS:
            found.setdefault(tuple(row[name] for name in columns), {})[row["engine"]] = row
    return {key: list(engines.values()) for key, engines in found.items()}


def plot_speed(data: Path, target: Path) -> Path:
    """Draw the README's picture: stock, other programs and ours on the work that PANELS names.

    Raises:
        ValueError: a panel has no row of ours, or no other row to compare with.
    """
    rows = []
    for name in SPEED_FILES:
        with (data / name).open(newline="") as handle:
            rows += [row for row in csv.DictReader(handle) if row["batch"] == "1"]
    found = _kept(rows, "device", "model", "dtype", "context")
    for panel in PANELS:
        engines = {row["engine"] for row in found.get(panel, ())}
        if "ours" not in engines or len(engines) < 2:
            raise ValueError(f"{', '.join(panel)}: found rows of {sorted(engines)}, expected ours and another engine")
    return _draw_shares({heading: found[panel] for panel, heading in PANELS.items()}, target)


def plot_decode(source: Path, target: Path) -> Path:
    """Draw the work of one device that several engines did."""
    with source.open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    panels = {}
    for (model, dtype, context, batch), engines in _kept(rows, "model", "dtype", "context", "batch").items():
        if len(engines) > 1:
            beside = "" if batch == "1" else f", batch {batch}"
            panels[f"{model}, {dtype}, context {context}{beside}"] = engines
    return _draw_shares(panels, target, rows[-1]["device"])


def plot_ops(source: Path, target: Path) -> Path:
    """Draw a horizontal bar for each call, per cent of R, with a tick for the best of PyTorch's ways."""
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
    """Return the bytes that a layer's kernels have to read, in the order of ``STAGES``."""
    hidden = config.hidden_size
    width, kv_width, inner = traffic.layer_widths(config)
    ups = 1 if config.model_type == "gpt2" else 2
    weights = (width * hidden, ups * hidden * inner, inner * hidden, hidden * (width + 2 * kv_width))
    kv = traffic.kv_bytes(config, context, dtype, batch) // config.num_hidden_layers
    return [kv, *(dtype.itemsize * count for count in weights)]


def plot_stages(source: Path, target: Path) -> Path:
    """Draw two bars for each traced step: a layer's kernels as measured, and their bytes at R."""
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


#: start of a CSV's name -> function that draws it, start of the plot's name
PLOTS = {"generate": (plot_decode, "decode"), "ops": (plot_ops, "ops"), "trace_step": (plot_stages, "stages")}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA_DIR)
    parser.add_argument("--output", type=Path, default=PLOT_DIR)
    arguments = parser.parse_args(argv)
    print(plot_speed(arguments.data, arguments.output / "speed.svg"))
    for kind, (plot, name) in PLOTS.items():
        for source in sorted(arguments.data.glob(f"{kind}_*.csv")):
            device = source.stem.removeprefix(f"{kind}_")
            print(plot(source, arguments.output / f"{name}_{device}.svg"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
