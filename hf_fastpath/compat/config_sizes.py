"""Bounds on what a config may ask for, so that a model without weights is made of it in bounded time and memory."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

#: most that an entry may be; far beyond every model that there is
_MOST = 1 << 40
#: most that an entry of a list may be, which may say how often another one is repeated
_MOST_LISTED, _LISTED = 1 << 20, "[]"
#: most layers: classes list what is in each; and most positions, of which classes make tables in Python
_MOST_LAYERS, _MOST_POSITIONS = 4096, 1 << 24
#: most entries of a config, and most modules of a model; Kimi K2 has 70,000 if its experts are modules
_MOST_ENTRIES, _MOST_MODULES, _MOST_DEPTH = 1 << 20, 300_000, 64
#: parts of names of entries that count layers or positions, and ends of names of those that do not
_LAYERS = re.compile(r"(^|_)(n?layers?|depths?|blocks?|stacks?|stages?|repeats?)(_|$)")
_POSITIONS = re.compile(r"(^|_)(positions?|ctx|context|seq|length|len)(_|$)")
_NO_COUNT = re.compile(r"_(size|dim|token|id|index|idx|ids|norm|std|eps|freq|every|interval|type|period|width)$")


def check_sizes(entries: Any, where: str = "") -> None:
    """Check the entries of a config, before a class is made of it.

    Args:
        entries: plain data, as a config.json holds it.
        where: the names of the entries around these.

    Raises:
        ValueError: an entry is greater than any model needs, or there are too many.
    """
    waiting, count = [(where, entries, 0)], 0
    while waiting:
        name, value, depth = waiting.pop()
        count += 1
        if count > _MOST_ENTRIES or depth > _MOST_DEPTH:
            what = f"more than {_MOST_ENTRIES:,} entries" if count > _MOST_ENTRIES else f"{depth} levels at {name!r}"
            raise ValueError(f"the config has {what}, expected those of a model: make it shorter")
        if isinstance(value, dict):
            waiting += [(f"{name}.{key}" if name else str(key), each, depth + 1) for key, each in value.items()]
        elif isinstance(value, (list, tuple)):
            waiting += [(f"{name}{_LISTED}", each, depth + 1) for each in value]
        elif isinstance(value, (int, float)) and abs(value) > (most := _most_of(name.rpartition(".")[2])):
            shown = str(value) if abs(value) < 1e20 else f"{float(min(value, 1e300)):.3g}"
            raise ValueError(f"{name} is {shown}, expected {most:,} at most: set it to what the model has")


def _most_of(name: str) -> float:
    name, listed, _ = name.partition(_LISTED)
    if name.endswith(("_id", "_ids", "_theta", "_value", "_scale", "_factor", "_base")):
        return float("inf")
    if _NO_COUNT.search(name) is None:
        if _LAYERS.search(name):
            return _MOST_LAYERS
        if _POSITIONS.search(name):
            return _MOST_POSITIONS
    return _MOST_LISTED if listed else _MOST


@contextmanager
def few_modules() -> Iterator[None]:
    """Make no more modules in this thread than a model has, for the length of a ``with`` block.

    Raises:
        ValueError: there are more.
    """
    count, here = 0, threading.get_ident()

    def counted(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        nonlocal count
        if threading.get_ident() == here:
            count += 1
            if count > _MOST_MODULES:
                raise ValueError(
                    f"a model of this config has more than {_MOST_MODULES:,} modules, expected fewer: set its numbers "
                    "of layers and experts to what the model has"
                )

    handle = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()
