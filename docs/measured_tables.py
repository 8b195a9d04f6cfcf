"""The tables of the docs that are made from the rows of ``benchmarks/data``."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hf_fastpath.check import several_gpus

DATA = Path(__file__).resolve().parent.parent / "benchmarks" / "data"


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, by the names of its columns."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of text."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))


#: layers and features of the models whose first tokens are compared, and lengths of their prompts
FIRST_TOKEN_SIZE, FIRST_TOKEN_PROMPTS = "16x1024", (1, 16, 128, 1024)


def first_tokens() -> str:
    """Return a table of the speed of a first token, stock's time by ours: a type a line."""
    found = rows_of(DATA / "first_token_h200.csv")
    rows = [row for row in found if row["size"] == FIRST_TOKEN_SIZE and row["lengths"] == "same"]
    newest = {(row["type"], int(row["prompt"])): row for row in rows}
    by_type: dict[str, dict[int, dict[str, str]]] = {}
    for (name, length), row in newest.items():
        by_type.setdefault(name, {})[length] = row
    complete = {name: of for name, of in sorted(by_type.items()) if set(FIRST_TOKEN_PROMPTS) <= set(of)}
    lines = [
        [f"`{name}`", *(f"{float(of[length]['speed']):.2f}" for length in FIRST_TOKEN_PROMPTS)]
        for name, of in complete.items()
    ]
    least = min(float(of[length]["speed"]) for of in complete.values() for length in FIRST_TOKEN_PROMPTS)
    one = rows[-1]
    told = f"{len(lines)} types; the least is {least:.2f}. {one['device']}, torch {one['torch']}, transformers"
    table = markdown_table(["type", *(f"{length:,} token{'s'[: length > 1]}" for length in FIRST_TOKEN_PROMPTS)], lines)
    return f"{table}\n\n{told} {one['transformers']}, {one['dtype']}, {one['date']}."


def published_first_tokens(file: str) -> str:
    """Return a table of first tokens of published models: a prompt a line, the newest row of each."""
    found = [row for row in rows_of(DATA / file) if row["size"] == "published"]
    newest = {(row["type"], int(row["batch"]), int(row["prompt"])): row for row in found}
    columns = ["model", "prompt", "stock, ms", "ours, ms", "times faster", "patch() and first call, s"]
    lines = []
    for (name, batch, length), row in sorted(newest.items()):
        once = (float(row["patch_ms"]) + float(row["first_ms"])) / 1000
        times = [f"{float(row[key]):,.1f}" for key in ("stock_ms", "ours_ms")]
        prompt = f"{length:,}" if batch == 1 else f"{batch} x {length:,}"
        lines.append([name, prompt, *times, f"{float(row['speed']):.2f}", f"{once:.1f}"])
    one = found[-1]
    told = f"{one['device']}, torch {one['torch']}, transformers {one['transformers']}, {one['dtype']}, {one['date']}."
    return f"{markdown_table(columns, lines)}\n\n{told}"


#: sizes of Llamas whose calls by stock's loop are compared: column, file
FALLBACK_SIZES = {
    "2x128": ("CPU, 2x128", "fallbacks_cpu.csv"),
    "6x256": ("CPU, 6x256", "fallbacks_cpu.csv"),
    "12x512": ("CPU, 12x512", "fallbacks_cpu.csv"),
    "32x4096": ("GPU, 32x4096", "fallbacks_h200.csv"),
}


def fallbacks() -> str:
    """Return a table of the speed of calls that stock's loop or the user's runs: stock's time by ours, and in brackets
    by that of a second unpatched copy; the newest row of each."""
    newest: dict[tuple[str, str], str] = {}
    for size, (_, file) in FALLBACK_SIZES.items():
        for row in rows_of(DATA / file):
            if (row["model"], row["size"]) == ("llama", size) and row["copy"]:
                newest[row["way"], size] = f"{float(row['speed']):.2f} ({float(row['copy']):.2f})"
    ways = list(dict.fromkeys(way for way, _ in newest))
    lines = [[way, *(newest.get((way, size), "") for size in FALLBACK_SIZES)] for way in ways]
    return markdown_table(["way", *(column for column, _ in FALLBACK_SIZES.values())], lines)


