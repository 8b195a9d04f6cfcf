"""Pages: keys and values of a cache in blocks of positions that sequences, and copies of a cache, may share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..native import huge_pages

#: columns of a new block table; with fewer columns, the table would soon be replaced
_LEAST_COLUMNS = 64


@dataclass
class PageCounts:
    """How many pages a cache and its copies use. All of them share one object.

    Attributes:
        page_size: positions of a page.
        used: pages that hold something.
        unshared: pages that would hold something if no sequence shared a page: the positions of a cache without pages.
        most_used, most_unshared: both numbers at the time when most pages were used.
        allocated: pages that there is memory for.
        page_bytes: bytes of a page in all layers.
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
    """The pages of all layers that share block tables. Page i of a layer is row i of the layer's buffers.

    Attributes:
        buffers: K and V of each layer, [pages, num_kv_heads, page_size, head_dim].
        version: a number that changes when a buffer is replaced.
    """

    def __init__(self, page_size: int, counts: PageCounts | None = None):
        self.page_size = page_size
        self.buffers: list[list[torch.Tensor]] = []
        self.version = 0
        self.counts = counts or PageCounts(page_size)
        self._uses: list[int] = []  # of each page: number of sequences that use it
        self._free: list[int] = []

    def __deepcopy__(self, memo: dict) -> PagePool:
        return self  # copies of a cache share the pool

    def add_layer(self, num_heads: int, head_dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> int:
        """Make buffers for another layer, whose keys and values have ``head_dims`` elements; return the layer's index
        in ``buffers``."""
        shapes = [(len(self._uses), num_heads, self.page_size, head_dim) for head_dim in head_dims]
        self.buffers.append([self._empty(shape, dtype, device) for shape in shapes])
        self.counts.page_bytes += num_heads * self.page_size * sum(head_dims) * dtype.itemsize
        return len(self.buffers) - 1

    def widen(self, place: int, dtype: torch.dtype) -> None:
        """Convert a layer's buffers so that they hold ``dtype`` without a loss."""
        pair = self.buffers[place]
        wide = torch.promote_types(pair[0].dtype, dtype)
        if wide != pair[0].dtype:
            elements = sum(each.shape[1:].numel() for each in pair)
            self.counts.page_bytes += elements * (wide.itemsize - pair[0].element_size())
            with torch.inference_mode(False):
                self.buffers[place] = [buffer.to(wide) for buffer in pair]
            self.version += 1

    @staticmethod
    def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # A tensor made in inference mode could not be written outside that mode, and a cache may be used in both.
        with torch.inference_mode(False):
            made = torch.empty(shape, dtype=dtype, device=device)
        huge_pages.ask_for(made)
        return made

    def _grow(self, missing: int) -> None:
        """Make room for more pages, at least a quarter more; layers are copied one after the other."""
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
        """Take pages that no other sequence uses."""
        if count > len(self._free):
            self._grow(count - len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._uses[page] = 1
        self.counts.used += count
        self.counts.unshared += count
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Count one more sequence that uses each of these pages."""
        for page in pages:
            self._uses[page] += 1
            self.counts.unshared += 1

    def release(self, pages: Iterable[int]) -> None:
        """Count one sequence less that uses each of these pages; pages without a use become free."""
        for page in pages:
            self._uses[page] -= 1
            self.counts.unshared -= 1
            if not self._uses[page]:
                self._free.append(page)
                self.counts.used -= 1

    def uses(self, page: int) -> int:
        """Return how many sequences use a page."""
        return self._uses[page]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages, given as pairs (from, to), in every layer."""
        if not pairs:
            return
        where: dict[torch.device, torch.Tensor] = {}
        for buffer in (each for pair in self.buffers for each in pair):
            if buffer.device not in where:
                where[buffer.device] = _on_device(pairs, torch.long, buffer.device)
            source, to = where[buffer.device].unbind(1)
            buffer.index_copy_(0, to, buffer.index_select(0, source))


def _on_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a tensor of host values without waiting for the device."""
    made = torch.tensor(values, dtype=dtype, device="cpu")
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


class PageTable:
    """The pages that hold the positions of each sequence, in those layers of a cache that lie on one device.

    Attributes:
        rows: pages of each sequence, in order of position; all sequences have equally many.
        tensor: int32 [batch, columns], the rows as the kernels read them; changed in place while the columns suffice.
    """

    rows: list[list[int]] = []  # for __del__ of a table that was broken off while it was made

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
        """Positions that the table has columns for."""
        return self.tensor.shape[1] * self.pool.page_size

    def has_moved(self) -> bool:
        """Whether buffers or the table have moved since this was last asked."""
        now = self.pool.version, self.tensor.data_ptr()
        seen, self._seen = self._seen, now
        return seen != now

    def reserve(self, begin: int, end: int) -> None:
        """Give every sequence pages of its own for positions ``begin`` to ``end``; shared pages are copied."""
        if self._writable[0] <= begin and end <= self._writable[1]:
            return
        size, pool = self.pool.page_size, self.pool
        first, last = begin // size, -(-end // size)
        known = len(self.rows[0])
        shared: list[tuple[list[int], int]] = []  # of the sequences that share a page, the last keeps it
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
        """Write the entries of blocks ``first`` to ``last`` into the tensor."""
        columns = self.tensor.shape[1]
        if last > columns:
            made = self._table(len(self.rows), max(last, 2 * columns), self.tensor.device)
            made[:, :columns].copy_(self.tensor)
            self.tensor = made
        if first < last:
            values = _on_device([row[first:last] for row in self.rows], torch.int32, self.tensor.device)
            self.tensor[:, first:last].copy_(values)

    def trim(self, length: int) -> None:
        """Release pages behind position ``length``."""
        keep = -(-length // self.pool.page_size)
        if keep < len(self.rows[0]):
            for row in self.rows:
                self.pool.release(row[keep:])
                del row[keep:]
            self._writable = (0, 0)

    def select(self, indices: list[int]) -> None:
        """Make the sequences those at ``indices``; the pages of an index that occurs more than once are shared."""
        chosen = [list(self.rows[index]) for index in indices]
        for row in chosen:
            self.pool.share(row)
        for row in self.rows:
            self.pool.release(row)
        self.rows, self._writable = chosen, (0, 0)
        found = self.tensor.index_select(0, _on_device(indices, torch.long, self.tensor.device))
        if found.shape != self.tensor.shape:
            self.tensor = self._table(*found.shape, found.device)
        self.tensor.copy_(found)  # in place, because kernels keep the tensor's address


class PageTables:
    """The block tables of a cache, one for each device, and their pools; there are none until layers come."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.tables: dict[torch.device, PageTable] = {}
        self.counts = PageCounts(page_size)

    def table(self, batch: int, device: torch.device) -> PageTable:
        """Return the table for ``batch`` sequences on ``device``.

        A table for another number of sequences is reused if it is empty; else it stays with the layers that have it.
        """
        known = self.tables.get(device)
        if known is None or (len(known.rows) != batch and any(known.rows)):
            pool = PagePool(self.page_size, self.counts) if known is None else known.pool
            self.tables[device] = PageTable(pool, batch, device)
        elif len(known.rows) != batch:
            known.select([0] * batch)
        return self.tables[device]
