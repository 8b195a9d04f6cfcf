"""Environment variables of the package that switch something on or off: one rule for all of them.

This module imports nothing that a build lacks, because ``setup.py`` reads a switch as well.
"""

from __future__ import annotations

import os

#: values that switch off, in any case; every other value switches on
OFF = ("", "0", "false", "no", "off")
#: values that say no more than "on", for a variable that has names of modes beside the switch
ON = ("1", "true", "yes", "on")


def word(name: str) -> str | None:
    """Return the value of the variable ``name`` in small letters, without space around it; None if it is not set."""
    value = os.environ.get(name)
    return None if value is None else value.strip().lower()


def text(name: str) -> str:
    """Return the value of the variable ``name`` as it is; "" if it is not set."""
    return os.environ.get(name, "")


def is_on(name: str, default: bool = False) -> bool:
    """Whether the variable ``name`` switches on: its value is none of :data:`OFF`; ``default`` if it is not set."""
    value = word(name)
    return default if value is None else value not in OFF


def all_set(prefix: str = "HF_FASTPATH_") -> dict[str, str]:
    """Return the package's variables that are set, but those that say where and how kernels are built, and where files
    are written, with values."""
    left_out = ("CACHE", "BUILD", "TARGETS", "CUDA_ARCHS", "DUMP")
    names = (name for name in os.environ if name.startswith(prefix) and name.removeprefix(prefix) not in left_out)
    return {name: word(name) or "" for name in sorted(names)}


def mode(name: str, modes: tuple[str, ...], on: str, off: str) -> str:
    """Return which of ``modes`` the variable ``name`` asks for.

    Args:
        on: the mode of a variable that is not set, or is one of :data:`ON`.
        off: the mode of one of :data:`OFF`.

    Raises:
        ValueError: the value is neither a mode nor a switch.
    """
    value = word(name)
    if value is None or value in ON:
        return on
    if value in OFF:
        return off
    if value not in modes:
        raise ValueError(f"{name} is {os.environ[name]!r}, expected one of {', '.join(modes)}, or 0 for {off}")
    return value