@dataclass(frozen=True)
class Work:
    """A line of a machine's table: work for which a CSV of ``benchmarks/data`` has rows.

    Attributes:
        model, dtype, context, batch: columns of the CSV; its ``model`` ends with ``weights``, if there are any.
        kind: ``"decode"``; ``"prompt"``; ``"turn"``: ``tokens`` new ones behind ``context``; ``"pieces"``: all of
            ``context``, read ``tokens`` at a time.
        engine: the engine whose row counts as ours.
        tokens: see ``kind``.
        weights: the format of quantized weights.
    """

    model: str
    dtype: str
    context: int
    batch: int = 1
    kind: str = "decode"
    engine: str = "ours"
    tokens: int = 0
    weights: str = ""


@dataclass(frozen=True)
class Machine:
    """A table: the device's name in the CSV files, the files with its rows, and the rows that the table shows."""

    device: str
    files: tuple[str, ...]
    works: tuple[Work, ...] = field(repr=False)


MISTRAL, TINY, GPT2, LLAMA = "Mistral-7B", "TinyLlama-1.1B", "GPT-2 124M", "Llama-3.1-8B"
#: published sizes, and those of which the first layers fit 10 GiB
MODELS = (
    *("GLM-4-9B", "Gemma-2-2B", "Gemma-3-4B", "Command-R7B", "OLMo-2-7B"),
    *("Mixtral-8x7B, 20 layers", "gpt-oss-20b", "Qwen3-30B-A3B", "Qwen1.5-MoE-A2.7B"),
    *("Qwen3.5-4B", "Qwen3.5-35B-A3B", "Granite-4.0-H-Micro", "LFM2-1.2B", "Mamba2-2.7B", "DeepSeek-V2-Lite"),
    *("GLM-4.7-Flash", "ERNIE-4.5-21B-A3B"),
    *("XLM-RoBERTa-XL", "Gemma 4, default sizes"),
)
CUT_MODELS = (
    "Gemma-3-4B, 30 layers",
    "Gemma-2-2B",
    "GLM-4-9B, 14 layers",
    "Command-R7B, 10 layers",
    "OLMo-2-7B, 18 layers",
    "Mixtral-8x7B, 3 layers",
    "gpt-oss-20b, 4 layers",
    "Qwen3-30B-A3B, 6 layers",
    "Qwen3.5-4B, 28 layers",
    "LFM2-1.2B",
    "DeepSeek-V2-Lite, 7 layers",
    "Mamba2-2.7B",
    "Granite-4.0-H-Micro, 30 layers",
    "BlenderBot-3B",
    "XLM-RoBERTa-XL",
    "Qwen1.5-MoE-A2.7B, 7 layers",
)
INT8_HEAD = ("int8, int8 head", "int4_g32, int8 head")
MACHINES = {
    "NVIDIA H200": Machine(
        "NVIDIA H200",
        ("generate_h200.csv", "prompts_h200.csv", "peers.csv", "append_h200.csv"),
        (
            *(Work(MISTRAL, "fp16", context) for context in (128, 512, 4096, 32768)),
            Work(MISTRAL, "bf16", 128),
            *(Work(MISTRAL, "fp16", 128, batch) for batch in (2, 4, 8)),
            *(Work(MISTRAL, "fp16", 1024, batch) for batch in (16, 32, 64)),
            *(
                Work(MISTRAL, "fp16", context, engine=f"ours-{kv}-kv")
                for context in (128, 32768)
                for kv in ("int8", "fp8")
            ),
            *(Work(MISTRAL, "fp16", 128, weights=format) for format in ("int8", "fp8", "int4", "int4_g32")),
            *(Work(MISTRAL, "fp16", 4096, weights=format) for format in ("int8", "fp8", "int4_g32")),
            *(Work(MISTRAL, "fp16", 128, batch, weights="int4_g32") for batch in (4, 8, 16)),
            Work(MISTRAL, "fp16", 32768, engine="ours-int8-kv", weights="int4_g32"),
            Work(TINY, "bf16", 128),
            Work(GPT2, "fp16", 128),
            Work(GPT2, "fp32", 128),
            *(Work(MISTRAL, "fp16", context, kind="prompt") for context in (512, 4096, 32768)),
            *(Work(MISTRAL, "fp16", 4096, kind="prompt", weights=format) for format in ("int8", "int4_g32")),
            *(Work(LLAMA, "fp16", 16384, kind="pieces", tokens=tokens) for tokens in (16, 512, 16384)),
            Work(LLAMA, "fp16", 4096, kind="turn", tokens=8),
        ),
    ),
    "models on NVIDIA H100": Machine(
        "NVIDIA H100 80GB HBM3",
        ("peers.csv", "generate_h100.csv"),
        (
            Work(MISTRAL, "fp16", 128),
            *(Work(model, "bf16", 128) for model in MODELS),
            Work("BlenderBot-3B", "bf16", 64),  # which has 128 positions
        ),
    ),
    "models on AMD EPYC": Machine(
        "AMD EPYC, 2 threads", ("models_epyc.csv",), tuple(Work(model, "bf16", 32) for model in CUT_MODELS)
    ),
    "Intel Xeon": Machine(
        "Intel(R) Xeon(R) Processor, 2 threads",
        ("generate_cpu.csv", "prompts_cpu.csv", "append_cpu.csv"),
        (
            *(Work(TINY, "fp16", context) for context in (32, 2048, 8000)),
            Work(TINY, "bf16", 32),
            Work(TINY, "fp32", 32),
            *(Work(TINY, "fp16", 32, batch) for batch in (2, 4, 8)),
            Work(TINY, "bf16", 32, 8),
            *(Work(TINY, "fp16", 32, weights=format) for format in ("int8", "int4_g32", *INT8_HEAD)),
            Work(GPT2, "fp16", 32),
            Work(GPT2, "fp32", 32),
            *(Work(TINY, dtype, 512, kind="prompt") for dtype in ("fp16", "bf16", "fp32")),
            *(Work(TINY, dtype, 512, kind="turn", tokens=8) for dtype in ("fp16", "bf16", "fp32")),
        ),
    ),
    "AMD EPYC": Machine(
        "AMD EPYC, 2 threads",
        ("generate_epyc.csv",),
        (
            Work(TINY, "fp16", 32),
            Work(TINY, "fp16", 2048),
            Work(TINY, "bf16", 32),
            *(Work(TINY, "fp16", 32, batch) for batch in (4, 8)),
            *(Work(TINY, "fp16", 32, weights=format) for format in ("fp8", "int4_g32", INT8_HEAD[0])),
            Work(GPT2, "fp16", 32),
        ),
    ),
}
#: engines beside stock and ours -> their names in a table
OTHERS = {"static": "static", "flash": "flash", "llama.cpp": "llama.cpp", "gpt-fast": "as gpt-fast"}
#: rows with fewer decoded tokens say nothing about decoding
MIN_NEW_TOKENS = 12


