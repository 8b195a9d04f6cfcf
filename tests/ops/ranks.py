"""Ranks that send each other data, all on one GPU: each has a stream of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_fastpath.ops.peers import clear


class Exchange:
    """Buffers of ``size`` ranks, and streams on which they run.

    Attributes:
        status: of all ranks.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, size: int, room: int, slots: int = 3):
        self.buffers = [torch.empty(slots, size, room, device=device, dtype=dtype) for _ in range(size)]
        for buffer in self.buffers:
            clear(buffer)
        self.status = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.streams = [torch.cuda.Stream(device) for _ in range(size)]
        self.slots, self.calls = slots, 0

    def run(
        self, op: Callable[..., torch.Tensor], given: list[torch.Tensor], residual: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Call ``op`` with each row of every rank's tensor in turn; return each rank's results, stacked."""
        torch.cuda.synchronize()
        found: list[list[torch.Tensor]] = [[] for _ in given]
        for row in range(len(given[0])):
            more = {} if residual is None else {"residual": residual[row]}
            for rank, stream in enumerate(self.streams):
                with torch.cuda.stream(stream):
                    place = rank, self.calls % self.slots
                    found[rank].append(op(given[rank][row], self.buffers, self.status, *place, **more))
            self.calls += 1
        torch.cuda.synchronize()
        assert not int(self.status)
        return [torch.stack(each) for each in found]
