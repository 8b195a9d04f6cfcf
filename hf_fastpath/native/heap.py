"""What glibc's heap keeps of the memory of a long prompt, or of weights that are repacked.

glibc takes blocks below a limit from its heap, and others from the system one by one. The limit begins at 128 KB and
grows up to 32 MB with the blocks that are freed. A prompt's hidden states then lie in the heap, between buffers that
live longer, such as a cache's and a plan's: what is freed between these stays the process's, and blocks of other sizes
do not fit into it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: blocks of this size and above do not lie in the heap while a prompt is read that has such. The system clears each of
#: them anew, which takes up to 5 % of a prompt's time; beyond glibc's greatest limit it does so for stock code as well
BLOCK_BYTES = 24 << 20
#: behind a prompt with hidden states of this size, what is free in the heap is given back: that takes 5 to 40 ms
TRIMMED_BYTES = 4 << 20
#: the same while weights are repacked, a few times in a process's life
_REPACKED_BYTES = 1 << 20
#: glibc's greatest limit, to which that of a process that frees large blocks grows by itself
_GREATEST = 32 << 20
#: the limit's number, as in glibc's ``malloc.h``
_MMAP_THRESHOLD = -3


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc, and the user has not set the limit."""
    is_set = "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if is_set or not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


@contextmanager
def repacking() -> Iterator[None]:
    """Take large blocks from the system in a ``with`` block in which weights are repacked, and give back what is freed
    behind it; :func:`give_back` does so within."""
    library = _glibc()
    if library is None:
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, _REPACKED_BYTES)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, _GREATEST)
        library.malloc_trim(0)


def give_back() -> None:
    """Give what is free in the heap back to the system."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@contextmanager
def reading_prompt(num_bytes: int) -> Iterator[None]:
    """Let the heap keep nothing of a prompt, for the length of a ``with`` block in which it is read.

    Args:
        num_bytes: of the prompt's hidden states in host memory; nothing is done below TRIMMED_BYTES.
    """
    library = _glibc() if num_bytes >= TRIMMED_BYTES else None
    if library is None:
        yield
        return
    has_blocks = num_bytes >= BLOCK_BYTES
    if has_blocks:
        library.mallopt(_MMAP_THRESHOLD, BLOCK_BYTES)
    try:
        yield
    finally:
        if has_blocks:
            library.mallopt(_MMAP_THRESHOLD, _GREATEST)
        library.malloc_trim(0)
