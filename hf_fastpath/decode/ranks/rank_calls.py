"""Calls of a step in which ranks put their outputs together, and the pass that makes them ops over the GPUs' memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from ... import ops
from ...compat import ShardStyle
from ...ops.peers import ELEMENTS
from ..calls.named_calls import Call, Step
from ..calls.pass_table import CallList
from .process_group import MOST_SENT, SLOTS, Ranks

#: where a module of a local model keeps how it is spread
SHARD_KEY = "_hf_fastpath_shard"


@dataclass(frozen=True)
class Shard:
    """How a module is spread over ranks.

    Attributes:
        ranks: the processes.
        style: the way in which the module is spread.
        first: number of the shard's first output feature among all; of ``SPLIT_ROWS``, of its first input feature; of
            an embedding, of its first row; of experts, of its first expert.
        total: number of all of them.
        features: number of features that the rank's output has.
        dtype: type of outputs.
    """

    ranks: Ranks
    style: ShardStyle
    first: int
    total: int
    features: int
    dtype: torch.dtype


def shard_of(module: nn.Module) -> Shard | None:
    """Return how a module of a local model is spread; None if the rank has all of it."""
    return vars(module).get(SHARD_KEY)


def style_of(module: nn.Module) -> ShardStyle | None:
    """Return the way in which a module of a local model is spread; None if the rank has all of it."""
    shard = shard_of(module)
    return None if shard is None else shard.style


def summed(x: torch.Tensor, residual: torch.Tensor | None, shard: Shard) -> torch.Tensor:
    """Return the sum of ``x`` over all ranks, plus ``residual``; ``x`` may be overwritten."""
    total = shard.ranks.sum(x.contiguous())
    return total if residual is None else residual + total


def gathered(x: torch.Tensor, shard: Shard, first_end: int = 0, second_end: int = 0) -> torch.Tensor:
    """Return [..., total], the features of all ranks, given [..., own features]; parts as of ``ops.gather_ranks``."""
    width = -(-shard.total // shard.ranks.size)  # the last rank may have fewer
    whole = shard.ranks.gather(nn.functional.pad(x, (0, width - x.shape[-1]))).movedim(0, -2)
    parts = whole.tensor_split((first_end, second_end), dim=-1)
    return torch.cat([each.flatten(-2) for each in parts], dim=-1)[..., : shard.total].contiguous()


def own_inputs(x: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Return this rank's part of [..., total] features, as a view."""
    return x[..., shard.first : shard.first + -(-shard.total // shard.ranks.size)]


def own_rows(tokens: torch.Tensor, embedding: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Return rows of this rank's ``embedding`` for ``tokens``; any row stands for a token of another rank.

    Raises:
        IndexError: a token is not in the model's vocabulary; raised on the CPU alone.
    """
    if tokens.device.type == "cpu" and bool(((tokens < 0) | (tokens >= shard.total)).any()):
        raise IndexError(f"tokens are {tokens.min()} to {tokens.max()}, expected 0 to {shard.total - 1}")
    return (tokens - shard.first).clamp(0, len(embedding) - 1)


def own_embeddings(x: torch.Tensor, tokens: torch.Tensor, embedding: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Set the rows of ``x`` that stand for tokens of other ranks to 0, in place."""
    rows = tokens - shard.first
    return x.masked_fill_(((rows < 0) | (rows >= len(embedding)))[..., None], 0)


#: calls that go through torch.distributed
COLLECTIVES = (summed, gathered)


# ---- over the GPUs' memory ----------------------------------------------------------------------------------------


def _is_sendable(call: Call, step: Step) -> bool:
    """Whether an op over the GPUs' memory takes the place of a call."""
    if call.op not in COLLECTIVES:
        return False
    shard: Shard = call.arguments["shard"]
    if shard.ranks.peers is None or shard.features % ELEMENTS:
        return False
    if call.op is gathered and shard.total != shard.ranks.size * shard.features:
        return False
    return step.rows * shard.features * shard.dtype.itemsize <= MOST_SENT


def through_peers(listing: CallList, step: Step) -> None:
    """Pass: in a step that is captured, send through the GPUs' memory what ranks put together.

    The first such call of a step uses the first slot, and the last one the last slot; see ``process_group.SLOTS``.
    """
    if not step.programmatic_launch:
        return
    calls = listing.calls
    found = [place for place, call in enumerate(calls) if _is_sendable(call, step)]
    if len(found) < 2:
        return
    made = list(calls)
    for number, place in enumerate(found):
        call, shard = calls[place], calls[place].arguments["shard"]
        slot = SLOTS - 1 if place == found[-1] else number % (SLOTS - 1)
        through = dict(buffers=shard.ranks.peers.buffers(shard.dtype), status=shard.ranks.peers.status)
        through |= dict(rank=shard.ranks.rank, slot=slot, programmatic_launch=True)
        others = {name: value for name, value in call.arguments.items() if name != "shard"}
        op = ops.sum_ranks.overload if call.op is summed else ops.gather_ranks.overload
        made[place] = replace(call, op=op, arguments=others | through)
    listing.calls = made
