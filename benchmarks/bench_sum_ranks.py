"""Time of one sum over GPUs inside a CUDA graph: our op, NCCL's all-reduce and torch's ``one_shot_all_reduce``.

    torchrun --nproc-per-node 2 benchmarks/bench_sum_ranks.py --csv benchmarks/data/sum_ranks_h100.csv

A graph holds CALLS sums, each of the result of the one before; the time is a replay's, divided by CALLS, on the slowest
rank. NVLink multicast is off.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from hf_fastpath import ops
from hf_fastpath.decode.ranks import SLOTS, Ranks
from hf_fastpath.native import loader

CALLS, ROUNDS = 96, 30
SIZES = (4, 8, 16, 32, 64)
COLUMNS = ("date", "device", "ranks", "kilobytes", "what", "microseconds", "error")


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


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, help="file to which rows are appended")
    parser.add_argument("--kilobytes", type=int, nargs="+", default=SIZES)
    given = parser.parse_args(arguments)
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    loader.ensure("cuda")
    ranks = Ranks(dist.group.WORLD)
    ranks.connect(device)
    if rank == 0:
        print(f"{ranks.size} x {torch.cuda.get_device_name()}, sums through {ranks.transport}")
    rows = []
    for kilobytes in given.kilobytes:
        elements = kilobytes * 512
        x = torch.randn(elements, device=device, dtype=torch.bfloat16) / ranks.size
        exact = x.double()
        dist.all_reduce(exact)
        makers = {"nccl": lambda x=x: nccl, "one_shot_all_reduce": lambda x=x: one_shot(dist.group.WORLD, x)}
        if ranks.peers is not None:
            makers |= {
                "sum_ranks": lambda x=x: Ours(ranks, x, False),
                "sum_ranks + residual": lambda x=x: Ours(ranks, x, True),
            }
        for name, make in makers.items():
            function = make()
            error = ((function(x.clone()).double() - exact).norm() / exact.norm()).item()
            if isinstance(function, Ours):
                function.calls = CALLS - 2  # the two calls before the capture end with the last slot
            time = microseconds(captured(function, x.clone()), device)
            facts = date.today(), torch.cuda.get_device_name(), ranks.size, kilobytes, name
            rows.append((*facts, f"{time:.2f}", f"{error:.1e}"))
            if rank == 0:
                print(f"{kilobytes:3d} KB  {name:22s} {time:7.2f} us   error {error:.1e}", flush=True)
    if rank == 0 and given.csv is not None:
        is_new = not given.csv.exists()
        with given.csv.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([*([COLUMNS] if is_new else []), *rows])
    dist.barrier(device_ids=[device.index])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
