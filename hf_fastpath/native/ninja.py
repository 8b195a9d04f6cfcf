"""Ninja, which runs the compilers of a build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .toolchain import BuildError


def path() -> str:
    """Return where ninja is.

    Raises:
        BuildError: it is not installed.
    """
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if (found := shutil.which("ninja", path=folders)) is None:
        raise BuildError("ninja is not installed: pip install ninja")
    return found


def run(folder: Path, jobs: int, advance: Callable[[int], None]) -> tuple[int, str]:
    """Run ninja in ``folder``; return its exit status and output. However this ends, no compiler keeps running."""
    command = [path(), "-C", str(folder), "-j", str(jobs)]
    environment = os.environ | {"NINJA_STATUS": "[%f/%t] "}
    said = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    process = subprocess.Popen(command, env=environment, umask=0o077, **pipes)
    try:
        for line in process.stdout:
            said.append(line)
            if match := re.match(r"\[(\d+)/\d+\] ", line):
                advance(int(match.group(1)))
        return process.wait(), "".join(said)
    except BaseException:
        process.terminate()  # ninja ends its compilers and removes unfinished files
        process.wait()
        raise
    finally:
        process.stdout.close()
