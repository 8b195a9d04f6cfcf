"""Tries every causal-LM, multimodal and encoder-decoder type of the installed transformers and writes
``docs/data/recorded_types.csv``, ``multimodal_types.csv`` and ``encoder_decoder_types.csv``:
``python docs/make_types.py [type ...]``.

Takes ten minutes on one core; with names of types only their rows are made anew. ``make docs`` then makes the table of
``docs/evidence.md`` and ``docs/support.md``.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import torch
import transformers

DOCS = Path(__file__).resolve().parent
DATA = DOCS / "data"
sys.path.insert(0, str(DOCS.parent / "tests"))

from recorded_types import TABLES, Row  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="all, if none is named")
    parser.add_argument("--table", choices=TABLES, help="one of the tables alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name, (types, row_of) in TABLES.items():
        if arguments.table in (None, name):
            make(DATA / name, types, [each for each in arguments.types or types if each in types], row_of)


def make(path: Path, types: tuple[str, ...], wanted: list[str], row_of: Callable[[str], Row]) -> None:
    """Make the rows of ``wanted`` anew in a table of ``types``."""
    known = {row["model_type"]: row for row in csv.DictReader(path.open(newline=""))} if path.is_file() else {}
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    for row in map(row_of, wanted):
        known[row.model_type] = asdict(row) | versions
        print(f"{row.model_type:26} {row.kind:12} {row.how:9} {row.tokens:8} {row.left or row.reason}", flush=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [each.name for each in fields(Row)] + list(versions), lineterminator="\n")
            writer.writeheader()
            writer.writerows(known[each] for each in types if each in known)


if __name__ == "__main__":
    main()
