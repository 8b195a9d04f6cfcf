"""Page-locked host memory: a GPU's copy engine reads it by itself, at the speed of the bus.

Tensors are locked where they lie, but for their ends: pages that also hold something else stay as they are. A copy of
other data on a locked page would not wait until it has been made, as copies from host memory else do, and CUDA refuses
one that begins on a locked page and ends on another. Copies of a whole tensor, as accelerate makes them, begin on the
page where the tensor does, which is never locked. Pages are locked once, whoever asks, and as long as somebody holds
them.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterable

import torch

from ...compat import lock_pages, unlock_pages
from ...forks import after_fork
from ..run.graph import random_numbers_in_turn


class Pages:
    """Whole pages of host memory, which stay locked as long as this object lives.

    Args:
        first, end: addresses.
        tensors: what lies there; their memory stays allocated as long as it is locked.
        device: the GPU that reads them.

    Raises:
        RuntimeError: CUDA cannot lock them.
    """

    def __init__(self, first: int, end: int, tensors: list[torch.Tensor], device: torch.device):
        self.num_bytes = end - first
        error = lock_pages(first, self.num_bytes, device)
        if error is not None:
            raise RuntimeError(f"CUDA did not lock {self.num_bytes / 1e9:.3f} GB of host memory: {error}")
        storages = [tensor.untyped_storage() for tensor in tensors]
        release = weakref.finalize(self, _unlock, first, device, storages, os.getpid())
        release.atexit = False  # CUDA may be gone before, and the process gives all memory back


def _unlock(first: int, device: torch.device, storages: list, owner: int) -> None:
    if os.getpid() == owner:  # the child of a fork has no CUDA
        with random_numbers_in_turn(device):  # a device must not be waited for while another thread captures
            unlock_pages(first, device)
    storages.clear()


_held: weakref.WeakValueDictionary[tuple[int, int], Pages] = weakref.WeakValueDictionary()


class _Door:
    """A lock that the child of a fork makes anew."""

    def __init__(self) -> None:
        self.make_anew()

    def make_anew(self) -> None:
        self.lock = threading.Lock()


_door = _Door()
after_fork(_door.make_anew)


def lock(tensors: Iterable[torch.Tensor], device: torch.device) -> list[Pages]:
    """Lock the memory of ``tensors`` where it is not locked yet.

    Args:
        tensors: in host memory; of each, :func:`whole_pages` are locked.
        device: a GPU.

    Returns:
        The pages, which the caller holds; none for tensors that were page-locked by somebody else.

    Raises:
        RuntimeError: CUDA cannot lock all of them; then none stay locked that were not before.
    """
    found = []
    with _door.lock:
        for (first, end), inside in _runs(tensors).items():
            pages = _held.get((first, end))
            if pages is None and all(tensor.is_pinned() for tensor in inside):
                continue
            if pages is None:
                pages = _held[first, end] = Pages(first, end, inside, device)
            found.append(pages)
    return found


def locked_bytes() -> int:
    """Return the bytes of host memory that are locked now."""
    return sum(pages.num_bytes for pages in list(_held.values()))


def _runs(tensors: Iterable[torch.Tensor]) -> dict[tuple[int, int], list[torch.Tensor]]:
    """Return runs of pages, and the tensors on each; tensors that share a page are of one run.

    CUDA refuses to lock a page twice.
    """
    found: dict[tuple[int, int], list[torch.Tensor]] = {}
    run: list[torch.Tensor] = []
    first = end = 0
    for tensor in sorted(tensors, key=torch.Tensor.data_ptr):
        begins, ends = whole_pages(tensor)
        if begins == ends:
            continue
        if run and begins < end:
            del found[first, end]
        else:
            run, first, end = [], begins, 0
        run.append(tensor)
        end = max(end, ends)
        found[first, end] = run
    return found


def whole_pages(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the pages begin and end that hold nothing but elements of a tensor, without the one on which the
    tensor begins; the same address twice if there are none."""
    page = mmap.PAGESIZE
    first = (tensor.data_ptr() // page + 1) * page
    return first, max(first, (tensor.data_ptr() + extent(tensor)) // page * page)


def extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (1 + steps) * tensor.element_size() if tensor.numel() else 0
