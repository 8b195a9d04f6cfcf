"""Pairs of a row and an expert that was chosen for it, sorted by expert: an expert's rows are one product then."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch


def sorted_pairs(local: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort pairs.

    Args:
        local: int64 [pairs], the experts; those outside of [0, count) come last.
        count: number of experts.

    Returns:
        The experts in order, ``count`` for those that come last; int64 [pairs], the place of each pair among ``local``;
        int32 [count], the place behind the last pair of each expert.
    """
    sorted_ids, order = torch.where((local >= 0) & (local < count), local, count).sort(stable=True)
    every = torch.arange(count, device=local.device)
    return sorted_ids, order, torch.searchsorted(sorted_ids, every, right=True, out_int32=True)


def one_by_one(
    rows: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    ends: torch.Tensor,
    compute: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Run the experts that were chosen one after the other; the host waits for the choice.

    Args:
        rows: [rows, hidden_size].
        weights: [rows, top_k], what outputs are multiplied by.
        order, ends: as :func:`sorted_pairs` gives them.
        compute: gives an expert's outputs, [count, hidden_size], for the rows at int64 [count].

    Returns:
        [rows, hidden_size] in float32.
    """
    total = rows.new_zeros(rows.shape, dtype=torch.float32)
    places, shares = order // weights.shape[1], weights.flatten()[order].float().unsqueeze(-1)
    for expert, (begin, end) in enumerate(pairwise((0, *ends.tolist()))):
        if begin < end:
            mine = places[begin:end]
            total.index_add_(0, mine, compute(expert, mine) * shares[begin:end])
    return total
