"""Time of one sum over GPUs inside a CUDA graph: our op, NCCL's all-reduce and torch's ``one_shot_all_reduce``.

    torchrun --nproc-per-node 2 benchmarks/bench_sum_ranks.py --csv

A graph holds CALLS sums, each of the result of the one before; the time is a replay's, divided by CALLS, on the slowest
rank. NVLink multicast is off.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from hf_fastpath import ops
from hf_fastpath.bench import measure
from hf_fastpath.decode.ranks.process_group import SLOTS, Ranks
from hf_fastpath.native import loader

CALLS, ROUNDS = 96, 30
SIZES = (4, 8, 16, 32, 64)


def captured(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.cuda.CUDAGraph:
    """Capture CALLS calls, each of the result of the one before."""
    for _ in range(2):
        function(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(CALLS):
            x = function(x)
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, device: torch.device) -> float:
    """Return the median time of a call, on the slowest rank."""
    times = []
    for _ in range(ROUNDS):
        dist.barrier(device_ids=[device.index])
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / CALLS)
    found = torch.tensor([statistics.median(times)], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


class Ours:
    """``ops.sum_ranks`` over the ranks' memory, with a residual of zeros; slots are used in turn."""

    def __init__(self, ranks: Ranks, like: torch.Tensor, adds: bool):
        self.ranks, self.buffers, self.calls = ranks, ranks.peers.buffers(like.dtype), 0
        self.residual = torch.zeros_like(like) if adds else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # the slots of a replay begin with the first and end with the last, as those of a step do
        place = self.calls % CALLS
        slot = SLOTS - 1 if place == CALLS - 1 else place % (SLOTS - 1)
        self.calls += 1
        given = x, self.buffers, self.ranks.peers.status, self.ranks.rank, slot, self.residual, True
        return ops.sum_ranks.overload(*given)


def nccl(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def one_shot(group: dist.ProcessGroup, like: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    from torch.distributed import _symmetric_memory

    shared = _symmetric_memory.empty(like.numel(), dtype=like.dtype, device=like.device)
    _symmetric_memory.rendezvous(shared, group.group_name)
    shared.copy_(like.flatten())

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group.group_name)

    return function


def sum_times(kilobytes: int, device: torch.device, ranks: Ranks | None = None) -> dict[str, float]:
    """Return microseconds of a sum of ``kilobytes`` of bfloat16, by way; every rank has to call this.

    Raises:
        AssertionError: a sum is wrong.
    """
    if ranks is None:
        ranks = Ranks(dist.group.WORLD)
        ranks.connect(device)
    x = torch.randn(kilobytes * 512, device=device, dtype=torch.bfloat16) / ranks.size
    exact = x.double()
    dist.all_reduce(exact)
    makers = {"nccl": lambda: nccl, "one_shot_all_reduce": lambda: one_shot(dist.group.WORLD, x)}
    if ranks.peers is not None:
        makers |= {"sum_ranks": lambda: Ours(ranks, x, False), "sum_ranks + residual": lambda: Ours(ranks, x, True)}
    times = {}
    for name, make in makers.items():
        function = make()
        error = ((function(x.clone()).double() - exact).norm() / exact.norm()).item()
        assert error < 2**-7, f"{name} of {kilobytes} KB is wrong by {error:.1e}"
        if isinstance(function, Ours):
            function.calls = CALLS - 2  # the two calls before the capture end with the last slot
        times[name] = microseconds(captured(function, x.clone()), device)
    return times


def join_ranks() -> torch.device:
    """Join the processes that torchrun has started; return the GPU of this one."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    loader.ensure("cuda")
    return device


def main(arguments: Sequence[str] | None = None) -> int:
    options = dict(prog=Path(__file__).name, description=__doc__)
    parser = argparse.ArgumentParser(**options, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kilobytes", type=int, nargs="+", default=SIZES)
    measure.add_csv_argument(parser)
    given = parser.parse_args(arguments)
    device = join_ranks()
    rank = device.index
    path = measure.chosen_csv(given.csv, "sum_ranks", device)
    ranks = Ranks(dist.group.WORLD)
    ranks.connect(device)
    if rank == 0:
        print(f"{ranks.size} x {torch.cuda.get_device_name()}, ours through {ranks.transport}")
    for kilobytes in given.kilobytes:
        for name, found in sum_times(kilobytes, device, ranks).items():
            if rank:
                continue
            print(f"{kilobytes:3d} KB  {name:22s} {found:7.2f} us", flush=True)
            if path is not None:
                row = {"ranks": ranks.size, "kilobytes": kilobytes, "what": name, "microseconds": round(found, 2)}
                measure.append_csv(path, [measure.environment(device) | row])
    dist.barrier(device_ids=[device.index])
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
