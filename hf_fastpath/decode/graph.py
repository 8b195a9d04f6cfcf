"""Capture of a decode plan's program into a CUDA graph."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ..compat import below_autograd
from ..forks import after_fork
from .program import Program


class _Turns:
    """Who draws random numbers on CUDA devices: one thread at a time, over all models.

    torch refuses to draw while a graph is captured, and all graphs on a device read the seed and the offset of their
    numbers from the same two words, which each replay writes.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: dict[torch.device, torch.cuda.Stream] = {}  # where they were drawn last


_turns = _Turns()
after_fork(_turns.__init__)


def random_numbers_in_turn(device: torch.device) -> AbstractContextManager[None]:
    """Draw from the default generator of ``device`` while no other thread does, for the length of a ``with`` block."""
    return _turn(device) if device.type == "cuda" else nullcontext()  # the CPU's has a lock of its own


@contextmanager
def _turn(device: torch.device) -> Iterator[None]:
    with _turns.lock:
        stream = torch.cuda.current_stream(device)
        before = _turns.streams.get(device)
        if before is not None and before != stream:
            stream.wait_stream(before)
        _turns.streams[device] = stream
        yield


def capture(program: Program, device: torch.device) -> torch.cuda.CUDAGraph:
    """Capture ``program``, which has run eagerly before, into a graph; nothing is executed.

    Kernels find the KV buffers and lengths through device memory, so the graph serves any cache, prompt length and
    growth.

    Raises:
        RuntimeError: from CUDA, when something in the program cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)
    side.wait_stream(current)
    # Replays write the state of the random number generator that a capture makes; in inference mode they could do so
    # only in that mode.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.cuda.device(device),
        torch.cuda.stream(side),
        below_autograd(),
    ):
        # thread_local: another thread may allocate meanwhile. Not torch.cuda.graph(): that empties the allocator's
        # cache and collects garbage, a tenth of a second at every capture.
        # No garbage collection meanwhile: it may destroy an old graph, and that breaks the capture.
        collecting = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                program.run()
            finally:
                graph.capture_end()
        finally:
            if collecting:
                gc.enable()
    current.wait_stream(side)
    return graph
