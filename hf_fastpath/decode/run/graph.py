"""Capture of a decode plan's calls into a CUDA graph."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from ...compat import below_autograd
from ...forks import after_fork


class _Turns:
    """A lock on random numbers of CUDA devices: only one thread at a time draws, over all models.

    torch refuses to draw while a graph is captured, and all graphs on a device read the seed and the offset of their
    numbers from the same two words, which each replay writes.
    """

    def __init__(self) -> None:
        self.forget_other_threads()

    def forget_other_threads(self) -> None:
        """Forget what threads hold: in the child of a fork, these threads do not exist."""
        self.lock = threading.RLock()
        self.streams: dict[torch.device, torch.cuda.Stream] = {}  # the stream that last drew on each device


_turns = _Turns()
after_fork(_turns.forget_other_threads)


def random_numbers_in_turn(device: torch.device) -> AbstractContextManager[None]:
    """Let no other thread draw from the default generator of ``device`` for the length of a ``with`` block."""
    return _turn(device) if device.type == "cuda" else nullcontext()  # the CPU's generator has a lock of its own


@contextmanager
def _turn(device: torch.device) -> Iterator[None]:
    with _turns.lock:
        stream = torch.cuda.current_stream(device)
        before = _turns.streams.get(device)
        if before is not None and before != stream:
            stream.wait_stream(before)
        _turns.streams[device] = stream
        yield


def new_pool(device: torch.device) -> Any:
    """Return memory for graphs of which one runs after the other."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def capture(run: Callable[[], None], device: torch.device, pool: Any = None) -> torch.cuda.CUDAGraph:
    """Capture what ``run`` starts, which has run eagerly before, into a graph; the capture executes nothing.

    Kernels find the KV buffers and lengths through device memory, so the graph serves any cache, prompt length and
    growth.

    Args:
        pool: from :func:`new_pool`; None for memory of its own.

    Raises:
        RuntimeError: CUDA cannot capture something in it.
    """
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)
    side.wait_stream(current)
    # Each replay writes the random number generator's state, which the capture allocates. If it were allocated in
    # inference mode, replays could write it in that mode only.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.cuda.device(device),
        torch.cuda.stream(side),
        below_autograd(),
    ):
        # thread_local: another thread may allocate meanwhile. torch.cuda.graph() is not used: it empties the
        # allocator's cache and collects garbage, which takes a tenth of a second at every capture. Garbage collection
        # is off meanwhile: a collection may destroy an old graph, and that breaks the capture.
        collecting = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                run()
                graph.capture_end()
            except BaseException:
                _end_failed(graph, device)
                raise
        finally:
            if collecting:
                gc.enable()
    current.wait_stream(side)
    return graph


def _end_failed(graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
    """End a capture that failed. torch then leaves the generator of random numbers as it is during a capture, where it
    draws no more; one that succeeds gives it back."""
    with suppress(RuntimeError):
        graph.capture_end()
    number = torch.zeros(1, device=device)
    after = torch.cuda.CUDAGraph()
    after.capture_begin(capture_error_mode="thread_local")
    number.zero_()
    after.capture_end()
