"""Tries every causal-LM type of the installed transformers and writes ``docs/data/recorded_types.csv``:
``python docs/make_types.py [type ...]``.

Takes ten minutes on one core; with names of types only their rows are made anew. ``make docs`` then makes the table of
``docs/support.md``.
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import asdict, fields
from pathlib import Path

import torch
import transformers

DOCS = Path(__file__).resolve().parent
TYPES = DOCS / "data" / "recorded_types.csv"
sys.path.insert(0, str(DOCS.parent / "tests"))

import causal_lm_types  # noqa: E402
from recorded_types import Row, rows  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="all, if none is named")
    named = parser.parse_args().types
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    known = {row["model_type"]: row for row in csv.DictReader(TYPES.open(newline=""))} if TYPES.is_file() else {}
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    for row in rows(named or None):
        known[row.model_type] = asdict(row) | versions
        print(f"{row.model_type:26} {row.kind:12} {row.how:9} {row.tokens:8} {row.left or row.reason}", flush=True)
        types = [each for each in causal_lm_types.types() if each in known]
        with TYPES.open("w", newline="") as file:
            writer = csv.DictWriter(file, [each.name for each in fields(Row)] + list(versions), lineterminator="\n")
            writer.writeheader()
            writer.writerows(known[each] for each in types)


if __name__ == "__main__":
    main()
