"""Write the parts of the docs that are made from code and data: ``python docs/make_pages.py``.

Such a part stands between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hf_fastpath import traffic
from hf_fastpath.architecture import Architecture, architectures
from hf_fastpath.bench import shapes
from hf_fastpath.decode.calls.pass_table import PassTable
from hf_fastpath.decode.run import passes as of_steps
from hf_fastpath.decode.sources.described import model_part
from hf_fastpath.quantization import FORMATS, quantize
from hf_fastpath.reasons import REASONS
from hf_fastpath.recording.passes import PASSES as OF_RECORDINGS

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))  # when the file is loaded by its path, as tests do
import checkpoint_rows  # noqa: E402
from measured_tables import (  # noqa: E402
    MACHINES,
    behind_images,
    encoder_decoders,
    fallbacks,
    first_tokens,
    markdown_table,
    measured,
    over_gpus,
    published_first_tokens,
    rows_of,
)

GOLDEN = DOCS / "data" / "golden.csv"
TYPES = DOCS / "data" / "recorded_types.csv"
TESTED = DOCS / "data" / "tested.csv"
RECORD = "make test-full JOBS=0 TESTS=tests/patches ARGS='-k golden_matrix --record-golden docs/data/golden.csv'"


def first_page() -> str:
    """Return the beginning of the README, with links as they are in docs/."""
    text = (DOCS.parent / "README.md").read_text().partition("\n<!-- end of the first page -->")[0]
    return text.replace("](docs/", "](").replace('src="docs/', 'src="').strip()


def reason_codes() -> str:
    """Return a table of every reason code, what it means and what helps."""
    return markdown_table(("code", "meaning", "what helps"), [(f"`{code}`", *REASONS[code]) for code in REASONS])


def passes(table: PassTable) -> str:
    """Return a table of passes in their order, what each finds, and which passes it comes behind and why."""
    rows = []
    for row, key in zip(table, table.keys):
        first = table[row.name]
        behind = [f"`{name}`: {why}" for name, why in row.after.items() if not row.again or name not in first.after]
        finds = f"Once more: {row.again}" if row.again else row.finds
        needed = f" It cannot be switched off: {row.needed}." if row.needed and not row.again else ""
        rows.append((f"`{key}`", finds + needed, "; ".join(behind)))
    return markdown_table(("pass", "what it finds, and makes of it", "comes behind"), rows)


def _described(architecture: Architecture) -> tuple[str, str]:
    """Return name and structure of a family, from the first line of its file."""
    text = importlib.import_module(f"hf_fastpath.patches.{architecture.name}").__doc__ or ""
    name, colon, structure = " ".join(text.split()).partition(": ")
    if not colon or not structure.endswith("."):
        raise ValueError(
            f"patches/{architecture.name}.py: the docstring is {text!r}, expected 'Family: its structure.'"
        )
    return name, structure.rstrip(".")


def _tests(family: str) -> str:
    """Return the file with the tests of a family alone, if there is one; ``test_families.py`` has those of all."""
    path = f"tests/patches/test_{family}.py"
    return f"`{path}`" if (DOCS.parent / path).is_file() else ""


def families() -> str:
    """Return a table of every architecture file, what it patches, and its tests."""
    rows = []
    for architecture in architectures():
        parts = (architecture.mlp, architecture.attention, architecture.layer, architecture.norm)
        names = [part.class_name for part in parts if part.class_name not in (None, "LayerNorm")]
        patched = ", ".join(f"`{name}`" for name in names) + ", decode plan"
        rows.append((*_described(architecture), patched, _tests(architecture.name)))
    return markdown_table(("family", "structure", "patched", "further tests"), rows)


def golden_matrix() -> str:
    """Return a table of the mean logit errors of ours and of stock, from the figures that the tests recorded.

    Raises:
        ValueError: an architecture has no figures.
    """
    recorded = rows_of(GOLDEN)
    missing = {architecture.name for architecture in architectures()} - {row["architecture"] for row in recorded}
    if missing:
        raise ValueError(f"{GOLDEN.name} has no figures of {', '.join(sorted(missing))}: run `{RECORD}`")
    cases = list(dict.fromkeys(row["case"] for row in recorded))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in recorded:
        figures = lines.setdefault((row["architecture"], row["device"], row["dtype"]), {})
        figures[row["case"]] = f"{row['error']} / {row['stock_error']}"
    rows = [(*names, *(figures.get(case, "") for case in cases)) for names, figures in lines.items()]
    made_with = sorted({(row["device"], row["hardware"], row["torch"], row["transformers"]) for row in recorded})
    notes = [f"{device}: {hardware}, torch {torch}, transformers {tf}" for device, hardware, torch, tf in made_with]
    heads = ("family", "device", "dtype", *(case.replace("_", " ") for case in cases))
    return markdown_table(heads, rows) + f"\n\nMeasured with {'; '.join(notes)}."


def tested() -> str:
    """Return a table of the versions that the tests have passed with, from the rows that ``tests/tested.py`` wrote."""
    rows = [
        (row["python"], row["torch"], row["transformers"], row["platform"], row["device"],
         f"`make {row['target']}`: {row['passed']} passed", row["date"])
        for row in rows_of(TESTED)
    ]  # fmt: skip
    return markdown_table(("Python", "torch", "transformers", "platform", "device", "tests", "on"), rows)


#: what a cache holds, by the words of ``tests/causal_lm_types.py``
_KINDS = {
    "keys_values": "keys and values",
    "chunked": "keys and values, attention over chunks",
    "latent": "keys and values of latents (MLA)",
    "states": "states of recurrences or convolutions",
    "own": "layers of a class of its own",
    "none": "no cache of transformers'",
    "encoder": "none: an encoder",
    "broken": "no small model generates",
}


def _is_fast(row: dict[str, str]) -> bool:
    return row["how"] != "stock" and row["tokens"] == "equal"


def type_counts() -> str:
    """How many causal-LM types are fast, by what their caches hold."""
    recorded = rows_of(TYPES)
    groups: dict[str, list[dict[str, str]]] = {kind: [] for kind in _KINDS}
    for row in recorded:
        groups[row["kind"]].append(row)
    lines = []
    for name, rows in (*((_KINDS[kind], rows) for kind, rows in groups.items()), ("**all**", recorded)):
        fast = [row for row in rows if _is_fast(row)]
        wholly = [row for row in fast if not row["left"]]
        by_file = [row for row in wholly if row["how"] == "file"]
        counts = (len(by_file), len(wholly) - len(by_file), len(fast) - len(wholly), len(rows) - len(fast))
        lines.append((name, str(len(rows)), *map(str, counts)))
    heads = ("the cache holds", "types", "file", "recorded", "fast, some calls PyTorch's", "stock")
    versions = sorted({f"transformers {row['transformers']}, torch {row['torch']}" for row in recorded})
    return markdown_table(heads, [line for line in lines if line[1] != "0"]) + f"\n\nMade with {'; '.join(versions)}."


def fast_types() -> str:
    """Every causal-LM type that decodes by a plan: how, and what PyTorch runs in the step."""
    rows = [row for row in rows_of(TYPES) if _is_fast(row)]
    lines = [(f"`{row['model_type']}`", row["how"], row["left"].replace("; ", ", ")) for row in rows]
    return markdown_table(("type", "how", "PyTorch's calls"), lines)


def covered_types() -> str:
    """Return a table of the names of all types that were tried, by how they decode."""
    texts, around, encoders = (rows_of(DOCS / "data" / f"{name}_types.csv") for name in _TABLES)
    fast = [row for row in texts if _is_fast(row)]
    lines = {
        "text, with a file": [row for row in fast if row["how"] == "file"],
        "text, recorded": [row for row in fast if row["how"] != "file"],
        "behind images or sound": [row for row in around if _is_fast(row)],
        "encoder-decoders": [row for row in encoders if _is_fast(row)],
        "**stock code**": [row for row in (*texts, *around, *encoders) if not _is_fast(row)],
    }
    rows = []
    for name, found in lines.items():
        types = sorted({row["model_type"] for row in found})
        rows.append((name, str(len(types)), ", ".join(f"`{each}`" for each in types)))
    return markdown_table(("decodes", "types", "`model_type`"), rows)


#: what the files of types in docs/data are called
_TABLES = ("recorded", "multimodal", "encoder_decoder")


def _types_around(name: str, compared: str, more: str, with_left: bool) -> str:
    """Return a table of the types in a file of ``docs/data``: how each decodes, and why it runs stock code.

    Args:
        name: the file.
        compared, more: what was compared for a type without a kind, and for one that has a kind.
        with_left: whether a column has the calls that are PyTorch's.
    """
    rows, lines = rows_of(DOCS / "data" / name), []
    for row in rows:
        is_fast = _is_fast(row)
        left = [row["left"].replace("; ", ", ")] if with_left else []
        reason = row["reason"] or ("" if is_fast else f"its tokens: {row['tokens']}")
        shown = (more if row["kind"] else compared) if is_fast else ""
        lines.append((f"`{row['model_type']}`", row["how"], shown, *left, reason.replace("|", "\\|")))
    count = f"{sum(map(_is_fast, rows))} of {len(rows)} types decode in our loop."
    heads = ("compared", "PyTorch's calls") if with_left else ("compared prompts",)
    return f"{count}\n\n" + markdown_table(("type", "how", *heads, "why"), lines)


def stock_types() -> str:
    """Every causal-LM type that runs stock code, and why."""
    rows = [row for row in rows_of(TYPES) if not _is_fast(row)]
    lines = []
    for row in rows:
        reason = row["reason"] or f"its tokens: {row['tokens']}"
        lines.append((f"`{row['model_type']}`", _KINDS[row["kind"]], reason.replace("|", "\\|")))
    return markdown_table(("type", "the cache holds", "why"), lines)


def formats() -> str:
    """Return a table of every format of quantized weights."""
    torch.manual_seed(0)
    weight = torch.randn(128, 4096)
    rows = []
    for format in FORMATS.values():
        packed = quantize(weight, format)
        error = (packed.dequantize() - weight).norm() / weight.norm()
        group = f"{format.group} weights" if format.group else "a row"
        bits = format.nbytes(*weight.shape) * 8 / weight.numel()
        rows.append((f"`{format.name}`", format.kind, group, f"{bits:.2f}", f"{error:.2%}"))
    return markdown_table(("format", "quants", "a scale for", "bits", "error"), rows)


#: shapes in the README's table; and formats of their weights (None: float16), positions of the KV cache
SIZED = ("tinyllama-1.1b", "mistral-7b", "llama-3.1-8b", "qwen2.5-14b", "llama-3.1-70b")
SIZED_FORMATS = (None, "int8", "int4_g32")
SIZED_CONTEXT = 8192


def _held_bytes(model: torch.nn.Module, format: str | None) -> int:
    """Return the bytes of a model's weights in memory, if its decoder layers' projections are in format ``format``."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    if format is None:
        return total
    (architecture,) = (each for each in architectures() if each.name == model.config.model_type)
    linears = model_part(architecture, model).projections()
    return total + sum(FORMATS[format].nbytes(*linear.weight.shape) - linear.weight.nbytes for linear in linears)


