"""The processes over which a tensor-parallel model is spread, and what they do together.

All ranks make the same calls in the same order. While a call of ``generate()`` runs, a rank that waits longer than
PATIENCE for the others ends with an error.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import compat
from ..errors import RankError
from ..ops.peers import MAX_RANKS, clear
from ..reasons import Cause

#: seconds that a rank waits for the others inside of a call
PATIENCE = 25.0
#: seconds between two looks at a device that may wait for other ranks
_PAUSE = 20e-6
#: tokens of a prompt that the slowest device reads in a second
_TOKENS_A_SECOND = 500
#: bytes that a rank may send at once through the memory of other GPUs; more go through torch.distributed
MOST_SENT = 512 << 10
#: slots of the buffers: three that the calls of a step use in turn, and one for its last call, so that the first call
#: of the next step, which uses the first slot, never follows a call that uses the same
SLOTS = 4


class Peers:
    """Memory through which GPUs of one host send each other data; see ``ops.sum_ranks``.

    Args:
        ranks: the processes.
        device: this rank's GPU.

    Attributes:
        status: int32 [1] in pinned memory, 1 once a rank has not come in time.

    Raises:
        RuntimeError: the GPUs cannot see each other's memory.
    """

    def __init__(self, ranks: Ranks, device: torch.device):
        self.size, self.rank = ranks.size, ranks.rank
        self._of_rank = compat.shared_memory(ranks.group, SLOTS * self.size * MOST_SENT, device)
        self._buffers: dict[torch.dtype, list[torch.Tensor]] = {}
        self.status = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        clear(self.buffers(torch.float32)[self.rank])
        torch.cuda.synchronize(device)

    def buffers(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return each rank's buffer as ``ops.sum_ranks`` takes it."""
        if dtype not in self._buffers:
            sizes = SLOTS, self.size, MOST_SENT // dtype.itemsize
            self._buffers[dtype] = [self._of_rank(rank, sizes, dtype) for rank in range(self.size)]
        return self._buffers[dtype]


