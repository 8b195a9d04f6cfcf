"""The places of a step's new tokens, and memory for their keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...ops.kv_cache import KVCache
from ..model.attention_part import AttentionPart


class Staging:
    """Buffers for keys and values of a layer's new tokens before they are quantized; the layers take turns.

    The buffers are float32 caches of query_len slots.

    Args:
        seq_lens: int32 [batch], each query_len.
        shapes: number of heads and head_dim of the layers' caches.
    """

    def __init__(self, seq_lens: torch.Tensor, query_len: int, shapes: set[tuple[int, int]]):
        self.seq_lens = seq_lens
        self._buffers = {
            (heads, dim): [
                torch.zeros(len(seq_lens), heads, query_len, dim, dtype=torch.float32, device=seq_lens.device)
                for _ in range(2)
            ]
            for heads, dim in shapes
        }

    def of(self, part: AttentionPart) -> KVCache:
        """Return K and V, [batch, heads, query_len, head_dim], for ``part``."""
        k, v = self._buffers[part.cache_shape]
        return KVCache(k, v)


@dataclass
class Positions:
    """The places of the new tokens, as tensors or as registers of a plan.

    Attributes:
        angles: cos and sin for every kind of layer, [batch or 1, query_len, rotary_dim] in the model's dtype; see
            ``AttentionPart.layer_type``. The dict is empty without rotary embedding.
        seq_lens: int32 [batch], tokens that a row holds with the new ones.
        starts: int32 [batch], left padding of each row, or None.
        kv_tables: for caches with pages (True) and others (False), see ``ops.rope_append``; without a table, the
            caches' own addresses are used.
        workspace: see ``ops.decode_attention``.
        staging: where keys and values of the new tokens wait for ``ops.quantizing_attention``; None if projections
            append to the cache.
        kv_dtype: storage type of the caches, None if not known.
        encoded: of a decoder behind an encoder, where the plan finds what that has read (``encoded.EncodedPlaces``);
            None for other models.
    """

    angles: dict[str | None, tuple[Any, Any]]
    seq_lens: Any
    starts: Any
    kv_tables: Mapping[bool, Any] = field(default_factory=dict)
    workspace: Any = None
    staging: Staging | None = None
    kv_dtype: torch.dtype | None = None
    encoded: Any = None

    def placed(self, cache: KVCache, layer: int) -> KVCache:
        """Return a layer's cache with the ``kv_table`` that serves it."""
        table = self.kv_tables.get(cache.is_paged)
        return cache if table is None else replace(cache, table=table, layer=layer)

    def store(self, part: AttentionPart, cache: KVCache) -> dict[str, Any]:
        """Return where projections append: cache and seq_lens."""
        if self.staging is None:
            return {"cache": cache, "seq_lens": self.seq_lens}
        return {"cache": self.staging.of(part), "seq_lens": self.staging.seq_lens}

    def angles_of(self, part: AttentionPart) -> dict[str, Any]:
        """Return the cos and sin that ``part`` uses, None if it does not rotate; and which elements turn together."""
        cos, sin = self.angles[part.layer_type] if part.rotates else (None, None)
        return {"cos": cos, "sin": sin, "neighbors": part.spec.pairs == "neighbors"}
