"""R, the read bandwidth: every speed is given as a fraction of what R allows."""

from __future__ import annotations

import time

import torch

from .native.huge_pages import ask_for
from .ops.read_stream import SPEC, variants

#: bytes that are read: far more than any cache holds, and so many (2 ms on an H200) that the launch does not matter
CUDA_BYTES, CPU_BYTES = 8 * 1024**3, 1024**3
#: share of the free memory that the buffer takes, if that is less
FREE_SHARE = 0.8
#: elements that are drawn at random; the buffer repeats them, because drawing gigabytes takes longer than reading them
PATTERN_ELEMENTS = 1 << 24


def read_buffer(device: torch.device | str, num_bytes: int | None = None) -> torch.Tensor:
    """Make random float32 memory with which to measure the read bandwidth of ``device``.

    A caller that measures between other timings should keep one buffer: a virtual machine that gives freed memory back
    to its host is slower for seconds after a gigabyte was freed.

    Args:
        device: ``"cpu"`` or a CUDA device.
        num_bytes: size of the buffer; None means 8 GiB on CUDA, or less if less is free, and 1 GiB on the CPU.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA device.
    """
    device = torch.device(device)
    if device.type == "cuda":
        default = min(CUDA_BYTES, int(torch.cuda.mem_get_info(device)[0] * FREE_SHARE))
    elif device.type == "cpu":
        default = CPU_BYTES
    else:
        raise ValueError(f"device is {str(device)!r}, expected 'cpu' or 'cuda'")
    return _random_floats(device, (num_bytes or default) // 4)


def measure_read_bandwidth(device: torch.device | str, repeats: int = 9, buffer: torch.Tensor | None = None) -> float:
    """Measure the bytes a second that ``device`` reads at best: the fastest of all repeats and all ways to read.

    On the CPU, ``torch.get_num_threads()`` threads read. If no native library is loaded, the PyTorch reference reads,
    which is slower, so that the result is a lower bound.

    Args:
        device: ``"cpu"`` or a CUDA device.
        repeats: timed reads of each variant.
        buffer: the memory to read; with None, a new :func:`read_buffer`.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA device.
    """
    buffer = read_buffer(device) if buffer is None else buffer
    seconds_of = _cuda_seconds if buffer.is_cuda else _cpu_seconds
    best = min(seconds_of(buffer, variant, repeats) for variant in variants(buffer.device))
    return buffer.nbytes / best


def _random_floats(device: torch.device, count: int) -> torch.Tensor:
    """Make float32 [count] of random values; they are not zeros because some memory reads zeros faster."""
    pattern = torch.randn(min(count, PATTERN_ELEMENTS), device=device, dtype=torch.float32)
    buffer = torch.empty(count, device=device, dtype=torch.float32)
    ask_for(buffer)  # a patched model's weights lie in such pages as well
    for chunk in buffer.split(PATTERN_ELEMENTS):
        chunk.copy_(pattern[: chunk.numel()])
    return buffer


def _cpu_seconds(buffer: torch.Tensor, variant: int, repeats: int) -> float:
    SPEC.overload(buffer, variant)  # wakes the thread pool
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        SPEC.overload(buffer, variant)
        best = min(best, time.perf_counter() - start)
    return best


def _cuda_seconds(buffer: torch.Tensor, variant: int, repeats: int) -> float:
    with torch.cuda.device(buffer.device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        SPEC.overload(buffer, variant)  # loads the kernel, and keeps the GPU busy while the host queues the others
        events[0].record()
        for event in events[1:]:
            SPEC.overload(buffer, variant)
            event.record()
        events[-1].synchronize()
        return min(a.elapsed_time(b) for a, b in zip(events, events[1:])) / 1000