def _rows_of(machine: Machine) -> list[dict[str, str]]:
    """Return the rows of a machine from all its files, in the order of their dates."""
    rows = []
    for name in machine.files:
        rows += [row | {"file": name} for row in rows_of(DATA / name) if row["device"] == machine.device]
    return sorted(rows, key=lambda row: row["date"])


def _speed(row: dict[str, str], work: Work) -> float | None:
    """Return the tokens a second of ``work`` in a row, or None if the row has other work."""
    model = f"{work.model} {work.weights}".strip()
    if (row["model"], row["dtype"], row["context"]) != (model, work.dtype, str(work.context)):
        return None
    of_new_tokens = row["file"].startswith("append")
    if of_new_tokens != (work.kind in ("turn", "pieces")):
        return None
    if of_new_tokens:
        same = row["way"] == "turn" and row["new_tokens"] == str(work.tokens) and not row["isa"]
        return float(row["tok_s"]) if same else None
    if row["batch"] != str(work.batch):
        return None
    if work.kind == "prompt":
        return float(row["prefill_tok_s"]) if row.get("prefill_tok_s") else None
    enough = int(row.get("new_tokens") or MIN_NEW_TOKENS) >= MIN_NEW_TOKENS
    return float(row["decode_tok_s"]) if enough else None


