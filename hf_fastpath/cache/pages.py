"""Pages: keys and values of a cache in blocks of positions that sequences, and copies of a cache, may share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..native import huge_pages

#: columns of a new block table: a short table would be replaced soon
_LEAST_COLUMNS = 64


@dataclass
class PageCounts:
    """How many pages a cache and its copies take; one object for all of them.

    Attributes:
        page_size: positions of a page.
        used: pages that hold something.
        unshared: pages that would, if no sequence shared one: as many positions as an unpaged cache holds.
        most_used, most_unshared: the same when the most pages were used.
        allocated: pages there is memory for.
        page_bytes: what a page takes in all layers.
    """

    page_size: int
    used: int = 0
    unshared: int = 0
    most_used: int = 0
    most_unshared: int = 0
    allocated: int = 0
    page_bytes: int = 0

    def __deepcopy__(self, memo: dict) -> PageCounts:
        return self

    def note_most(self) -> None:
        """Keep the present numbers if more pages are used than ever."""
        if self.used >= self.most_used:
            self.most_used, self.most_unshared = self.used, self.unshared

    def __str__(self) -> str:
        size, unshared = (f"{count * self.page_bytes / 1e6:.1f} MB" for count in (self.most_used, self.most_unshared))
        return (
            f"at most {self.most_used} of {self.page_size} positions used ({size}), {self.most_unshared} without "
            f"sharing ({unshared})"
        )


class PagePool:
    """Pages of all layers that share block tables. Page i of a layer is row i of its buffers.

    Attributes:
        buffers: of each layer K and V, [pages, num_kv_heads, page_size, head_dim].
        version: changes when a buffer is replaced.
    """

    def __init__(self, page_size: int, counts: PageCounts | None = None):
        self.page_size = page_size
        self.buffers: list[list[torch.Tensor]] = []
        self.version = 0
        self.counts = counts or PageCounts(page_size)
        self._uses: list[int] = []  # of each page, by how many sequences
        self._free: list[int] = []

    def __deepcopy__(self, memo: dict) -> PagePool:
        return self  # copies of a cache share it

    def add_layer(self, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
        """Make buffers for another layer; returns its place in ``buffers``."""
        shape = (len(self._uses), num_heads, self.page_size, head_dim)
        self.buffers.append([self._empty(shape, dtype, device) for _ in range(2)])
        self.counts.page_bytes += 2 * num_heads * self.page_size * head_dim * dtype.itemsize
        return len(self.buffers) - 1

    def widen(self, place: int, dtype: torch.dtype) -> None:
        """Let a layer's buffers hold ``dtype`` without a loss."""
        pair = self.buffers[place]
        wide = torch.promote_types(pair[0].dtype, dtype)
        if wide != pair[0].dtype:
            self.counts.page_bytes += 2 * pair[0].shape[1:].numel() * (wide.itemsize - pair[0].element_size())
            with torch.inference_mode(False):
                self.buffers[place] = [buffer.to(wide) for buffer in pair]
            self.version += 1

    @staticmethod
    def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # Tensors born in inference mode could not be written outside it, and a cache may live in both.
        with torch.inference_mode(False):
            made = torch.empty(shape, dtype=dtype, device=device)
        huge_pages.ask_for(made)
        return made

    def _grow(self, missing: int) -> None:
        """Make room for more pages, a quarter at least, layer by layer."""
        before = len(self._uses)
        more = max(missing, before // 4)
        self.version += 1
        for pair in self.buffers:
            for place, old in enumerate(pair):
                made = self._empty((before + more, *old.shape[1:]), old.dtype, old.device)
                made[:before].copy_(old[:before])
                pair[place] = made
        self._uses += [0] * more
        self._free += range(before + more - 1, before - 1, -1)
        self.counts.allocated += more

    def take(self, count: int) -> list[int]:
        """Pages of one's own."""
        if count > len(self._free):
            self._grow(count - len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._uses[page] = 1
        self.counts.used += count
        self.counts.unshared += count
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more sequence uses each of them."""
        for page in pages:
            self._uses[page] += 1
            self.counts.unshared += 1

    def release(self, pages: Iterable[int]) -> None:
        """One sequence less uses each of them."""
        for page in pages:
            self._uses[page] -= 1
            self.counts.unshared -= 1
            if not self._uses[page]:
                self._free.append(page)
                self.counts.used -= 1

    def uses(self, page: int) -> int:
        """How many sequences use it."""
        return self._uses[page]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages, (from, to) each, in every layer."""
        if not pairs:
            return
        where: dict[torch.device, torch.Tensor] = {}
        for buffer in (each for pair in self.buffers for each in pair):
            if buffer.device not in where:
                where[buffer.device] = _on_device(pairs, torch.long, buffer.device)
            source, to = where[buffer.device].unbind(1)
            buffer.index_copy_(0, to, buffer.index_select(0, source))


def _on_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of host values, without a wait for the device."""
    made = torch.tensor(values, dtype=dtype, device="cpu")
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


class PageTable:
    """Which pages hold the positions of each sequence, in the layers of a cache that lie on one device.

    Attributes:
        rows: pages of each sequence, in order of position; sequences are equally long.
        tensor: int32 [batch, columns], the same for kernels; changed in place as long as it is wide enough.
    """

    rows: list[list[int]] = []  # of one that was broken off while it was made

    def __init__(self, pool: PagePool, batch: int, device: torch.device):
        self.pool = pool
        self.rows = [[] for _ in range(batch)]
        self.tensor = self._table(batch, _LEAST_COLUMNS, device)
        self._writable = (0, 0)  # positions whose pages are known to belong to one sequence each
        self._seen: tuple | None = None

    @staticmethod
    def _table(batch: int, columns: int, device: torch.device) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.zeros(batch, columns, dtype=torch.int32, device=device)

    def __deepcopy__(self, memo: dict) -> PageTable:
        made = PageTable(self.pool, 0, self.tensor.device)
        memo[id(self)] = made
        made.rows = [list(row) for row in self.rows]
        for row in made.rows:
            self.pool.share(row)
        with torch.inference_mode(False):
            made.tensor = self.tensor.clone()
        self._writable = (0, 0)
        return made

    def __del__(self) -> None:
        for row in self.rows:
            self.pool.release(row)

    @property
    def capacity(self) -> int:
        """Positions the table has columns for."""
        return self.tensor.shape[1] * self.pool.page_size

    def has_moved(self) -> bool:
        """Whether buffers or the table lie elsewhere than when this was asked before."""
        now = self.pool.version, self.tensor.data_ptr()
        seen, self._seen = self._seen, now
        return seen != now

    def reserve(self, begin: int, end: int) -> None:
        """Give every sequence pages of its own for positions ``begin`` to ``end``, copying what it shares there."""
        if self._writable[0] <= begin and end <= self._writable[1]:
            return
        size, pool = self.pool.page_size, self.pool
        first, last = begin // size, -(-end // size)
        known = len(self.rows[0])
        shared: list[tuple[list[int], int]] = []  # the last sequence of those that share a page keeps it
        others: Counter[int] = Counter()
        for row in self.rows:
            for block in range(first, min(last, known)):
                if pool.uses(row[block]) - others[row[block]] > 1:
                    others[row[block]] += 1
                    shared.append((row, block))
        missing = max(0, last - known)
        made = pool.take(missing * len(self.rows) + len(shared))
        pool.copy([(row[block], made[-1 - number]) for number, (row, block) in enumerate(shared)])
        for row, block in shared:
            pool.release(row[block : block + 1])
            row[block] = made.pop()
        for number, row in enumerate(self.rows):
            row += made[number * missing : (number + 1) * missing]
        pool.counts.note_most()
        self._write(first if shared else known, last)
        self._writable = first * size, last * size

    def _write(self, first: int, last: int) -> None:
        """Bring blocks ``first`` to ``last`` of the table up to date."""
        columns = self.tensor.shape[1]
        if last > columns:
            made = self._table(len(self.rows), max(last, 2 * columns), self.tensor.device)
            made[:, :columns].copy_(self.tensor)
            self.tensor = made
        if first < last:
            values = _on_device([row[first:last] for row in self.rows], torch.int32, self.tensor.device)
            self.tensor[:, first:last].copy_(values)

    def trim(self, length: int) -> None:
        """Give up pages behind position ``length``."""
        keep = -(-length // self.pool.page_size)
        if keep < len(self.rows[0]):
            for row in self.rows:
                self.pool.release(row[keep:])
                del row[keep:]
            self._writable = (0, 0)

    def select(self, indices: list[int]) -> None:
        """Sequences become those at ``indices``; what is chosen more than once is shared."""
        chosen = [list(self.rows[index]) for index in indices]
        for row in chosen:
            self.pool.share(row)
        for row in self.rows:
            self.pool.release(row)
        self.rows, self._writable = chosen, (0, 0)
        found = self.tensor.index_select(0, _on_device(indices, torch.long, self.tensor.device))
        if found.shape != self.tensor.shape:
            self.tensor = self._table(*found.shape, found.device)
        self.tensor.copy_(found)  # in place: kernels keep its address


class PageTables:
    """The block tables of a cache, one a device, and the pools behind them; empty until layers come."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.tables: dict[torch.device, PageTable] = {}
        self.counts = PageCounts(page_size)

    def table(self, batch: int, device: torch.device) -> PageTable:
        """The table for ``batch`` sequences on ``device``; that of another number stays with the layers that have it,
        unless it is empty."""
        known = self.tables.get(device)
        if known is None or (len(known.rows) != batch and any(known.rows)):
            pool = PagePool(self.page_size, self.counts) if known is None else known.pool
            self.tables[device] = PageTable(pool, batch, device)
        elif len(known.rows) != batch:
            known.select([0] * batch)
        return self.tables[device]
