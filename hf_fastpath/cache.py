"""FastpathCache: a transformers KV cache with room to grow, whose buffers the decode kernels read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from . import huge_pages
from .compat import MIN_WINDOW, record_past_of

#: capacities are multiples of this, so that short conversations do not grow at every token
CAPACITY_STEP = 64
#: slots a sliding-window layer keeps beyond its window: that many tokens (and one) can be cropped exactly
RING_SLACK = 16
#: the same while past recording is on (assisted decoding crops whole rejected drafts)
RECORDING_SLACK = 1024
#: storage types ``kv_dtype`` may name
KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class FastpathLayer(CacheLayerMixin):
    """Keys and values of one layer in two preallocated buffers [batch, num_kv_heads, capacity, head_dim].

    Position p lives in slot ``p mod capacity``. A full-attention layer grows before it would wrap; a sliding
    layer stops growing at window + 16 slots and is a ring from then on.

    Args:
        sliding_window: positions a token of this layer sees, itself included; None for all.
        kv_dtype: storage dtype; None takes the dtype of the first states.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, sliding_window: int | None = None, kv_dtype: torch.dtype | None = None):
        self.k_buffer: torch.Tensor | None = None
        self.v_buffer: torch.Tensor | None = None
        super().__init__()
        self.sliding_window = sliding_window
        self.kv_dtype = kv_dtype
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None
        self.cumulative_length = 0
        self.oldest = 0  # lowest position that is still in its slot
        self.record_past = False

    # ---- storage --------------------------------------------------------------------------------------------

    @property
    def is_sliding(self) -> bool:
        return self.sliding_window is not None

    @property
    def capacity(self) -> int:
        """Slots allocated for each sequence."""
        return 0 if self.k_buffer is None else self.k_buffer.shape[2]

    @property
    def batch_size(self) -> int:
        return -1 if self.k_buffer is None else self.k_buffer.shape[0]

    @property
    def keys(self) -> torch.Tensor | None:
        """[batch, num_kv_heads, held, head_dim] in order of position; ``held`` as transformers' own layers have it."""
        return None if self.k_buffer is None else self._ordered(self.k_buffer, self._held())

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        self._assign("k_buffer", states)

    @property
    def values(self) -> torch.Tensor | None:
        """Like ``keys``, for the values."""
        return None if self.v_buffer is None else self._ordered(self.v_buffer, self._held())

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        self._assign("v_buffer", states)

    def _assign(self, name: str, states: torch.Tensor | None) -> None:
        if states is not None and self.is_sliding:
            raise ValueError("the keys and values of a sliding-window FastpathLayer cannot be assigned: use update()")
        setattr(self, name, None if states is None else states.contiguous())
        if states is not None:
            self.cumulative_length, self.oldest = states.shape[-2], 0

    def _ring_capacity(self) -> int | None:
        if self.sliding_window is None:
            return None
        return self.sliding_window + (RECORDING_SLACK if self.record_past else RING_SLACK)

    def _held(self) -> int:
        """How many of the newest positions are shown as ``keys`` and ``values``."""
        if self.sliding_window is None:
            return self.cumulative_length
        return min(self.cumulative_length, self.sliding_window - 1)

    def _ordered(self, buffer: torch.Tensor, count: int) -> torch.Tensor:
        """The newest ``count`` positions of ``buffer``: a view unless the ring wraps inside them."""
        if count == 0:
            return buffer[:, :, :0]
        first = (self.cumulative_length - count) % self.capacity
        if first + count <= self.capacity:
            return buffer[:, :, first : first + count]
        return torch.cat((buffer[:, :, first:], buffer[:, :, : first + count - self.capacity]), dim=2)

    def _allocate(self, batch: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        _, heads, _, head_dim = self.k_buffer.shape
        # Tensors born in inference mode could not be written outside it, and a cache may live in both.
        with torch.inference_mode(False):
            made = tuple(
                torch.empty((batch, heads, capacity, head_dim), dtype=self.k_buffer.dtype, device=self.k_buffer.device)
                for _ in range(2)
            )
        for buffer in made:
            huge_pages.ask_for(buffer)
        return made

    def _resize(self, capacity: int) -> None:
        """Move what is held into buffers of ``capacity`` slots."""
        count = min(self.cumulative_length - self.oldest, capacity)
        first = self.cumulative_length - count
        k_new, v_new = self._allocate(self.batch_size, capacity)
        if count > 0:
            for old, new in ((self.k_buffer, k_new), (self.v_buffer, v_new)):
                self._store(new, self._ordered(old, count), first)
        self.k_buffer, self.v_buffer, self.oldest = k_new, v_new, first

    @staticmethod
    def _store(buffer: torch.Tensor, states: torch.Tensor, first: int) -> None:
        """Write ``states``, positions ``first`` on, into their slots; only the newest capacity of them fit."""
        capacity, count = buffer.shape[2], states.shape[2]
        if first + count <= capacity:  # the usual case, and every view costs host time
            buffer.narrow(2, first, count).copy_(states)
            return
        surplus = max(0, count - capacity)
        states, first = states[:, :, surplus:], (first + surplus) % capacity
        head = min(states.shape[2], capacity - first)
        buffer[:, :, first : first + head].copy_(states[:, :, :head])
        if head < states.shape[2]:
            buffer[:, :, : states.shape[2] - head].copy_(states[:, :, head:])

    def reserve(self, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` more positions.

        Returns:
            Whether the buffers moved.
        """
        needed = self.cumulative_length + num_tokens
        ring = self._ring_capacity()
        if needed <= self.capacity or (ring is not None and self.capacity >= ring):
            return False
        grown = max(needed, self.capacity + self.capacity // 4)
        grown = -(-grown // CAPACITY_STEP) * CAPACITY_STEP
        self._resize(grown if ring is None else min(grown, ring))
        return True

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write the states of the next positions, [batch, num_kv_heads, new, head_dim]."""
        self.reserve(key_states.shape[2])
        self._store(self.k_buffer, key_states, self.cumulative_length)
        self._store(self.v_buffer, value_states, self.cumulative_length)
        self.advance(key_states.shape[2])

    def advance(self, num_tokens: int) -> None:
        """Count positions that were written."""
        self.cumulative_length += num_tokens
        self.oldest = max(self.oldest, self.cumulative_length - self.capacity)

    # ---- the contract of a transformers cache layer ------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.k_buffer = key_states.new_empty((*key_states.shape[:2], 0, key_states.shape[3]))
        if self.kv_dtype is not None:
            self.k_buffer = self.k_buffer.to(self.kv_dtype)
        self.v_buffer = self.k_buffer
        self.is_initialized = True

    def prepare(self, states: torch.Tensor) -> None:
        """Get ready for states of this shape, [batch, num_kv_heads, any, head_dim], and dtype; what it holds stays."""
        other = self.is_initialized and states.shape[:2] != self.k_buffer.shape[:2]
        if not self.is_initialized or (other and self.cumulative_length == 0):  # also after reset(), another batch
            self.lazy_initialization(states, states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states and return what attention has to see, in order of position.

        Args:
            key_states, value_states: [batch, num_kv_heads, new, head_dim].

        Returns:
            Keys and values in the states' dtype, rounded to the storage dtype. Full attention: all positions;
            sliding: the newest window - 1 before these states, and these states.

        Raises:
            RuntimeError: gradients would have to flow through the cache.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError(
                "FastpathCache does not record gradients: run under torch.no_grad(), or train with use_cache=False "
                "or a transformers DynamicCache"
            )
        self.prepare(key_states)
        past = self._held()
        stored = [states.to(self.k_buffer.dtype) for states in (key_states, value_states)]
        seen = None
        if self.is_sliding and past:  # before the ring overwrites them
            buffers = (self.k_buffer, self.v_buffer)
            seen = [torch.cat((self._ordered(b, past), s), dim=2) for b, s in zip(buffers, stored)]
        self.append(*stored)
        if past == 0:
            seen = stored
        elif seen is None:
            seen = [self.k_buffer[:, :, : self.cumulative_length], self.v_buffer[:, :, : self.cumulative_length]]
        return seen[0].to(key_states.dtype), seen[1].to(value_states.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the positions that ``update`` will return for ``query_length`` new tokens."""
        held = self._held()
        return held + query_length, self.cumulative_length - held

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def activate_past_recording(self) -> None:
        """Keep enough beyond the window that the next ``crop`` can remove up to 1024 tokens."""
        self.record_past = True
        ring = self._ring_capacity()
        if ring is not None and self.is_initialized and self.cumulative_length > self.capacity:
            self._resize(ring)  # a wrapped ring has to be laid out anew before it may hold more
        # one that has not wrapped grows on its own, up to the larger ring

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``abs(tokens_to_remove)`` positions.

        Raises:
            ValueError: a positive number.
            RuntimeError: a sliding-window layer no longer holds what would become visible.
        """
        self.cumulative_length = self.cropped_length(tokens_to_remove)

    def cropped_length(self, tokens_to_remove: int) -> int:
        """Length after ``crop(tokens_to_remove)``; raises what that would raise."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}) is not supported: pass a negative number, the tokens to remove")
        length = max(0, self.cumulative_length + tokens_to_remove)
        if self.is_sliding and self.oldest > max(0, length - self.sliding_window + 1):
            most = self.cumulative_length - self.oldest - self.sliding_window + 1
            raise RuntimeError(
                f"cannot remove {-tokens_to_remove} tokens from a sliding-window layer that has moved on: at most "
                f"{max(0, most)}. Call activate_past_recording() before generating them."
            )
        return length

    def reset(self) -> None:
        """Forget every position; the buffers stay."""
        self.cumulative_length = self.oldest = 0

    def _map_batch(self, select: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every buffer by ``select`` of it along the batch."""
        if not self.is_initialized:
            return
        used = min(self.cumulative_length, self.capacity)
        chosen = [select(buffer[:, :, :used]) for buffer in (self.k_buffer, self.v_buffer)]
        made = self._allocate(chosen[0].shape[0], self.capacity)
        for buffer, states in zip(made, chosen):
            buffer[:, :, :used].copy_(states)
        self.k_buffer, self.v_buffer = made

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.is_initialized:
            beam_idx = beam_idx.to(self.k_buffer.device)
            self._map_batch(lambda states: states.index_select(0, beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map_batch(lambda states: states[indices, ...])

    def offload(self) -> None:
        raise NotImplementedError("FastpathCache does not offload: pass cache_implementation='offloaded' to generate()")

    prefetch = offload

    def __repr__(self) -> str:
        window = f", window {self.sliding_window}" if self.is_sliding else ""
        return f"FastpathLayer({self.cumulative_length} of {self.capacity} slots{window})"


class FastpathCache(Cache):
    """KV cache whose buffers are preallocated, grow by a quarter, and are read by the decode kernels.

    It takes the place of ``DynamicCache`` in every way but offloading, and can be passed as ``past_key_values``,
    kept, deep-copied and continued.

    Args:
        config: the model's config; None makes full-attention layers as they are first used.
        kv_dtype: storage dtype (float32, float16 or bfloat16); None takes the dtype of the states.

    Raises:
        ValueError: another ``kv_dtype``, a config with layers that are neither full nor sliding attention, or with a
            sliding window of one token.

    Source: transformers ``cache_utils.py@5.17``, ``DynamicCache``.
    """

    def __init__(self, config=None, kv_dtype: torch.dtype | None = None):
        if kv_dtype is not None and kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype is {kv_dtype}, expected float32, float16, bfloat16 or None")
        self.kv_dtype = kv_dtype
        self._seq_lens: tuple[tuple, torch.Tensor] | None = None
        if config is None:
            super().__init__(layer_class_to_replicate=FastpathLayer)
            return
        super().__init__(layers=[_like(layer, kv_dtype) for layer in DynamicCache(config=config).layers])

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self._grow(layer_idx + 1)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _grow(self, num_layers: int) -> None:
        while len(self.layers) < num_layers:
            self.layers.append(FastpathLayer(kv_dtype=self.kv_dtype))

    def prepare(self, layer_idx: int, states: torch.Tensor) -> None:
        """Get a layer ready for states of this shape and dtype; see ``FastpathLayer.prepare``."""
        self._grow(layer_idx + 1)
        self.layers[layer_idx].prepare(states)

    def reserve(self, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` more positions in every layer, one layer after the other.

        Returns:
            Whether any buffer moved.
        """
        return any([layer.reserve(num_tokens) for layer in self.layers])

    def advance(self, num_tokens: int) -> None:
        """Count positions that kernels have written in every layer."""
        for layer in self.layers:
            layer.advance(num_tokens)

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.layers:
            layer.cropped_length(tokens_to_remove)  # all layers or none
        super().crop(tokens_to_remove)

    def settle(self, num_layers: int) -> None:
        """Give the layers of a model one length again after a forward that was interrupted: the shortest layer's. If a
        window has moved on too far for that, forget everything, so that the whole text is read again."""
        lengths = [layer.cumulative_length for layer in self.layers]
        shortest = min(lengths) if len(lengths) == num_layers else 0
        try:
            for layer in self.layers:
                layer.crop(shortest - layer.cumulative_length)
        except RuntimeError:
            self.reset()

    def seq_lens(self, layer_idx: int, new_tokens: int) -> torch.Tensor:
        """int32 [batch]: tokens each row of a layer holds once ``new_tokens`` more are there. Do not write to it."""
        layer = self.layers[layer_idx]
        key = (layer.cumulative_length + new_tokens, layer.batch_size, layer.k_buffer.device)
        if self._seq_lens is None or self._seq_lens[0] != key:  # the layers of one forward share one tensor
            with torch.inference_mode(False):
                self._seq_lens = key, torch.full(key[1:2], key[0], dtype=torch.int32, device=key[2])
        return self._seq_lens[1]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        for layer in self.layers:
            window = None if layer.sliding_window is None else torch.tensor(layer.sliding_window)
            yield layer.keys, layer.values, window

    @classmethod
    def from_dynamic(cls, cache: DynamicCache, kv_dtype: torch.dtype | None = None) -> FastpathCache:
        """A FastpathCache with the contents of ``cache``.

        Raises:
            ValueError: ``cache`` has layers that are neither full nor sliding attention.
        """
        made = cls(kv_dtype=kv_dtype)
        for layer in cache.layers:
            copy = _like(layer, kv_dtype)
            if layer.is_initialized and layer.keys.numel():
                copy.lazy_initialization(layer.keys, layer.values)
                copy.cumulative_length = copy.oldest = layer.get_seq_length() - layer.keys.shape[2]
                copy.append(layer.keys, layer.values)
            made.layers.append(copy)
        return made

    def to_dynamic(self) -> DynamicCache:
        """A transformers ``DynamicCache`` with the same contents."""
        made = DynamicCache()
        for layer in self.layers:
            windowed = layer.sliding_window is not None
            copy = DynamicSlidingWindowLayer(sliding_window=layer.sliding_window) if windowed else DynamicLayer()
            if layer.is_initialized and layer.get_seq_length():
                copy.update(layer.keys.to(layer.dtype).clone(), layer.values.to(layer.dtype).clone())
                if windowed:
                    copy.cumulative_length = layer.get_seq_length()
            made.layers.append(copy)
        return made


def _like(layer: CacheLayerMixin, kv_dtype: torch.dtype | None) -> FastpathLayer:
    """An empty FastpathLayer that plays the part of a transformers layer."""
    if type(layer) is DynamicSlidingWindowLayer:
        if layer.sliding_window < MIN_WINDOW:
            raise ValueError(
                f"FastpathCache got sliding_window={layer.sliding_window}, expected {MIN_WINDOW} or more: use a "
                "transformers cache, which keeps everything there"
            )
        made = FastpathLayer(layer.sliding_window, kv_dtype)
    elif type(layer) is DynamicLayer:
        made = FastpathLayer(None, kv_dtype)
    else:
        raise ValueError(f"FastpathCache has no counterpart of {type(layer).__name__}: use a transformers cache")
    made.record_past = record_past_of(layer)
    return made
