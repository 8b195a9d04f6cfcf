"""Memory in pages of 2 MB, so that reading weights misses fewer address translations; Linux gives them on request."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterable

import torch

from ..registry import PLAIN_TENSORS

PAGE_BYTES = 2 << 20
#: the advice of ``madvise``, as in Linux' ``mman-common.h``
_HUGE_PAGE, _COLLAPSE = 14, 25


@functools.cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def _madvise(address: int, num_bytes: int, advice: int) -> bool:
    """Give advice about memory to the Linux kernel; return whether the kernel took it."""
    libc = _libc()
    return libc is not None and libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice) == 0


def _advise(tensor: torch.Tensor, advice: int) -> int:
    """Return the bytes of whole pages in the tensor's storage for which the Linux kernel took the advice."""
    storage = tensor.untyped_storage()
    first = -(-storage.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    end = (storage.data_ptr() + storage.nbytes()) // PAGE_BYTES * PAGE_BYTES
    return end - first if end > first and _madvise(first, end - first, advice) else 0


def ask_for(tensor: torch.Tensor) -> None:
    """Ask for huge pages for a new tensor in host memory; nothing may have been written to the tensor yet."""
    if tensor.device.type == "cpu":
        _advise(tensor, _HUGE_PAGE)


def move_into(tensors: Iterable[torch.Tensor]) -> int:
    """Move the contents of ``tensors`` in host memory into huge pages at the same addresses; 1 GB takes 0.6 seconds.

    Memory of files stays as it is; so does all memory if the Linux kernel has no free pages of that size.

    Returns:
        Bytes that lie in huge pages now.
    """
    plain = (tensor for tensor in tensors if type(tensor) in PLAIN_TENSORS and tensor.device.type == "cpu")
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in plain}
    return sum(_advise(tensor, _COLLAPSE) for tensor in storages.values())
