"""Writes the parts of the docs that are made from code and data: ``python docs/make_pages.py``.

Such a part stands between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import csv
import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hf_fastpath import traffic
from hf_fastpath.architecture import Architecture, architectures
from hf_fastpath.bench import shapes
from hf_fastpath.decode.structure import model_part
from hf_fastpath.quantization import FORMATS, quantize
from hf_fastpath.quantization.replacing import of_one_input
from hf_fastpath.reasons import REASONS

DOCS = Path(__file__).resolve().parent
GOLDEN = DOCS / "data" / "golden.csv"
RECORD = "make test-full JOBS=0 TESTS=tests/patches ARGS='-k golden_matrix --record-golden docs/data/golden.csv'"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of text."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))


def reason_codes() -> str:
    """Every reason code, what it means and what helps."""
    return markdown_table(("code", "meaning", "what helps"), [(f"`{code}`", *REASONS[code]) for code in REASONS])


def _described(architecture: Architecture) -> tuple[str, str]:
    """Name and structure of a family, out of its file's first line."""
    text = importlib.import_module(f"hf_fastpath.patches.{architecture.name}").__doc__ or ""
    name, colon, structure = " ".join(text.split()).partition(": ")
    if not colon or not structure.endswith("."):
        raise ValueError(
            f"patches/{architecture.name}.py: the docstring is {text!r}, expected 'Family: its structure.'"
        )
    return name, structure.rstrip(".")


def families() -> str:
    """Every architecture file: what is patched, and the tests."""
    rows = []
    for architecture in architectures():
        parts = (architecture.mlp, architecture.attention, architecture.layer, architecture.norm)
        names = [part.class_name for part in parts if part.class_name not in (None, "LayerNorm")]
        patched = ", ".join(f"`{name}`" for name in names) + ", decode plan"
        rows.append((*_described(architecture), patched, f"`tests/patches/test_{architecture.name}.py`"))
    return markdown_table(("family", "structure", "patched", "tests"), rows)


def golden_matrix() -> str:
    """Mean logit errors of ours and of stock, from the figures that the tests recorded.

    Raises:
        ValueError: an architecture without figures.
    """
    with GOLDEN.open(newline="") as file:
        recorded = list(csv.DictReader(file))
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


def formats() -> str:
    """Every format of quantized weights."""
    torch.manual_seed(0)
    weight = torch.randn(128, 4096)
    rows = []
    for form in FORMATS.values():
        packed = quantize(weight, form)
        error = (packed.dequantize() - weight).norm() / weight.norm()
        kind = (
            "float8_e4m3fn"
            if form.is_float
            else f"{form.lowest} to {form.highest}" + ", a zero point for each scale" * form.has_zeros
        )
        group = f"{form.group} weights" if form.group else "a row"
        bits = form.nbytes(*weight.shape) * 8 / weight.numel()
        rows.append((f"`{form.name}`", kind, group, f"{bits:.2f}", f"{error:.2%}"))
    return markdown_table(("format", "quants", "a scale for", "bits", "error"), rows)


#: of the README's table: shapes, formats of their weights (None: float16), positions of the KV cache
SIZED = ("tinyllama-1.1b", "mistral-7b", "llama-3.1-8b", "qwen2.5-14b", "llama-3.1-70b")
SIZED_FORMATS = (None, "int8", "int4_g32")
SIZED_CONTEXT = 8192


def _held_bytes(model: torch.nn.Module, form: str | None) -> int:
    """Bytes of a model's weights in memory, those of its decoder layers' projections in format ``form``."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    if form is None:
        return total
    (architecture,) = (each for each in architectures() if each.name == model.config.model_type)
    linears = [
        linear for layer in model_part(architecture, model).layers for group in of_one_input(layer) for linear in group
    ]
    return total + sum(FORMATS[form].nbytes(*linear.weight.shape) - linear.weight.nbytes for linear in linears)


def sizes() -> str:
    """Gigabytes that models take, and what a token reads of them."""
    rows = []
    for name in SIZED:
        with shapes.no_model():
            model = AutoModelForCausalLM.from_config(shapes.shape(name).build_config(), dtype=torch.float16)
        held = [f"{_held_bytes(model, form) / 1e9:.1f}" for form in SIZED_FORMATS]
        kv = traffic.kv_bytes(model.config, SIZED_CONTEXT, torch.float16) / 1e9
        rows.append((shapes.shape(name).label, *held, f"{kv:.2f}"))
    formats = ("float16" if form is None else f"`{form}`" for form in SIZED_FORMATS)
    return markdown_table(("GB of", *formats, f"KV cache of {SIZED_CONTEXT:,} tokens"), rows)


#: page -> name of a generated part -> what makes it
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "../README.md": {"sizes": sizes},
    "quantized-weights.md": {"formats": formats},
    "reason-codes.md": {"reason codes": reason_codes},
    "support.md": {"families": families, "golden matrix": golden_matrix},
}


def with_generated_parts(page: str) -> str:
    """The text of ``docs/<page>``, or of the README, with its generated parts made anew.

    Raises:
        ValueError: a part's markers are not in the page.
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
