"""Page-locked host memory, by the part of CUDA's runtime that torch passes on."""

from __future__ import annotations

from contextlib import suppress

import torch


def lock_pages(address: int, num_bytes: int, device: torch.device) -> str | None:
    """Lock whole pages of host memory, so that a GPU's copy engine reads them by itself; return CUDA's error, or None.

    Args:
        address: where the first page begins.
        num_bytes: a multiple of the size of a page.
        device: any GPU; all GPUs may then read the pages.
    """
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        error = runtime.cudaHostRegister(address, num_bytes, 0)
        if int(error) == 0:
            return None
        # CUDA keeps the error until somebody asks. PyTorch asks behind each kernel, and would raise it at the next one.
        with suppress(RuntimeError):
            torch.ones(1, device=device)
    return runtime.cudaGetErrorString(error)


def unlock_pages(address: int, device: torch.device) -> None:
    """Undo :func:`lock_pages`; the host waits until the GPU has read what it was asked to."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)