def _digits(number: float) -> str:
    """Write a number with three digits, or with all digits before the point if there are more."""
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}".rstrip(".")


def _line(machine: Machine, rows: Sequence[dict[str, str]], work: Work) -> tuple[dict[str, str], list[str]]:
    """Return our row of ``work``, and the cells of its line.

    Our row is the last one. Another engine's row is its last of the same commit; if there is none, its fastest.

    Raises:
        ValueError: there is no row of ours.
    """
    found = [(speed, row) for row in rows if (speed := _speed(row, work)) is not None]
    ours = [(speed, row) for speed, row in found if row["engine"] == work.engine]
    if not ours:
        raise ValueError(f"{', '.join(machine.files)} have no row of {work} on {machine.device}")
    speed, row = ours[-1]

    def other(engine: str) -> tuple[float, str] | None:
        rows_of_it = [(speed, other) for speed, other in found if other["engine"] == engine]
        beside = [speed for speed, other in rows_of_it if other["commit"] == row["commit"]]
        if beside:
            return beside[-1], ""
        return (max(speed for speed, _ in rows_of_it), "†") if rows_of_it else None

    cache = work.engine.removeprefix("ours").strip("-").removesuffix("-kv")
    stock = None if cache else other("stock")
    peers = [
        f"{_digits(at[0])}{at[1]} {name}" for engine, name in OTHERS.items() if not cache and (at := other(engine))
    ]
    format, _, head = work.weights.partition(", ")
    types = (work.dtype, format and f"{format} weights", head, cache and f"{cache} KV")
    kinds = {"turn": f"turn of {work.tokens}", "pieces": f"pieces of {work.tokens:,}"}
    card = machine.device.replace("(R)", "").replace(" Processor", "").split(",")[0].removesuffix(" 80GB HBM3")
    cells = [
        kinds.get(work.kind, work.kind),
        work.model,
        ", ".join(filter(None, types)),
        f"{work.context:,}",
        str(work.batch),
        f"{_digits(stock[0])}{stock[1]}" if stock else "",
        ", ".join(peers),
        f"**{_digits(speed)}**",
        _digits(speed / stock[0]) if stock else "",
        row["percent_of_r"] if work.kind == "decode" else "",
        f"{card}, {row['commit']}",
    ]
    return row, cells


def measured(name: str) -> str:
    """Return the table of one machine, and a line on what it was measured with."""
    machine = MACHINES[name]
    rows = _rows_of(machine)
    lines = [_line(machine, rows, work) for work in machine.works]

    def span(column: str, shown: Callable[[str], str] = str) -> str:
        values = sorted({shown(row[column]) for row, _ in lines if row.get(column)})
        return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"

    heads = ("work", "model", "type", "context", "batch", "stock", "others", "ours", "ratio", "% of R", "card, commit")
    versions = f"torch {span('torch')}, transformers {span('transformers')}"
    bandwidth = f"R = {span('r_gb_s', lambda text: f'{float(text):,.0f}')} GB/s"
    table = markdown_table(heads, [cells for _, cells in lines])
    return f"{table}\n\nRows of ours: {machine.device}; {versions}; {bandwidth}; {span('date')}."


# ---- several GPUs -------------------------------------------------------------------------------------------

#: GPUs that no machine had when this was measured: the paper model's word stands alone
PREDICTED_GPUS = 8
#: columns that tell rows of tensor parallel decoding apart
_RANKED = ("model", "weights", "layers", "context", "ranks", "device")


