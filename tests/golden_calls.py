"""The final calls of a token's step, of every listed family in each type and format, and of some recorded ones.

    python tests/golden_calls.py                # compare with docs/data/golden_calls.csv; exit status 1 if one differs
    python tests/golden_calls.py --record       # put what there is now in its place
    python tests/golden_calls.py llama-fp32-own-1   # print the calls of one step

A change to how steps are made may change a row only if a benchmark says why: which calls follow one another decides
what becomes one call, which kernels overlap, and which memory is shared. Rows hold the number of calls and a digest of
their ops, the names and types of their arguments, numbers, and which earlier call made each. They are the same on every
CPU, and may be others with another release of transformers, which has other code or other small models.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import causal_lm_types
import torch
import transformers
from models import build

import hf_fastpath
from hf_fastpath.architecture import architectures
from hf_fastpath.decode.calls.call_text import texts
from hf_fastpath.patching.state import state_of

PATH = Path(__file__).resolve().parent.parent / "docs" / "data" / "golden_calls.csv"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WEIGHTS = {"own": None, "int8": "int8", "int4_g32": "int4_g32"}
BATCHES = (1, 20)
#: types without a file, one for each way to keep a text and to mix experts
RECORDED = (
    *("glm4", "deepseek_v2", "mamba2", "qwen3_next", "lfm2", "granitemoe", "bloom", "mpt", "gpt_neo", "codegen"),
    *("llama4_text", "falcon_h1", "ernie4_5_moe"),
)


def cases() -> Iterator[str]:
    """Yield the names of all steps: family, type, weights and sequences."""
    listed = [each.name for each in architectures()]
    for name in (*listed, *RECORDED):
        yield from (f"{name}-{dtype}-own-{batch}" for dtype in DTYPES for batch in BATCHES)
        if name in listed:
            yield from (f"{name}-bf16-{weights}-1" for weights in WEIGHTS if weights != "own")


def calls_of(case: str) -> list[str]:
    """Return the final calls of a step as text; the reason in their place if there is no step."""
    name, dtype, weights, batch = case.rsplit("-", 3)
    listed = name in {each.name for each in architectures()}
    model = (build(name) if listed else causal_lm_types.small_model(name)).to(DTYPES[dtype])
    try:
        hf_fastpath.patch(model, weights=WEIGHTS[weights], quiet=True)
    except (hf_fastpath.UnsupportedModelError, ValueError) as error:
        return [f"{type(error).__name__}"]
    model.generate(torch.arange(4, 8)[None].repeat(int(batch), 1), max_new_tokens=2, min_new_tokens=2, do_sample=False)
    plan = next((each for each in state_of(model).plans if each.batch == int(batch)), None)
    if plan is None:
        return [str(hf_fastpath.report(model).stats["reasons"])]
    return texts(plan.program.calls)


def row_of(case: str) -> dict[str, str]:
    found = calls_of(case)
    digest = hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]
    return {"step": case, "calls": str(len(found)), "digest": digest, "transformers": transformers.__version__}


def recorded() -> dict[str, dict[str, str]]:
    """Return the rows of the file by the names of their steps."""
    with PATH.open(newline="") as file:
        return {row["step"]: row for row in csv.DictReader(file)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=Path(__file__).name, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("step", nargs="?", help="print the calls of this step")
    parser.add_argument("--record", action="store_true", help="write docs/data/golden_calls.csv")
    given = parser.parse_args(argv)
    if given.step:
        print(*calls_of(given.step), sep="\n")
        return 0
    rows = list(map(row_of, cases()))
    if given.record:
        with PATH.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return 0
    before = recorded()
    other = [row["step"] for row in rows if before.get(row["step"]) != row]
    print(f"{len(rows)} steps, {len(other)} other than in {PATH.name}", *other, sep="\n")
    return bool(other)


if __name__ == "__main__":
    raise SystemExit(main())
