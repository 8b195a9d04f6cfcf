"""The table of resources of each CUDA kernel (registers, spills, shared memory), from the compiler's own reports."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

PTXAS_COLUMNS = ("source", "kernel", "arch", "registers", "spill_store_bytes", "spill_load_bytes", "smem_bytes")


def parse_ptxas(report: Path) -> list[dict[str, str]]:
    """Return rows of ``PTXAS_COLUMNS`` from one ``-Xptxas -v`` report."""
    rows = []
    kernel = arch = ""
    spills = ("0", "0")
    for line in report.read_text().splitlines():
        if match := re.search(r"Compiling entry function '(\w+)' for 'sm_(\w+)'", line):
            kernel, arch = match.groups()
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills = match.groups()
        elif (match := re.search(r"Used (\d+) registers", line)) and kernel:
            smem = re.search(r"(\d+) bytes smem", line)
            values = (
                report.name.split(".cu")[0],
                kernel,
                arch,
                match.group(1),
                *spills,
                smem.group(1) if smem else "0",
            )
            rows.append(dict(zip(PTXAS_COLUMNS, values)))
    return rows


def made_from(path: Path) -> dict[str, str]:
    """Return source -> a hash of all that the rows of a table were made from; empty without a table."""
    beside = _hashes(path)
    if not (path.is_file() and beside.is_file()):
        return {}
    with beside.open(newline="") as handle:
        return {row["source"]: row["made_from"] for row in csv.DictReader(handle)}


def write_made_from(path: Path, hashes: Mapping[str, str]) -> None:
    """Write what :func:`made_from` returns."""
    lines = ["source,made_from", *(f"{source},{made}" for source, made in sorted(hashes.items()))]
    _hashes(path).write_text("\n".join(lines) + "\n")


def _hashes(path: Path) -> Path:
    return path.with_name(f"{path.stem}_sources.csv")


def write_ptxas_report(directory: Path, path: Path, unchanged: Collection[str] = ()) -> list[str]:
    """Write the resource table of a CUDA build, and compare its spills with the table that was there.

    Args:
        directory: holds the compiler's reports.
        path: of the table.
        unchanged: sources that were not compiled, whose rows stay.

    Returns:
        One line for every kernel that spills more than before; empty if no kernel does.
    """
    rows = [row for report in sorted(directory.glob("*.ptxas")) for row in parse_ptxas(report)]
    rows.sort(key=lambda row: (row["source"], row["kernel"], row["arch"]))
    names = [row["kernel"] for row in rows]
    if shutil.which("c++filt"):
        names = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True).stdout.splitlines()
    for row, name in zip(rows, names):
        # enum template arguments lose their type
        name = re.sub(r"\([\w:]+\)(?=\d)", "", name.replace("(anonymous namespace)::", ""))
        row["kernel"] = re.sub(r"\(.*", "", name).replace("void ", "")
    table = []
    if path.is_file():
        with path.open(newline="") as handle:
            table = list(csv.DictReader(handle))
    before = {(row["kernel"], row["arch"]): int(row["spill_store_bytes"]) for row in table}
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, PTXAS_COLUMNS, lineterminator="\n")
        writer.writeheader()
        kept = [row for row in table if row["source"] in unchanged]
        writer.writerows(sorted(rows + kept, key=lambda row: row["source"]))
    return [
        f"{row['kernel']} (sm_{row['arch']}) spills {row['spill_store_bytes']} bytes"
        for row in rows
        if int(row["spill_store_bytes"]) > before.get((row["kernel"], row["arch"]), 0)
    ]
