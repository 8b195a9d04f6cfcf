"""Records of the kernels that a GPU has run, as CUPTI writes them for ``torch.profiler``; and kernels that mark places
between others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType


@dataclass(frozen=True)
class KernelRecord:
    """A kernel, copy or fill that a GPU has run.

    Attributes:
        name: of the kernel.
        start, end: microseconds since some time.
    """

    name: str
    start: float
    end: float


def put_marker(device: torch.device) -> None:
    """Start a kernel on the current stream that no model starts, and that waits for what is in front of it."""
    with torch.cuda.device(device):
        torch.cuda._sleep(1)


def kernel_records(run: Callable[[], object], device: torch.device) -> tuple[str, list[KernelRecord]]:
    """Return the name of marker kernels, and records of what the GPU does while ``run`` runs, in order of their starts.

    Raises:
        RuntimeError: the profiler records no kernels.
    """
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as trace:
        put_marker(device)
        torch.cuda.synchronize(device)
        run()
        torch.cuda.synchronize(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    found = [
        KernelRecord(event.name, event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type == DeviceType.CUDA and event.device_index == index and not event.is_user_annotation
    ]
    found.sort(key=lambda record: record.start)
    if not found:
        raise RuntimeError(
            "torch.profiler records no kernels: another profiler may hold CUPTI, or this process may not use it "
            "(in a container, CAP_SYS_ADMIN or the driver's NVreg_RestrictProfilingToAdminUsers=0 allows it)"
        )
    return found[0].name, found[1:]
