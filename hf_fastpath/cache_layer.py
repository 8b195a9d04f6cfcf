"""FastpathLayer: keys and values of one layer, in buffers that the decode kernels read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from . import huge_pages
from .ops.kv_cache import LARGEST_QUANT, SCALE_DTYPE, dequantized, is_quantized, quantized

#: capacities are multiples of this, so that short conversations do not grow at every token
CAPACITY_STEP = 64
#: slots a sliding-window layer keeps beyond its window: that many tokens (and one) can be cropped exactly
RING_SLACK = 16
#: the same while past recording is on (assisted decoding crops whole rejected drafts)
RECORDING_SLACK = 1024
#: storage types ``kv_dtype`` may name; int8 and float8_e4m3fn have a scale a head and token
KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, *LARGEST_QUANT)
#: one tensor of a cache: keys or values, or the scales of quantized ones
BUFFERS = ("k_buffer", "v_buffer", "k_scales", "v_scales")


class FastpathLayer(CacheLayerMixin):
    """Keys and values of one layer in two preallocated buffers [batch, num_kv_heads, capacity, head_dim]; of int8 and
    float8_e4m3fn, also their scales [batch, num_kv_heads, capacity], see ``ops.kv_cache.quantized``.

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
        self.k_scales: torch.Tensor | None = None
        self.v_scales: torch.Tensor | None = None
        super().__init__()
        self.sliding_window = sliding_window
        self.kv_dtype = kv_dtype
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None
        self.cumulative_length = 0
        self.oldest = 0  # lowest position that is still in its slot
        self.expected_length = 0  # see FastpathCache.expect
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
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """K, V, and if they are quantized their scales: what the kernels take."""
        return tuple(buffer for name in BUFFERS if (buffer := getattr(self, name)) is not None)

    def _replace(self, made: Iterable[torch.Tensor | None], **others: Any) -> None:
        """Set the buffers and other attributes, all or none where an interrupt comes between."""
        vars(self).update(zip(BUFFERS, made), **others)

    @property
    def is_quantized(self) -> bool:
        return self.k_scales is not None

    @property
    def batch_size(self) -> int:
        return -1 if self.k_buffer is None else self.k_buffer.shape[0]

    @property
    def keys(self) -> torch.Tensor | None:
        """[batch, num_kv_heads, held, head_dim] in order of position; ``held`` as transformers' own layers have it.
        Quantized ones in the dtype of the states they were."""
        return None if self.k_buffer is None else self._newest(self._held())[0]

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        self._assign(0, states)

    @property
    def values(self) -> torch.Tensor | None:
        """Like ``keys``, for the values."""
        return None if self.v_buffer is None else self._newest(self._held())[1]

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        self._assign(1, states)

    def _assign(self, place: int, states: torch.Tensor | None) -> None:
        if states is not None and self.is_sliding:
            raise ValueError("the keys and values of a sliding-window FastpathLayer cannot be assigned: use update()")
        made: tuple[torch.Tensor | None, ...] = (None, None)
        if states is not None:
            made = quantized(states, self.k_buffer.dtype) if self.is_quantized else (states.contiguous(), None)
        length = {} if states is None else {"cumulative_length": states.shape[-2], "oldest": 0}
        vars(self).update(zip(BUFFERS[place::2], made), **length)

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

    def _newest(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the newest ``count`` positions; quantized ones as what they stand for."""
        found = tuple(self._ordered(buffer, count) for buffer in self.buffers)
        return self._dequantized(found)

    def _dequantized(self, stored: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of what :meth:`_stored_as` gives, or of parts of the buffers."""
        if not self.is_quantized:
            return stored
        k, v, k_scales, v_scales = stored
        return dequantized(k, k_scales, self.dtype), dequantized(v, v_scales, self.dtype)

    def _stored_as(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What goes into the buffers, one for each."""
        if self.is_quantized:
            (k, k_scales), (v, v_scales) = (quantized(s, self.k_buffer.dtype) for s in (key_states, value_states))
            return k, v, k_scales, v_scales
        return key_states.to(self.k_buffer.dtype), value_states.to(self.k_buffer.dtype)

    def _allocate(self, batch: int, capacity: int) -> tuple[torch.Tensor, ...]:
        # Tensors born in inference mode could not be written outside it, and a cache may live in both.
        with torch.inference_mode(False):
            made = tuple(
                torch.empty((batch, old.shape[1], capacity, *old.shape[3:]), dtype=old.dtype, device=old.device)
                for old in self.buffers
            )
        for buffer in made:
            huge_pages.ask_for(buffer)
        return made

    def _resize(self, capacity: int) -> None:
        """Move what is held into buffers of ``capacity`` slots."""
        count = min(self.cumulative_length - self.oldest, capacity)
        first = self.cumulative_length - count
        made = self._allocate(self.batch_size, capacity)
        if count > 0:
            for old, new in zip(self.buffers, made):
                self._store(new, self._ordered(old, count), first)
        self._replace(made, oldest=first)

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
        if needed < self.expected_length:
            grown = min(self.expected_length, needed + needed // 4)
        else:
            grown = max(needed, self.capacity + self.capacity // 4)
        grown = -(-grown // CAPACITY_STEP) * CAPACITY_STEP
        self._resize(grown if ring is None else min(grown, ring))
        return True

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write the states of the next positions, [batch, num_kv_heads, new, head_dim]."""
        self._append(self._stored_as(key_states, value_states))

    def _append(self, stored: tuple[torch.Tensor, ...]) -> None:
        count = stored[0].shape[2]
        self.reserve(count)
        for buffer, states in zip(self.buffers, stored):
            self._store(buffer, states, self.cumulative_length)
        self.advance(count)

    def advance(self, num_tokens: int) -> None:
        """Count positions that were written."""
        self.cumulative_length += num_tokens
        self.oldest = max(self.oldest, self.cumulative_length - self.capacity)

    # ---- the contract of a transformers cache layer ------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        empty = key_states.new_empty((*key_states.shape[:2], 0, key_states.shape[3]))
        if self.kv_dtype is not None:
            empty = empty.to(self.kv_dtype)
        scales = empty.new_empty(empty.shape[:3], dtype=SCALE_DTYPE) if is_quantized(empty.dtype) else None
        kind = {"dtype": key_states.dtype, "device": key_states.device}
        self._replace((empty, empty, scales, scales), is_initialized=True, **kind)

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
            Keys and values in the states' dtype, as they are stored: rounded to the storage dtype, or what quants
            stand for, so that how a text is cut makes no difference. Full attention: all positions; sliding: the
            newest window - 1 before these states, and these states.

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
        stored = self._stored_as(key_states, value_states)
        seen = None
        if self.is_sliding and past:  # before the ring overwrites them
            before, new = self._newest(past), self._dequantized(stored)
            seen = [torch.cat(states, dim=2) for states in zip(before, new)]
        self._append(stored)
        if past == 0:
            seen = self._dequantized(stored)
        elif seen is None:
            seen = self._newest(self.cumulative_length)
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
        chosen = [select(buffer[:, :, :used]) for buffer in self.buffers]
        made = self._allocate(chosen[0].shape[0], self.capacity)
        for buffer, states in zip(made, chosen):
            buffer[:, :, :used].copy_(states)
        self._replace(made)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.is_initialized:
            beam_idx = beam_idx.to(self.k_buffer.device)
            self._map_batch(lambda states: states.index_select(0, beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map_batch(lambda states: states[indices, ...])

    def __getstate__(self) -> dict:
        """Quants as bytes: PyTorch pickles no float8."""
        state = vars(self).copy()
        if self.is_quantized:
            state |= {name: (state[name].view(torch.uint8), state[name].dtype) for name in BUFFERS[:2]}
        return state

    def __setstate__(self, state: dict) -> None:
        pairs = {name: value for name, value in state.items() if isinstance(value, tuple)}
        vars(self).update(state | {name: quants.view(dtype) for name, (quants, dtype) in pairs.items()})

    def offload(self) -> None:
        raise NotImplementedError("FastpathCache does not offload: pass cache_implementation='offloaded' to generate()")

    prefetch = offload

    def __repr__(self) -> str:
        window = f", window {self.sliding_window}" if self.is_sliding else ""
        return f"FastpathLayer({self.cumulative_length} of {self.capacity} slots{window})"
