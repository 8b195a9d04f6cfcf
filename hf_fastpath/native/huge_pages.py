"""Memory in pages of 2 MB, so that reading weights misses fewer address translations; Linux gives them on request."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress

import torch

from ..registry import PLAIN_TENSORS

PAGE_BYTES = 2 << 20
#: the advice of ``madvise``, as in Linux' ``mman-common.h``
_HUGE_PAGE, _COLLAPSE = 14, 25
#: priority of the thread that moves: a tenth of a core that others want as well
_NICE = 10


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


class Move:
    """Moves the contents of tensors in host memory into huge pages at the same addresses, in a thread of its own.

    1 GB takes 0.3 to 2.4 seconds. Memory of files stays as it is; so does all memory if the Linux kernel has no free
    pages of that size. The thread keeps no tensor alive but the one that it is at, and gives way to other threads.

    Args:
        tensors: of any device and type; only plain tensors in host memory are moved, and a storage once.

    Attributes:
        num_bytes: bytes that lie in huge pages so far.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]):
        plain = (tensor for tensor in tensors if type(tensor) in PLAIN_TENSORS and tensor.device.type == "cpu")
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in plain}
        self.num_bytes = 0
        self._tensors = list(map(weakref.ref, storages.values()))
        self._thread = threading.Thread(target=self._run, name="hf_fastpath huge pages", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> int:
        """Wait until all is moved, or for a time; return the bytes that lie in huge pages then."""
        self._thread.join(seconds)
        return self.num_bytes

    def _run(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        for found in self._tensors:
            tensor = found()
            if tensor is not None:
                self.num_bytes += _advise(tensor, _COLLAPSE)
            del tensor