def over_gpus() -> str:
    """Return the table of tensor parallel decoding, beside what ``check/several_gpus.py`` predicts."""
    rows = [row for name in ("ranks_h100.csv", "ranks_h200.csv") for row in rows_of(DATA / name)]
    last = {tuple(row[key] for key in _RANKED): row for row in rows}
    lines = []

    def order(row: dict[str, str]) -> tuple:
        return *(row[key] for key in _RANKED[:2]), *map(int, _numbers(row)), row["device"]

    for row in sorted(last.values(), key=order):
        layers, context, gpus = map(int, _numbers(row))
        speed, bandwidth = float(row["tok_s"]), 1e9 * float(row["r_gb_s"])
        read = float(row["percent_of_nr"]) / 100 * gpus * bandwidth / speed  # by all GPUs for a token
        counts = (gpus, PREDICTED_GPUS) if gpus == PREDICTED_GPUS // 2 and context == 128 else (gpus,)
        for count in counts:
            sums = 2 * layers + 2  # two a layer, the embedding's, and the head's gather
            seconds = several_gpus.TensorParallel(count, 1.0, sums).seconds(read / count, bandwidth, layers)
            stock = _digits(float(row["stock_tok_s"])) if row["stock_tok_s"] else ""
            measured = (stock, f"**{_digits(speed)}**", row["percent_of_nr"]) if count == gpus else ("", "", "")
            card = row["device"].removesuffix(" 80GB HBM3").removeprefix("NVIDIA ")
            commit = row["commit"] if count == gpus else "predicted"
            what = row["model"], str(layers), row["weights"], f"{context:,}", str(count)
            lines.append((*what, *measured, _digits(1 / seconds), f"{card}, {commit}"))
    heads = ("model", "layers", "weights", "context", "GPUs", "stock", "ours", "% of N R", "predicted", "card, commit")
    return markdown_table(heads, lines)


def _numbers(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[key] for key in _RANKED[2:5])


# ---- encoder-decoders ---------------------------------------------------------------------------------------


def encoder_decoders() -> str:
    """Return the table of encoder-decoders."""
    names = ("encoder_decoders_h100.csv", "encoder_decoders_epyc.csv")
    rows = [row for name in names for row in rows_of(DATA / name)]
    lines = [
        (
            *(row["size"], row["device"].removesuffix(" 80GB HBM3"), row["dtype"], row["batch"]),
            _digits(float(row["stock_tok_s"])),
            f"**{_digits(float(row['ours_tok_s']))}**",
            *(_digits(float(row[name])) for name in ("times_stock", "call_times_stock", "patch_s", "first_s")),
            row["commit"],
        )
        for row in rows
    ]
    made = ("stock", "ours", "ratio", "ratio of calls", "patch(), s", "first call, s", "commit")
    return markdown_table(("model", "device", "type", "batch", *made), lines)


# ---- models that read images --------------------------------------------------------------------------------


def behind_images() -> str:
    """Return the table of decoding behind an image, beside the text models; of no file it has no lines."""
    rows = [row for path in sorted(DATA.glob("multimodal_*.csv")) for row in rows_of(path)]
    lines = [
        (
            *(row["model"], row["device"].removesuffix(" 80GB HBM3"), row["dtype"], row["context"], row["batch"]),
            _digits(float(row["stock_tok_s"])),
            f"**{_digits(float(row['ours_tok_s']))}**",
            _digits(float(row["times_stock"])),
            _digits(float(row["text_tok_s"])),
            f"{float(row['of_text']):.0%}",
            *(_digits(float(row[name])) for name in ("patch_s", "first_s")),
            row["commit"],
        )
        for row in rows
    ]
    made = (
        "stock",
        "ours",
        "ratio",
        "text model",
        "of the text model's speed",
        "patch(), s",
        "first call, s",
        "commit",
    )
    return markdown_table(("model", "device", "type", "context", "batch", *made), lines)