class Ranks:
    """The processes over which a model is spread.

    Args:
        group: their process group, which is not ours.

    Attributes:
        rank, size: of this process, and of the group.
    """

    def __init__(self, group: Any):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        #: None if sums of a step go through torch.distributed
        self.peers: Peers | None = None
        self._why_no_peers = ""

    def __deepcopy__(self, memo: dict) -> Ranks:
        return self

    def connect(self, device: torch.device) -> None:
        """Let the ranks' GPUs send each other data, if they can. Every rank has to call this method."""
        if device.type != "cuda" or self.peers is not None:
            return
        peers = None
        try:
            if not 2 <= self.size <= MAX_RANKS:
                raise RuntimeError(f"{self.size} ranks, 2 to {MAX_RANKS} are covered")
            peers = Peers(self, device)
        except RuntimeError as error:
            self._why_no_peers = next(iter(str(error).splitlines()), "")
        if all(has_peers for (has_peers,) in self.told([peers is not None], device)):
            self.peers = peers

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    @property
    def transport(self) -> str:
        """What the sums of a step go through."""
        if self.peers is not None:
            return "the GPUs' memory"
        why = f" ({self._why_no_peers})" if self._why_no_peers else ""
        return f"{dist.get_backend(self.group)}{why}"

    def _finish(self, start: Any, *arguments: Any) -> None:
        """Run a collective of torch.distributed; on the CPU the wait for it has an end."""
        try:
            if arguments[0].is_cuda:  # the device waits, and ``wait`` bounds that
                start(*arguments, group=self.group)
            else:
                start(*arguments, group=self.group, async_op=True).wait(timedelta(seconds=PATIENCE))
        except RuntimeError as error:
            raise self._lost(str(error)) from error

    def _lost(self, why: str) -> RankError:
        first = next(iter(why.strip().splitlines()), "")
        return RankError(
            f"{self} has waited {PATIENCE:.0f} s for the other ranks, or has lost them: {first}. Another rank has "
            "failed, was interrupted, or made other calls. Look for the first error of all ranks, end all processes "
            "and start anew"
        )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum a contiguous tensor over all ranks, in place; all ranks get the same bits."""
        self._finish(dist.all_reduce, x, dist.ReduceOp.SUM)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return [size, ...] with the contiguous tensors of all ranks, which have one shape."""
        out = x.new_empty(self.size, *x.shape)
        self._finish(compat.all_gather, out.view(-1), x.view(-1))
        return out

    def of_first(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first rank's tensor; the tensors of all ranks have one shape and dtype."""
        return self.gather(x.contiguous())[0].clone()

    def settle(self, device: torch.device, tokens: int = 1) -> None:
        """Wait until the device has done all that it was given, so that the host may look at results.

        Args:
            tokens: number of tokens that the device reads meanwhile; a long prompt takes its time.

        Raises:
            RankError: the device has not done so in time.
        """
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self.wait(event, PATIENCE + tokens / _TOKENS_A_SECOND)

    def wait(self, event: torch.cuda.Event, seconds: float | None = None) -> None:
        """Wait for the device, which may wait for other ranks; at most PATIENCE if ``seconds`` is None.

        Raises:
            RankError: the device has not passed the event in time.
        """
        end = time.monotonic() + (PATIENCE if seconds is None else seconds)
        while not event.query():
            if time.monotonic() > end:
                raise self._lost("the device still waits")
            time.sleep(_PAUSE)
        if self.peers is not None and int(self.peers.status):
            raise self._lost("the device has waited for them")

    # ---- before a call ------------------------------------------------------------------------------------------

    def told(self, facts: list[int], device: torch.device) -> list[list[int]]:
        """Return what each rank tells; ranks may come late, as to any collective of the user's.

        Every rank has to call this method.
        """
        mine = torch.tensor(facts, dtype=torch.long, device=device)
        out = mine.new_empty(self.size * len(facts))
        compat.all_gather(out, mine, group=self.group)
        return out.view(self.size, -1).tolist()

    def agreed(self, reason: str | None, device: torch.device) -> str | None:
        """Return the reason for stock code that all ranks follow: this rank's, or that another rank has one.

        Every rank has to call this method.
        """
        others = [rank for rank, (has_reason,) in enumerate(self.told([reason is not None], device)) if has_reason]
        if reason is not None or not others:
            return reason
        return Cause("other_rank", f"rank {others[0]}")

    def check_alike(
        self, ids: torch.Tensor, mask: torch.Tensor | None, settings: list[Any], has_own_code: bool
    ) -> bool:
        """Check that all ranks were given the same tokens, attention mask and settings.

        Args:
            has_own_code: whether this rank was given objects that may do anything.

        Returns:
            Whether any rank was.

        Raises:
            ValueError: the ranks were given different things.
        """
        seen = [b"" if each is None else each.cpu().numpy().tobytes() for each in (ids, mask)]
        facts = [*ids.shape, *map(zlib.crc32, (*seen, repr(settings).encode()))]
        *told, own_code = zip(*self.told([*facts, has_own_code], ids.device))
        told = list(zip(*told))
        for rank, other in enumerate(told):
            if other != told[0]:
                names = ("batch", "length", "tokens", "attention_mask", "settings")
                odd = [name for name, first, its in zip(names, told[0], other) if first != its]
                raise ValueError(
                    f"generate() got other {', '.join(odd)} on rank {rank} than on rank 0 of a model that is spread "
                    f"over {self.size} ranks, expected the same on all: {told[0][:2]} and {other[:2]} are batch and "
                    "length"
                )
        return any(own_code)

    @contextmanager
    def one_generator(self, device: torch.device) -> Iterator[None]:
        """Draw the first rank's random numbers on all ranks for the length of a ``with`` block.

        The default generator of a rank that had another state than the first rank's gets its own state back.
        """
        get, set_ = (
            (torch.get_rng_state, torch.set_rng_state)
            if device.type == "cpu"
            else (lambda: torch.cuda.get_rng_state(device), lambda state: torch.cuda.set_rng_state(state, device))
        )
        own = get()
        first = own.to(device, copy=True)
        dist.broadcast(first, group=self.group, group_src=0)
        first = first.cpu()
        if torch.equal(first, own):
            yield
            return
        set_(first)
        try:
            yield
        finally:
            set_(own)
