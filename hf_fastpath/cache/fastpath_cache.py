"""FastpathCache: a transformers KV cache with room to grow. Its buffers are read and written by the decode kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..compat import (
    MIN_WINDOW,
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LayerKind,
    layer_kind,
    made_layer,
    record_past_of,
)
from ..ops.decode_attention import MAX_QUERY_LEN
from ..ops.kv_cache import MAX_PAGE_SIZE, MIN_PAGE_SIZE, is_page_size, is_quantized
from .buffers import KV_DTYPES
from .edits import EditableLayer
from .layer import FastpathLayer
from .paged_layer import PagedLayer
from .pages import PageCounts, PageTable, PageTables
from .states import KeysAndStatesLayer, StateLayer, copy_states


class FastpathCache(Cache):
    """KV cache with preallocated buffers, which the decode kernels read and write.

    Buffers grow by at most a quarter beyond what is needed. The cache can replace ``DynamicCache`` in all uses but
    offloading: it can be passed as ``cache`` (``past_key_values`` before transformers 5.24), kept, deep-copied and
    continued. Layers with recurrent states or windows of convolutions keep these as well (:class:`.states.StateLayer`).

    Args:
        config: the model's config; with None, full-attention layers are made when they are first used.
        kv_dtype: storage dtype: float32, float16 or bfloat16, or int8 or float8_e4m3fn with a scale for each head and
            token; None takes the dtype of the states.
        page_size: positions of a page, a power of two from 16 on. Full-attention layers then keep keys and values, of a
            floating dtype, in pages; sequences and copies of the cache share a page until one of them writes there.
            With None, every layer has one buffer.

    Raises:
        ValueError: another ``kv_dtype`` or ``page_size``, a config with layers that hold something else than keys,
            values and states, or with a sliding window of one token.

    Source: transformers ``cache_utils.py@5.17``, ``DynamicCache``.
    """

    layers: list[Any]  # FastpathLayer, StateLayer, or a layer that is both

    def __init__(self, config=None, kv_dtype: torch.dtype | None = None, page_size: int | None = None):
        if kv_dtype is not None and kv_dtype not in KV_DTYPES:
            raise ValueError(
                f"kv_dtype is {kv_dtype}, expected float32, float16, bfloat16, int8, float8_e4m3fn or None"
            )
        if page_size is not None:
            check_page_size(page_size, kv_dtype)
        self.kv_dtype = kv_dtype
        self.tables = None if page_size is None else PageTables(page_size)
        self._seq_lens: tuple[tuple, torch.Tensor] | None = None
        self.expected_length = 0
        self.is_kept = False  # True while a forward runs that leaves no trace if it fails
        self.reads_prompt = False  # True while generate() reads a prompt, whose tensors nobody else holds
        self.is_dropped = False  # True if nobody reads this cache once the call of generate() that made it has ended
        #: transformers' own cache, empty, in whose place a call of generate() has made this one
        self.stands_for: DynamicCache | None = None
        if config is None:
            super().__init__(layer_class_to_replicate=FastpathLayer)
            return
        super().__init__(layers=[self._like(layer) for layer in DynamicCache(config=config).layers])

    @classmethod
    def of_kinds(cls, kinds: Iterable[LayerKind], kv_dtype: torch.dtype | None = None) -> FastpathCache:
        """Make an empty cache with a layer of each kind."""
        made = cls(kv_dtype=kv_dtype)
        made.layers = [made._like(made_layer(kind)) for kind in kinds]
        return made

    @property
    def kinds(self) -> list[LayerKind]:
        """What every layer holds."""
        return [getattr(layer, "kind", LayerKind(keys=False)) for layer in self.layers]

    @property
    def key_layers(self) -> list[FastpathLayer]:
        """The layers with keys and values."""
        return [layer for layer in self.layers if _has_keys(layer)]

    @property
    def state_layers(self) -> list[StateLayer]:
        """The layers with states."""
        return [layer for layer in self.layers if isinstance(layer, StateLayer)]

    @property
    def counting_layers(self) -> list[FastpathLayer] | list[StateLayer]:
        """The layers that know how many tokens the cache holds: those with keys and values if there are any."""
        return self.key_layers or self.state_layers

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """Storage dtype of keys and values, which have been prepared; None if no layer has any."""
        layers = self.key_layers
        return layers[0].k_buffer.dtype if layers else None

    @property
    def page_size(self) -> int | None:
        """Positions of a page, or None if the cache has no pages."""
        return None if self.tables is None else self.tables.page_size

    @property
    def page_sizes(self) -> tuple[int | None, ...]:
        """Page size of every layer; None for layers with a sliding window, which never have pages."""
        return tuple(self.page_size if isinstance(layer, PagedLayer) else None for layer in self.layers)

    @property
    def page_counts(self) -> PageCounts | None:
        """Numbers of pages that this cache and its copies use, and would use without sharing; None without pages."""
        return None if self.tables is None else self.tables.counts

    def _full_layer(self) -> FastpathLayer:
        return FastpathLayer(None, self.kv_dtype) if self.tables is None else PagedLayer(self.tables, self.kv_dtype)

    def _block_tables(self) -> list[PageTable]:
        tables = (getattr(layer, "table", None) for layer in self.layers)
        of_layers = {id(table): table for table in tables if table is not None}
        known = () if self.tables is None else self.tables.tables.values()
        return list((of_layers | {id(table): table for table in known}).values())

    def _trim(self) -> None:
        """Release pages in which no layer holds positions."""
        for table in self._block_tables():
            lengths = [layer.cumulative_length for layer in self.key_layers if getattr(layer, "table", None) is table]
            table.trim(max(lengths, default=0))  # after an interrupt, a table may have no layer yet

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self._grow(layer_idx + 1)
        if self.reads_prompt and isinstance(layer := self.layers[layer_idx], FastpathLayer):
            if layer.wait_for_more(key_states, value_states):
                return key_states, value_states
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @contextmanager
    def reading_prompt(self) -> Iterator[None]:
        """Let the first keys and values of layers wait for more, for the length of a ``with`` block."""
        self.reads_prompt = True
        try:
            yield
        finally:
            self.reads_prompt = False

    def _grow(self, num_layers: int) -> None:
        while len(self.layers) < num_layers:
            self.layers.append(self._full_layer())
            self.layers[-1].expected_length = self.expected_length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens that a layer holds; of a cache of states alone, see ``StateLayer.cumulative_length``."""
        if layer_idx == 0 and self.layers and not _has_keys(self.layers[0]) and not self.key_layers:
            return max((layer.cumulative_length for layer in self.state_layers), default=0)
        return super().get_seq_length(layer_idx)

    def prepare(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Prepare a layer for keys and values of these shapes and dtype; see ``FastpathLayer.prepare``."""
        self._grow(layer_idx + 1)
        self.layers[layer_idx].prepare(keys, values)

    def reserve(self, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` more positions in every layer, one layer after the other.

        Returns:
            Whether any buffer moved.
        """
        return any([layer.reserve(num_tokens) for layer in self.key_layers])

    def expect(self, length: int) -> None:
        """Announce how many positions there will be at most, as ``generate()`` does.

        Buffers that grow then make room for all of them, and for drafts that are read beyond the end, if this is no
        more than a quarter beyond what is needed. So the buffers move once, and a long prompt does not take its memory
        twice.
        """
        self.expected_length = length + MAX_QUERY_LEN
        for layer in self.key_layers:
            layer.expected_length = self.expected_length

    def advance(self, num_tokens: int) -> None:
        """Count positions that kernels have written in every layer."""
        for layer in self.counting_layers:
            layer.advance(num_tokens)

    def take(self) -> bool:
        """Bring keys and values that users assigned, or changed in place, to where the kernels read them.

        Returns:
            Whether a decode plan can go on: all layers hold equally many positions, of equally many sequences and in
            one dtype, and layers with a window hold the newest positions.

        Raises:
            RuntimeError: keys and values of a layer do not go together.
        """
        layers = self.key_layers
        if not all([layer.take() for layer in layers]):
            return False
        held = {(layer.cumulative_length, layer.batch_size) for layer in layers}
        dtypes = {layer.k_buffer.dtype for layer in layers if layer.has_buffers}
        return len(held) <= 1 and len(dtypes) <= 1 or self._is_empty()

    @property
    def holds_nothing(self) -> bool:
        """Whether there are neither tokens nor states, also none as they are before the first token."""
        return not self.get_seq_length() and not any(layer.states for layer in self.state_layers)

    def _is_empty(self) -> bool:
        return not any(layer.cumulative_length for layer in self.key_layers)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Leave the cache as it is now if the block is broken off."""
        if self.is_kept:
            yield
            return
        count, tables = len(self.layers), None if self.tables is None else dict(self.tables.tables)
        checkpoints = []
        try:
            self.is_kept = True
            for layer in self.key_layers:
                checkpoints.append((layer, layer.checkpoint()))
            yield
        except BaseException:
            for layer, saved in checkpoints:
                layer.restore(saved)
            del self.layers[count:]
            if tables is not None:
                self.tables.tables = tables
            self._trim()
            raise
        finally:
            self.is_kept = False
            for layer in self.key_layers:
                layer.is_kept = False

    def crop(self, tokens_to_remove: int) -> None:
        for layer in (*self.state_layers, *self.key_layers):
            layer.cropped_length(tokens_to_remove)  # raises before any layer has changed
        super().crop(tokens_to_remove)
        self._trim()

    def reset(self) -> None:
        super().reset()
        self._trim()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self._has_pages():
            return self._select(beam_idx.tolist())
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._has_pages():
            return self._select([row for row in range(self._batch()) for _ in range(repeats)])
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self._has_pages():
            return self._select(torch.arange(self._batch())[torch.as_tensor(indices).cpu()].tolist())
        super().batch_select_indices(indices)

    def _has_pages(self) -> bool:
        """Whether layers keep pages; a cache of states alone has none, whatever its page size."""
        return self.tables is not None and bool(self.key_layers)

    def _batch(self) -> int:
        return max((layer.batch_size for layer in self.key_layers), default=0)

    def _select(self, rows: list[int]) -> None:
        """Make the sequences those at ``rows``: pages are shared, and layers without pages are copied."""
        self.take()
        for layer in self.layers:
            if not isinstance(layer, PagedLayer):
                layer.batch_select_indices(torch.tensor(rows, dtype=torch.long, device=getattr(layer, "device", None)))
        for table in self._block_tables():
            table.select(rows)

    def settle(self, num_layers: int) -> None:
        """Give all layers of a model the length of the shortest again, after a forward that was interrupted.

        If a window has moved on too far for that, or if there are states, from which nothing can be taken back,
        everything is forgotten, so that the whole text is read again.
        """
        if self.state_layers:
            return self.reset()
        lengths = [layer.cumulative_length for layer in self.key_layers]
        shortest = min(lengths, default=0) if len(self.layers) == num_layers else 0
        try:
            for layer in self.key_layers:
                layer.crop(shortest - layer.cumulative_length)
        except RuntimeError:
            self.reset()
        self._trim()

    def seq_lens(self, layer_idx: int, new_tokens: int) -> torch.Tensor:
        """Return int32 [batch], tokens that each row of a layer holds once ``new_tokens`` more are there.

        The caller must not write to the tensor: the layers of a forward share it.
        """
        layer = self.layers[layer_idx]
        key = (layer.cumulative_length + new_tokens, layer.batch_size, layer.k_buffer.device)
        if self._seq_lens is None or self._seq_lens[0] != key:
            with torch.inference_mode(False):
                self._seq_lens = key, torch.full(key[1:2], key[0], dtype=torch.int32, device=key[2])
        return self._seq_lens[1]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        for layer in self.key_layers:
            window = None if layer.sliding_window is None else torch.tensor(layer.sliding_window)
            yield layer.keys, layer.values, window

    @classmethod
    def from_dynamic(
        cls, cache: DynamicCache, kv_dtype: torch.dtype | None = None, page_size: int | None = None
    ) -> FastpathCache:
        """Make a FastpathCache with the contents of ``cache``.

        Raises:
            ValueError: ``cache`` has layers that hold something else than keys, values and states.
        """
        made = cls(kv_dtype=kv_dtype, page_size=page_size)
        for layer in cache.layers:
            copy = made._like(layer)
            keys = getattr(layer, "keys", None)
            if _has_keys(copy) and layer.is_initialized and keys is not None and keys.dim() == 4:
                copy.lazy_initialization(layer.keys, layer.values)
                if copy.is_sliding:
                    copy.cumulative_length = layer.get_seq_length()
                copy.keys, copy.values = layer.keys, layer.values
                copy.take()
            if isinstance(copy, StateLayer):
                copy_states(layer, copy)
            made.layers.append(copy)
        return made

    def to_dynamic(self) -> DynamicCache:
        """Make a transformers ``DynamicCache`` with the same contents."""
        made = DynamicCache()
        for layer, kind in zip(self.layers, self.kinds):
            copy = made_layer(kind)
            if kind.keys and layer.is_initialized and layer.get_seq_length():
                copy.update(*(half.to(layer.dtype) for half in layer.copies()))
                if kind.window is not None:
                    copy.cumulative_length = layer.get_seq_length()
            if kind.states:
                copy_states(layer, copy)
            made.layers.append(copy)
        return made

    def _like(self, layer: CacheLayerMixin) -> Any:
        """Make an empty layer of ours to replace a transformers layer."""
        kind = layer_kind(layer)
        if kind is None:
            raise ValueError(f"FastpathCache has no counterpart of {type(layer).__name__}: use a transformers cache")
        if kind.window is not None and kind.window < MIN_WINDOW:
            raise ValueError(
                f"FastpathCache got sliding_window={kind.window}, expected {MIN_WINDOW} or more: use a transformers "
                "cache, which keeps everything there"
            )
        if kind == LayerKind(keys=False):  # it holds nothing
            return made_layer(kind)
        if kind.states:
            both = KeysAndStatesLayer(kind.window, self.kv_dtype, kind.states)
            made = both if kind.keys else StateLayer(kind.states)
        elif kind.window is not None:
            made = FastpathLayer(kind.window, self.kv_dtype)
        else:
            made = self._full_layer()
        made.record_past = record_past_of(layer)
        return made


def _has_keys(layer: Any) -> bool:
    return isinstance(layer, EditableLayer)


def check_page_size(page_size: int, kv_dtype: torch.dtype | None) -> None:
    """Refuse a page size that a cache cannot have.

    Raises:
        ValueError: ``page_size`` is no power of two in range, or ``kv_dtype`` is quantized.
    """
    if type(page_size) is not int or not is_page_size(page_size):
        expected = f"None or a power of two from {MIN_PAGE_SIZE} to {MAX_PAGE_SIZE}"
        raise ValueError(f"page_size is {page_size!r}, expected {expected}")
    if kv_dtype is not None and is_quantized(kv_dtype):
        raise ValueError(f"page_size goes with a floating kv_dtype, not with {kv_dtype}: leave one of them out")
