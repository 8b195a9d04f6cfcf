"""What the host waits for while other threads give the device work."""

from __future__ import annotations

import torch


def to_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copy tensors of one device to the host, and wait for them; tensors on the CPU are returned as they are.

    ``tolist()`` and ``cpu()`` copy to pageable memory. The driver waits for such a copy inside of it, where other
    threads' launches have to wait as well: a thread that reads a prompt beside one that runs steps would get about one
    launch through a step.
    """
    return list(tensors) if tensors[0].device.type != "cuda" else OnItsWay(*tensors).wait()


class OnItsWay:
    """Copies of tensors of one device, on their way to the host; see :func:`to_host`."""

    def __init__(self, *tensors: torch.Tensor):
        device, is_cuda = tensors[0].device, tensors[0].is_cuda
        self._found = [torch.empty(each.shape, dtype=each.dtype, device="cpu", pin_memory=is_cuda) for each in tensors]
        for target, source in zip(self._found, tensors):
            target.copy_(source, non_blocking=True)
        self._event = _event_on(device) if is_cuda else None

    def wait(self) -> list[torch.Tensor]:
        """Return the copies, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._found


def wait_for(device: torch.device) -> None:
    """Wait for what this thread has given a device to do."""
    if device.type == "cuda":
        _event_on(device).synchronize()


def _event_on(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
