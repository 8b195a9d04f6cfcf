"""New tokens behind what a cache holds, as a forward is given them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...cache.fastpath_cache import FastpathCache
from ...reasons import Cause
from .eligibility import INDEX_DTYPES, is_left_padding


@dataclass
class NewTokens:
    """New tokens behind what a cache holds.

    Attributes:
        ids: int64 or int32 [batch, count].
        cache: what the tokens follow.
        mask: [batch, held and count], or None.
        position_ids: [batch or 1, count], or None.
        past: tokens of each sequence that the cache holds.
    """

    ids: torch.Tensor
    cache: FastpathCache
    mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    past: int

    def starts(self) -> list[int] | None | Cause:
        """Return the left padding of each row, None if there is none; or the reason why the mask says more."""
        mask, batch, length = self.mask, len(self.ids), self.past + self.ids.shape[1]
        if mask is None:
            return None
        if mask.dim() == 2 and mask.device == self.ids.device:
            fits = mask.shape == (batch, length) or (mask.shape[0] == batch and not self.cache.key_layers)
            if fits and bool(mask.all()):
                return None
            if fits and self.cache.key_layers and is_left_padding(mask):
                return (mask == 0).sum(1).tolist()
        return Cause("attention_mask", f"{mask.dtype} {tuple(mask.shape)} on {mask.device}")

    def positions(self) -> list[int] | Cause:
        """Return the position of each row's first token: if none is given, behind all that the cache holds; or the
        reason why they are not known."""
        (batch, count), given = self.ids.shape, self.position_ids
        if given is None:
            return [self.past] * batch
        if given.dtype in INDEX_DTYPES and given.dim() == 2 and given.shape in ((batch, count), (1, count)):
            rows = given.tolist()
            if all(row == list(range(row[0], row[0] + count)) for row in rows):
                return [row[0] for row in rows] * (batch // len(rows))
        return Cause("position_ids", f"{given.dtype} {tuple(given.shape)} on {given.device}")
