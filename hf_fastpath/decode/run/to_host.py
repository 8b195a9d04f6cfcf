"""What the host waits for while other threads give the device work."""

from __future__ import annotations

import torch


def to_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copy tensors of one device to the host, and wait for them; tensors on the CPU are returned as they are.

    ``tolist()`` and ``cpu()`` copy to pageable memory. The driver waits for such a copy inside of it, where other
    threads' launches have to wait as well: a thread that reads a prompt beside one that runs steps would get about one
    launch through a step.
    """
    device = tensors[0].device
    if device.type != "cuda":
        return list(tensors)
    found = [torch.empty(each.shape, dtype=each.dtype, device="cpu", pin_memory=True) for each in tensors]
    for target, source in zip(found, tensors):
        target.copy_(source, non_blocking=True)
    wait_for(device)
    return found


def wait_for(device: torch.device) -> None:
    """Wait for what this thread has given a device to do."""
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