def sizes() -> str:
    """Return a table of the gigabytes that models take."""
    rows = []
    for name in SIZED:
        with shapes.no_model():
            model = AutoModelForCausalLM.from_config(shapes.shape(name).build_config(), dtype=torch.float16)
        held = [f"{_held_bytes(model, format) / 1e9:.1f}" for format in SIZED_FORMATS]
        kv = traffic.kv_bytes(model.config, SIZED_CONTEXT, torch.float16) / 1e9
        rows.append((shapes.shape(name).label, *held, f"{kv:.2f}"))
    formats = ("float16" if format is None else f"`{format}`" for format in SIZED_FORMATS)
    return markdown_table(("GB of", *formats, f"KV cache of {SIZED_CONTEXT:,} tokens"), rows)


#: tables of many models have a page of their own
OF_MODELS = [name for name in MACHINES if name.startswith("models on ")]

#: page -> name of a generated part -> function that makes the part
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "../README.md": {"sizes": sizes},
    "index.md": {"first page": first_page},
    "installing.md": {"tested": tested},
    "design/recording.md": {
        "passes over recordings": partial(passes, OF_RECORDINGS),
        "passes over steps": partial(passes, of_steps.PASSES),
    },
    "model-speeds.md": {
        **{name: partial(measured, name) for name in OF_MODELS},
        "encoder-decoders": encoder_decoders,
        "behind images": behind_images,
    },
    "performance.md": {
        **{name: partial(measured, name) for name in MACHINES if name not in OF_MODELS},
        "several GPUs": over_gpus,
    },
    "quantized-weights.md": {
        "formats": formats,
        "checkpoints": checkpoint_rows.table,
        "tests of checkpoints": checkpoint_rows.tests_of_weights,
    },
    "reason-codes.md": {"reason codes": reason_codes},
    "support.md": {"covered types": covered_types, "type counts": type_counts},
    "evidence.md": {
        "families": families,
        "fast types": fast_types,
        "stock types": stock_types,
        "multimodal types": partial(_types_around, "multimodal_types.csv", "text", "text, images or sound", True),
        "encoder-decoder types": partial(
            _types_around, "encoder_decoder_types.csv", "outputs", "texts and outputs", True
        ),
        "golden matrix": golden_matrix,
        "first tokens": first_tokens,
        "published first tokens": partial(published_first_tokens, "first_token_h200.csv"),
        "published first tokens on a CPU": partial(published_first_tokens, "first_token_cpu.csv"),
        "fallbacks": fallbacks,
    },
}


def with_generated_parts(page: str) -> str:
    """Return the text of ``docs/<page>``, or of the README, with its generated parts made anew.

    Raises:
        ValueError: the page lacks the markers of a part.
    """
    text = (DOCS / page).read_text()
    for name, make in PAGES[page].items():
        begin, end = f"<!-- generated: {name} -->\n", f"<!-- end of {name} -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        if len(re.findall(pattern, text, flags=re.S)) != 1:
            raise ValueError(f"docs/{page} needs the lines {begin.strip()!r} and {end!r}, once each and in this order")
        made = f"{begin}\n{make()}\n\n{end}"
        text = re.sub(pattern, lambda _, made=made: made, text, flags=re.S)
    return text


def main() -> None:
    for page in PAGES:
        (DOCS / page).write_text(with_generated_parts(page))


if __name__ == "__main__":
    main()
