"""PagedLayer: a full-attention layer of a FastpathCache whose keys and values lie in pages."""

from __future__ import annotations

from typing import Any

import torch

from .cache_layer import FastpathLayer
from .ops.kv_cache import gathered
from .pages import PageTable, PageTables


class PagedLayer(FastpathLayer):
    """Keys and values of one layer in pages that the layers of the cache take and share together.

    What changes which pages sequences hold is the cache's: reorder, repeat or select there.

    Args:
        tables: the cache's.
        kv_dtype: storage dtype, floating; None takes the dtype of the first states.
    """

    def __init__(self, tables: PageTables, kv_dtype: torch.dtype | None = None):
        self.tables = tables
        self.table: PageTable | None = None
        self._place = -1  # among the pool's layers
        super().__init__(None, kv_dtype)

    def _buffer(self, which: int) -> torch.Tensor | None:
        return None if self.table is None else self.table.pool.buffers[self._place][which]

    @property
    def k_buffer(self) -> torch.Tensor | None:
        """[pages, num_kv_heads, page_size, head_dim], those of other sequences and copies among them."""
        return self._buffer(0)

    @k_buffer.setter
    def k_buffer(self, value: None) -> None:
        """``FastpathLayer`` begins with none."""

    @property
    def v_buffer(self) -> torch.Tensor | None:
        """Like ``k_buffer``."""
        return self._buffer(1)

    @v_buffer.setter
    def v_buffer(self, value: None) -> None:
        """As ``k_buffer``'s."""

    @property
    def capacity(self) -> int:
        """Positions the block table has room for."""
        return 0 if self.table is None else self.table.capacity

    @property
    def buffers(self) -> tuple[torch.Tensor | None, ...]:
        """K, V, no scales, and the block table: what the kernels take."""
        return () if self.table is None else (self.k_buffer, self.v_buffer, None, None, self.table.tensor)

    @property
    def batch_size(self) -> int:
        return -1 if self.table is None else len(self.table.rows)

    def _assign(self, place: int, states: torch.Tensor | None) -> None:
        if states is not None:
            raise ValueError("the keys and values of a paged FastpathCache cannot be assigned: use update()")

    def _newest(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        first, size = self.cumulative_length - count, self.table.pool.page_size
        blocks = self.table.tensor[:, first // size : -(-self.cumulative_length // size)]
        k, v = (gathered(buffer, blocks).narrow(2, first % size, count) for buffer in (self.k_buffer, self.v_buffer))
        return k, v

    def reserve(self, num_tokens: int) -> bool:
        self.table.reserve(self.cumulative_length, self.cumulative_length + num_tokens)
        return self.table.has_moved()

    def _append(self, stored: tuple[torch.Tensor, ...]) -> None:
        count = stored[0].shape[2]
        self.reserve(count)
        positions = torch.arange(self.cumulative_length, self.cumulative_length + count, device=self.device)
        size = self.table.pool.page_size
        pages = self.table.tensor[:, positions // size].long()
        for buffer, states in zip((self.k_buffer, self.v_buffer), stored):
            buffer[pages, :, positions % size] = states.transpose(1, 2)
        self.advance(count)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, num_heads, _, head_dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        table = self.tables.table(batch, key_states.device)
        if self.table is None or self.k_buffer.shape[1] != num_heads:
            self._place = table.pool.add_layer(num_heads, head_dim, self.kv_dtype or self.dtype, self.device)
        self.table = table
        self.is_initialized = True

    def prepare(self, states: torch.Tensor) -> None:
        other = self.is_initialized and states.shape[:2] != (self.batch_size, self.k_buffer.shape[1])
        if not self.is_initialized or (other and self.cumulative_length == 0):  # also after reset(), another batch
            self.lazy_initialization(states, states)

    def _map_batch(self, select: Any) -> None:
        raise NotImplementedError("the layers of a paged FastpathCache share their pages: call it on the cache")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map_batch(beam_idx)

    def __repr__(self) -> str:
        pages = 0 if self.table is None else len(self.table.rows[0])
        return f"PagedLayer({self.cumulative_length} tokens in {pages} pages of {self.tables.page_size})"
