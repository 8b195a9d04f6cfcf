"""What compilers and ninja have said: the line that says what is wrong."""

from __future__ import annotations

import re

_ERRORS = (
    r"^(?P<where>[^\s:]+:\d+):\d+: (?:fatal )?error: (?P<what>.*)",
    r"^(?P<where>[^\s(]+)\((?P<line>\d+)\): (?:catastrophic )?error[^:]*: (?P<what>.*)",
    r"^(?P<where>)\S*(?:cc|\+\+|clang|nvcc|ptxas)[\w-]*:? +(?:fatal error|fatal|error) *: (?P<what>.*)",
    r"^(?P<where>).*?(?P<what>undefined reference to .*)",
    r"^(?P<where>)\S*ld(?:\.\w+)?: (?P<what>.*)",
    r"^(?P<where>).*?(?P<what>No space left on device|Permission denied|not found|Killed).*",
)


def first_error(said: str) -> str:
    """Return the line of a compiler's output that says what is wrong, without folders of this machine."""
    for pattern in _ERRORS:
        if match := re.search(pattern, said, re.M):
            where = "/".join(match["where"].split("/")[-2:])
            where = f"{where}:{match['line']}" if "line" in match.groupdict() else where
            what = match["what"].strip()
            if "Killed" in what:
                what += ": memory is short, MAX_JOBS=1 compiles one file at a time"
            return f"{where}: {what}" if where else what
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith("ninja:")]
    return lines[-1][:200] if lines else "no output"
