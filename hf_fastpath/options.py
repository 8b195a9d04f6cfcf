"""The arguments of ``patch()``."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .architecture import PARTS
from .cache.buffers import KV_DTYPES
from .cache.fastpath_cache import check_page_size
from .choices import HEADS
from .quantization import FORMATS

#: names that patch(ops=...) takes: the parts of an architecture, and the decode loop over all parts
COMPONENTS = (*PARTS, "loop")
#: sequences that patch(max_batch_size=) and a decode plan take at most
MAX_BATCH = 256
#: and where nobody says how many: larger batches were not measured on a GPU
USUAL_BATCH = 64

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?i?)B?", re.IGNORECASE)
_UNITS = {"": 1, "I": 1} | {unit: 1000**power for power, unit in enumerate("KMGT", 1)}
_UNITS |= {f"{unit}I": 1024**power for power, unit in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class Options:
    """Arguments of ``patch()``, checked."""

    kv_dtype: torch.dtype | None
    weights: str | None
    lm_head: str
    keep_original: bool
    ops: frozenset[str]
    strict: bool
    max_batch_size: int
    page_size: int | None = None
    prefix_cache: int | None = None
    share_steps: bool = False

    @classmethod
    def parse(
        cls,
        kv_dtype: Any = "auto",
        weights: Any = None,
        ops: Any = "all",
        strict: bool = False,
        max_batch_size: int = USUAL_BATCH,
        lm_head: Any = HEADS[0],
        keep_original: bool = True,
        page_size: int | None = None,
        prefix_cache: int | str | None = None,
        share_steps: bool = False,
    ) -> Options:
        """Check the arguments.

        Raises:
            ValueError: the message says which argument, its value, and what is expected.
        """
        by_name = {str(dtype).removeprefix("torch."): dtype for dtype in KV_DTYPES} | {"fp8": torch.float8_e4m3fn}
        stored: Any = by_name.get(kv_dtype, kv_dtype) if isinstance(kv_dtype, str) else kv_dtype
        if stored != "auto" and stored not in KV_DTYPES:
            expected = "'auto', 'int8', 'fp8', torch.float32, float16 or bfloat16"
            raise ValueError(f"kv_dtype is {kv_dtype!r}, expected {expected}")
        if weights is not None and weights not in FORMATS:
            raise ValueError(f"weights is {weights!r}, expected None or one of {', '.join(FORMATS)}")
        if lm_head not in HEADS or (weights is None and lm_head != HEADS[0]):
            raise ValueError(f"lm_head is {lm_head!r}, expected one of {', '.join(HEADS)}, and weights= beside it")
        if not isinstance(ops, (str, Iterable)):
            raise ValueError(f"ops is {ops!r}, expected 'all' or some of {', '.join(COMPONENTS)}")
        chosen = COMPONENTS if ops == "all" else (ops,) if isinstance(ops, str) else tuple(ops)
        if not chosen:
            raise ValueError(f"ops is empty, expected 'all' or some of {', '.join(COMPONENTS)}")
        for name in chosen:
            if name not in COMPONENTS:
                close = difflib.get_close_matches(str(name), COMPONENTS, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"ops names {name!r}, expected 'all' or some of {', '.join(COMPONENTS)}.{hint}")
        if not isinstance(max_batch_size, int) or not 1 <= max_batch_size <= MAX_BATCH:
            raise ValueError(f"max_batch_size is {max_batch_size!r}, expected a whole number from 1 to {MAX_BATCH}")
        kv = None if stored == "auto" else stored
        if page_size is not None:
            check_page_size(page_size, kv)
        keep = bool(keep_original)
        kept = None if prefix_cache is None else bytes_of(prefix_cache, "prefix_cache")
        others = frozenset(chosen), bool(strict), max_batch_size, page_size, kept, bool(share_steps)
        return cls(kv, weights, lm_head, keep, *others)


def bytes_of(size: Any, name: str) -> int:
    """Return the bytes that the argument ``name`` says.

    Raises:
        ValueError: it names none.
    """
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    number = size if found is None else int(float(found[1]) * _UNITS[found[2].upper()])
    if type(number) is not int or number <= 0:
        raise ValueError(f"{name} is {size!r}, expected a number of bytes, such as '2GB' or 2_000_000_000, or None")
    return number


def bytes_or_share(size: Any, device: torch.device) -> int:
    """Return the bytes that ``max_memory=`` says: a number of them, or a share of the memory that is free on a device.

    Raises:
        ValueError: it says neither.
    """
    share = size
    if isinstance(size, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?) ?%", size.strip())):
        share = float(found[1]) / 100
    if not isinstance(share, float):
        return bytes_of(size, "max_memory")
    if not 0 < share <= 1:
        raise ValueError(
            f"max_memory is {size!r}, expected bytes, such as '2GB', or a share above 0 and up to 1 (100%)"
        )
    return max(1, int(share * free_bytes(device)))


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a device's memory that nobody uses."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (found := re.search(r"MemAvailable: *(\d+) kB", meminfo.read_text())):
        return int(found[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
