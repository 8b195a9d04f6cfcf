"""The processes over which a tensor-parallel model is spread, and what they do together.

All ranks make the same calls in the same order, with the same arguments. Before a call touches the model, ranks compare
by notices what they were given; a rank that waits longer than PATIENCE for the others ends with an error.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ... import compat
from ...errors import RankError, RankMismatch
from ...ops.peers import MAX_RANKS, clear
from ...reasons import Cause
from .notices import Notices, notices_of
from .rank_arguments import checksum

#: seconds that a rank waits for the others inside of a call
PATIENCE = 25.0
#: seconds between two looks at a device that may wait for other ranks, and at whether one of these has failed
_PAUSE, _BETWEEN_LOOKS = 20e-6, 0.5
#: how many differences between ranks an error names
_MOST_NAMED = 4
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
        if all(has_peers for (has_peers,) in self.told([peers is not None], "memory")):
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

    @property
    def notices(self) -> Notices:
        """What the ranks tell each other of their calls."""
        return notices_of(self.group)

    def _finish(self, start: Any, *arguments: Any) -> None:
        """Run a collective of torch.distributed; on the CPU the wait for it has an end."""
        try:
            if arguments[0].is_cuda:  # the device waits, and ``wait`` bounds that
                start(*arguments, group=self.group)
            else:
                self._wait_for(start(*arguments, group=self.group, async_op=True))
        except RankError:
            raise
        except RuntimeError as error:
            raise self._lost(str(error)) from error

    def _wait_for(self, work: Any) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                work.wait(timedelta(seconds=max(0.001, min(_BETWEEN_LOOKS, end - time.monotonic()))))
                return
            except RuntimeError:
                if work.is_completed() or time.monotonic() > end:
                    raise
            if self.notices.failure() is not None:
                raise self._lost("another rank has left the call")

    def _lost(self, why: str) -> RankError:
        first = next(iter(why.strip().splitlines()), "")
        return self.notices.now_lost(
            f"{self} has waited {PATIENCE:.0f} s for the other ranks, or has lost them: {first}. Another rank has "
            "failed, was interrupted, or made other calls"
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

    def any_of(self, done: torch.Tensor) -> torch.Tensor:
        """Return where any rank's bool tensor is True."""
        return self.gather(done.long().contiguous()).any(0)

    def same(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens that all ranks have chosen.

        Raises:
            RankMismatch: the ranks have chosen different tokens.
        """
        chosen = self.gather(tokens.contiguous())
        self.settle(tokens.device)
        for rank, other in enumerate(chosen.tolist()):
            if other != (first := chosen[0].tolist()):
                raise RankMismatch(
                    f"generate() has chosen the tokens {other} on rank {rank} and {first} on rank 0 of a model that is "
                    f"spread over {self.size} ranks, expected the same on all: the logits processors of a rank are "
                    "others, or draw other random numbers. Give all ranks the same ones"
                )
        return tokens

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
        look = time.monotonic() + _BETWEEN_LOOKS
        while not event.query():
            if (now := time.monotonic()) > end:
                raise self._lost("the device still waits")
            if now > look:
                look = now + _BETWEEN_LOOKS
                if self.notices.failure() is not None:
                    raise self._lost("another rank has left the call")
            time.sleep(_PAUSE)
        if self.peers is not None and int(self.peers.status):
            raise self._lost("the device has waited for them")

    # ---- before a call ------------------------------------------------------------------------------------------

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        """Be in a call that all ranks make, for the length of a ``with`` block; the others learn if it fails here.

        Args:
            what: the call, as the user writes it.

        Raises:
            RankError: the ranks have lost each other.
        """
        notices = self.notices
        with notices.call(what, PATIENCE), compat.bounded_waits(self.group, PATIENCE):
            notices.check_lost()
            try:
                yield
            except RankError:
                raise
            except RuntimeError as error:  # of stock code's collectives
                if not compat.is_lost_connection(error):
                    raise
                raise self._lost(str(error)) from error

    @property
    def are_lost(self) -> bool:
        """Whether no call over all ranks can be made any more."""
        return compat.store_of(self.group) is None or self.notices.lost is not None

    def told(self, facts: list[int], kind: str = "state") -> list[list[int]]:
        """Return what each rank tells. Every rank has to call this method.

        Args:
            kind: what it is about, for errors.
        """
        return [each["facts"] for each in self.notices.exchange(kind, {"facts": facts}, PATIENCE)]

    def agreed(self, reason: str | None) -> str | None:
        """Return the reason for stock code that all ranks follow: this rank's, or that another rank has one.

        Every rank has to call this method.
        """
        others = [rank for rank, (has_reason,) in enumerate(self.told([reason is not None], "reason")) if has_reason]
        if reason is not None or not others:
            return reason
        return Cause("other_rank", f"rank {others[0]}")

    def check_arguments(self, what: str, facts: dict[str, Any], kind: str = "arguments") -> None:
        """Check that all ranks were given the same.

        Args:
            what: the call, as the user writes it.
            facts: name -> value, as text or a number.

        Raises:
            RankMismatch: the ranks were given different things.
        """
        told = self.notices.exchange(kind, facts, PATIENCE)
        first = told[0]
        for rank, other in enumerate(told):
            odd = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
            if odd:
                named = "; ".join(
                    f"{name} is {_said(other, name)} on rank {rank} and {_said(first, name)} on rank 0"
                    for name in odd[:_MOST_NAMED]
                )
                more = f"; and {len(odd) - _MOST_NAMED} more" if len(odd) > _MOST_NAMED else ""
                raise RankMismatch(
                    f"{what} got other arguments or another state on rank {rank} than on rank 0 of a model that is "
                    f"spread over {self.size} ranks: {named}{more}; expected the same on all. Call {what} with the "
                    "same on every rank"
                )

    def check_alike(
        self, ids: torch.Tensor, mask: torch.Tensor | None, settings: list[Any], has_own_code: bool, chooses: bool
    ) -> tuple[bool, bool]:
        """Check that all ranks come to a loop with the same tokens, attention mask and settings.

        Args:
            has_own_code: whether this rank was given objects that may do anything.
            chooses: whether a plan may choose this rank's tokens.

        Returns:
            Whether any rank was given such objects, and whether plans of all ranks may choose.

        Raises:
            RankMismatch: the ranks were given different things.
        """
        facts = {"batch": ids.shape[0], "length": ids.shape[-1], "settings": repr(settings)}
        facts |= {"tokens": checksum(ids), "attention_mask": None if mask is None else checksum(mask)}
        self.check_arguments("generate()", facts, "prepared arguments")
        own_code, choosing = zip(*self.told([has_own_code, chooses], "code of the user's own"))
        return any(own_code), all(choosing)

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
        self._finish(functools.partial(dist.broadcast, group_src=0), first)
        self.settle(device)
        first = first.cpu()
        if torch.equal(first, own):
            yield
            return
        set_(first)
        try:
            yield
        finally:
            set_(own)


def _said(facts: dict[str, Any], name: str) -> str:
    if name not in facts:
        return "not given"
    text = str(facts[name])
    return text if len(text) <= 200 else f"{text[:200]}..."
