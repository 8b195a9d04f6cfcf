"""Stand-ins for g++ and nvcc that take no time, and write down their arguments."""

from __future__ import annotations

import stat
from pathlib import Path

CXX = """#!/bin/sh
case "$*" in *--version*|*--dryrun*|*-print-file-name=*) echo "stub c++ 1.2.3"; exit 0;; esac
echo "$*" >> "{log}"
{script}
out=""
while [ $# -gt 0 ]; do
  case "$1" in -o) out="$2"; shift;; esac
  shift
done
echo "{content}" > "$out"
exit {status}
"""


def stub(folder: Path, content: str = "object", status: int = 0, name: str = "c++", script: str = "") -> Path:
    """Make a compiler that writes down its arguments, runs ``script`` and makes a file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(CXX.format(log=folder / "log", content=content, status=status, script=script))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def compiled(compiler: Path) -> list[str]:
    """Return the sources that a stub was asked to compile since the last call, in order."""
    log = compiler.parent / "log"
    calls = log.read_text().splitlines() if log.is_file() else []
    log.unlink(missing_ok=True)
    return [call.split(" -c ")[1].split(" -o ")[0] for call in calls if " -c " in call]
