"""PagedLayer: a full-attention layer of a FastpathCache whose keys and values lie in pages."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.kv_cache import KVCache, gathered
from .layer import FastpathLayer
from .pages import PageTable, PageTables


class PagedLayer(FastpathLayer):
    """Keys and values of one layer in pages, which the layers of a cache take and share together.

    Methods that change which pages a sequence holds belong to the cache: reorder, repeat and select sequences there.

    Args:
        tables: the cache's block tables.
        kv_dtype: storage dtype, floating; None takes the dtype of the first states.
    """

    def __init__(self, tables: PageTables, kv_dtype: torch.dtype | None = None):
        self.tables = tables
        self.table: PageTable | None = None
        self._place = -1  # index of the layer in the pool's buffers
        super().__init__(None, kv_dtype)

    def _buffer(self, which: int) -> torch.Tensor | None:
        return None if self.table is None else self.table.pool.buffers[self._place][which]

    @property
    def k_buffer(self) -> torch.Tensor | None:
        """[pages, num_kv_heads, page_size, head_dim], also with pages of other sequences and copies."""
        return self._buffer(0)

    @k_buffer.setter
    def k_buffer(self, value: None) -> None:
        """Ignore the None that ``FastpathLayer`` begins with."""

    @property
    def v_buffer(self) -> torch.Tensor | None:
        """The values, like ``k_buffer``."""
        return self._buffer(1)

    @v_buffer.setter
    def v_buffer(self, value: None) -> None:
        """Ignore the None, as for ``k_buffer``."""

    @property
    def capacity(self) -> int:
        """Positions that the block table has room for."""
        return 0 if self.table is None else self.table.capacity

    @property
    def buffers(self) -> tuple[torch.Tensor | None, ...]:
        """K, V, None for the scales, and the block table, as the kernels take them."""
        return () if self.table is None else (self.k_buffer, self.v_buffer, None, None, self.table.tensor)

    def kv_cache(self) -> KVCache:
        return KVCache(self.k_buffer, self.v_buffer, block_table=None if self.table is None else self.table.tensor)

    @property
    def batch_size(self) -> int:
        if (keys := self._loose.get(0)) is not None:
            return keys.shape[0]
        return -1 if self.table is None else len(self.table.rows)

    @property
    def has_buffers(self) -> bool:
        return self.table is not None

    @property
    def shows_views(self) -> bool:
        return False

    def _read(self, place: int) -> torch.Tensor:
        return self._gathered(place, self._length)

    def _gathered(self, place: int, count: int) -> torch.Tensor:
        """Return keys or values of the newest ``count`` positions as one tensor."""
        return self._between(place, self._length - count, self._length)

    def _between(self, place: int, first: int, end: int) -> torch.Tensor:
        size = self.table.pool.page_size
        blocks = self.table.tensor[:, first // size : -(-end // size)]
        return gathered(self._buffer(place), blocks).narrow(2, first % size, end - first)

    def stored(self, first: int, end: int) -> tuple[torch.Tensor, ...]:
        return self._between(0, first, end), self._between(1, first, end)

    def _newest(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._gathered(0, count), self._gathered(1, count)

    def _put(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold these keys and values; pages stay shared up to the first difference."""
        dtype, (batch, heads, count, head_dim) = self._storage_dtype(keys, values), keys.shape
        head_dims = head_dim, values.shape[3]
        first, table, place = 0, self.table, self._place
        if table is None or not self._is_like(batch, heads, head_dims, keys.device):
            table = self.tables.table(batch, keys.device)
            if self.table is None or table.pool is not self.table.pool or self._sizes() != (heads, *head_dims):
                place = table.pool.add_layer(heads, head_dims, dtype, keys.device)
        else:
            first = self._first_difference(keys, values)
        table.pool.widen(place, dtype)
        if first < count:
            table.reserve(first, count)
            for buffer, states in zip(table.pool.buffers[place], (keys, values)):
                self._write(table, buffer, states[:, :, first:], first)
        kind = {"dtype": self.dtype or keys.dtype, "device": keys.device, "is_initialized": True}
        vars(self).update(table=table, _place=place, _loose={}, _copies=frozenset(), _length=count, **kind)

    def _sizes(self) -> tuple[int, int, int]:
        """Return the heads that there are pages for, and the elements of a key and of a value."""
        return self.k_buffer.shape[1], self.k_buffer.shape[3], self.v_buffer.shape[3]

    def _is_like(self, batch: int, heads: int, head_dims: tuple[int, int], device: torch.device) -> bool:
        """Whether the layer's pages are for such states."""
        held = len(self.table.rows), *self._sizes(), self.k_buffer.device
        return held == (batch, heads, *head_dims, device)

    def _first_difference(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Return the first position at which the pages do not hold these keys and values."""
        common = min(self._length, keys.shape[2])
        differs = torch.zeros(common, dtype=torch.bool, device=keys.device)
        for place, states in enumerate((keys, values)):
            differs |= (self._read(place)[:, :, :common] != states[:, :, :common]).any(-1).flatten(0, 1).any(0)
        found = differs.nonzero()
        return int(found[0]) if len(found) else common

    def _forget(self) -> None:
        vars(self).update(table=None, _loose={}, _copies=frozenset(), _length=0, is_initialized=False)

    def _widen(self, dtype: torch.dtype) -> None:
        self.table.pool.widen(self._place, dtype)
        self.dtype = dtype

    def reserve(self, num_tokens: int) -> bool:
        self._take_all()
        self.table.reserve(self._length, self._length + num_tokens)
        return self.table.has_moved()

    def append_stored(self, stored: tuple[torch.Tensor, ...]) -> None:
        count = stored[0].shape[2]
        self.reserve(count)
        for buffer, states in zip((self.k_buffer, self.v_buffer), stored):
            self._write(self.table, buffer, states, self._length)
        self.advance(count)

    @staticmethod
    def _write(table: PageTable, buffer: torch.Tensor, states: torch.Tensor, first: int) -> None:
        """Write ``states``, of the positions from ``first`` on, into their pages."""
        positions = torch.arange(first, first + states.shape[2], device=buffer.device)
        size = table.pool.page_size
        pages = table.tensor[:, positions // size].long()
        buffer[pages, :, positions % size] = states.transpose(1, 2).to(buffer.dtype)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, num_heads, _, head_dim = key_states.shape
        head_dims = head_dim, value_states.shape[3]
        self.dtype, self.device = key_states.dtype, key_states.device
        table = self.tables.table(batch, key_states.device)
        dtype = self.kv_dtype or self.dtype
        known = self.table is not None and self.table.pool is table.pool
        if not known or self._sizes() != (num_heads, *head_dims) or self.k_buffer.dtype != dtype:
            self._place = table.pool.add_layer(num_heads, head_dims, dtype, self.device)
        vars(self).update(table=table, _loose={}, _copies=frozenset(), _length=0, is_initialized=True)

    def _map_batch(self, select: Any) -> None:
        raise NotImplementedError("the layers of a paged FastpathCache share their pages: call it on the cache")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map_batch(beam_idx)

    def __repr__(self) -> str:
        pages = 0 if self.table is None else len(self.table.rows[0])
        return f"PagedLayer({self._length} tokens in {pages} pages of {self.tables.page_size})"
