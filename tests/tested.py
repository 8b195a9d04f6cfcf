"""Write down what a run of the tests was made with: a row of the table in docs/installing.md.

    make test ARGS=--junitxml=report.xml
    .venv/bin/python tests/tested.py report.xml --target test --csv docs/data/tested.csv

``--merge FILE ...`` puts rows of other runs into the CSV. A row takes the place of the row of the same versions, device
and target.
"""

from __future__ import annotations

import argparse
import csv
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

KEY = ("platform", "device", "python", "torch", "transformers", "target")
COLUMNS = (*KEY, "date", "passed", "skipped")


def counted(report: Path) -> dict[str, str]:
    """Return the date of a run, and how many tests passed and were skipped.

    Raises:
        ValueError: a test failed, or none passed.
    """
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failed, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    passed = total - failed - skipped
    if failed or passed <= 0:
        found = f"{failed} of {total} tests failed and {passed} passed"
        raise ValueError(f"{report.name}: {found}; only what passes is kept")
    return {"date": suites[0].get("timestamp", "")[:10], "passed": str(passed), "skipped": str(skipped)}


def here() -> dict[str, str]:
    """Return the versions of this environment, the system, and the GPU if PyTorch sees one."""
    import torch

    libc = "-".join(platform.libc_ver())
    return {
        "platform": f"{platform.system()} {platform.machine()}, {libc}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
        "transformers": version("transformers"),
    }


def merged(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return one row for each key, the last one, in an order that is the same for the same rows."""
    by_key = {tuple(row[name] for name in KEY): row for row in rows}
    return [by_key[key] for key in sorted(by_key, key=lambda key: tuple(map(_sortable, key)))]


def _sortable(word: str) -> tuple:
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in word.split("."))


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV that this script wrote; none if there is no such file."""
    return list(csv.DictReader(path.open(newline=""))) if path.is_file() else []


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write the rows."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged(rows))


def main(arguments: list[str] | None = None) -> int:
    """Run the script; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, nargs="?", help="what pytest wrote for --junitxml")
    parser.add_argument("--target", help="the target of the Makefile that ran")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="CSV", help="take the rows of these files, too")
    parser.add_argument("--csv", type=Path, required=True, help="the file that the rows go to")
    args = parser.parse_args(arguments)
    if (args.report is None) != (args.target is None) or not (args.report or args.merge):
        parser.error("give a report with its --target, or files to --merge")
    rows = rows_of(args.csv) + [row for path in args.merge or () for row in rows_of(path)]
    try:
        if args.report:
            rows.append(here() | counted(args.report) | {"target": args.target})
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    write(args.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
