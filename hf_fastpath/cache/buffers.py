"""Buffers of one layer: where the keys and values of a position lie, how they are stored and read, how buffers grow."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..native import huge_pages
from ..ops.kv_cache import LARGEST_QUANT, KVCache, dequantized, is_quantized, quantized, requantized
from .edits import EditableLayer

#: capacities are multiples of this, so that short conversations do not grow at every token
CAPACITY_STEP = 64
#: slots that a sliding-window layer keeps beyond its window: crop() can remove that many tokens, and one more, exactly
RING_SLACK = 16
#: the same number while past recording is on (assisted decoding crops whole rejected drafts)
RECORDING_SLACK = 1024
#: storage types that ``kv_dtype`` may name; int8 and float8_e4m3fn have a scale for each head and token
KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, *LARGEST_QUANT)
#: the tensors of a cache: keys and values, and the scales of quantized ones
BUFFERS = ("k_buffer", "v_buffer", "k_scales", "v_scales")


class BufferedLayer(EditableLayer):
    """The storage of :class:`.layer.FastpathLayer`, which adds the methods that transformers calls."""

    def __init__(self, sliding_window: int | None = None, kv_dtype: torch.dtype | None = None):
        self.k_buffer: torch.Tensor | None = None
        self.v_buffer: torch.Tensor | None = None
        self.k_scales: torch.Tensor | None = None
        self.v_scales: torch.Tensor | None = None
        super().__init__(sliding_window)
        self.kv_dtype = kv_dtype
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None
        self.oldest = 0  # lowest position that is still in its slot
        self.expected_length = 0  # see FastpathCache.expect
        self.is_kept = False  # True between checkpoint() and the end of that forward

    @property
    def capacity(self) -> int:
        """Slots allocated for each sequence."""
        return 0 if self.k_buffer is None else self.k_buffer.shape[2]

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """K and V, and the scales of quantized ones, as the kernels take them."""
        return tuple(buffer for name in BUFFERS if (buffer := getattr(self, name)) is not None)

    def kv_cache(self) -> KVCache:
        """Return the buffers as the kernels take them."""
        return KVCache(self.k_buffer, self.v_buffer, self.k_scales, self.v_scales)

    def _replace(self, made: Iterable[torch.Tensor | None], **others: Any) -> None:
        """Set the buffers and other attributes, all of them or, if an interrupt comes, none."""
        vars(self).update(zip(BUFFERS, made), _has_views=False, **others)

    @property
    def is_quantized(self) -> bool:
        return self.k_scales is not None

    @property
    def has_buffers(self) -> bool:
        return self.k_buffer is not None

    @property
    def shows_views(self) -> bool:
        return not self.is_sliding and not self.is_quantized

    @property
    def batch_size(self) -> int:
        if (keys := self._loose.get(0)) is not None:
            return keys.shape[0]
        return -1 if self.k_buffer is None else self.k_buffer.shape[0]

    def _ring_capacity(self) -> int | None:
        if self.sliding_window is None:
            return None
        return self.sliding_window + (RECORDING_SLACK if self.record_past else RING_SLACK)

    def _held(self) -> int:
        """Return how many of the newest positions ``keys`` and ``values`` show."""
        if self.sliding_window is None:
            return self._length
        return min(self._length, self.sliding_window - 1)

    def _most_held(self) -> int:
        return self._ring_capacity()

    def _read(self, place: int) -> torch.Tensor:
        buffers = (getattr(self, name) for name in BUFFERS[place::2])
        return self._half_of([self._ordered(buffer, self._held()) for buffer in buffers if buffer is not None])

    def _half_of(self, stored: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return keys or values from what is stored of them; if there are scales, dequantize."""
        return stored[0] if len(stored) == 1 else dequantized(*stored, self.dtype)

    def _ordered(self, buffer: torch.Tensor, count: int) -> torch.Tensor:
        """Return the newest ``count`` positions of ``buffer``, as a view unless the ring wraps inside them."""
        if count == 0:
            return buffer[:, :, :0]
        first = (self._length - count) % self.capacity
        if first + count <= self.capacity:
            return buffer[:, :, first : first + count]
        return torch.cat((buffer[:, :, first:], buffer[:, :, : first + count - self.capacity]), dim=2)

    def _newest(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the newest ``count`` positions, dequantized."""
        found = tuple(self._ordered(buffer, count) for buffer in self.buffers)
        return self._dequantized(found)

    def _dequantized(self, stored: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values from what :meth:`_stored_as` gives, or from parts of the buffers."""
        return self._half_of(stored[0::2]), self._half_of(stored[1::2])

    def _stored_as(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what goes into each of the buffers."""
        if self.is_quantized:
            (k, k_scales), (v, v_scales) = (quantized(s, self.k_buffer.dtype) for s in (key_states, value_states))
            return k, v, k_scales, v_scales
        return key_states.to(self.k_buffer.dtype), value_states.to(self.k_buffer.dtype)

    def _rounded(self, states: torch.Tensor) -> torch.Tensor:
        if self.kv_dtype is None:
            return states
        if is_quantized(self.kv_dtype):
            return dequantized(*quantized(states, self.kv_dtype), states.dtype)
        return states.to(self.kv_dtype).to(states.dtype)

    def _storage_dtype(self, *states: torch.Tensor) -> torch.dtype:
        """Return the dtype that holds ``states`` and what is held; values are rounded to ``kv_dtype`` only."""
        if self.kv_dtype is not None:
            return self.kv_dtype
        held = self.k_buffer.dtype if self.has_buffers else self.dtype
        widest = functools.reduce(torch.promote_types, [each.dtype for each in states], held or states[0].dtype)
        if widest not in (*KV_DTYPES, held):
            raise RuntimeError(
                f"keys or values assigned to a {type(self).__name__} are {widest}, expected float32, float16 or "
                f"bfloat16: assign them as .to({held or torch.float32})"
            )
        return widest

    def _put(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        dtype, count = self._storage_dtype(keys, values), keys.shape[2]
        if is_quantized(dtype):
            (k, k_scales), (v, v_scales) = (requantized(states, dtype) for states in (keys, values))
            stored = k, v, k_scales, v_scales
        else:
            stored = keys, values
        ring = self._ring_capacity()
        capacity = self._grown(count)
        like = [states if is_quantized(dtype) else states.to(dtype) for states in stored]
        made = self._allocate(keys.shape[0], capacity if ring is None else min(capacity, ring), like)
        first = self._length - count if self.is_sliding else 0
        for buffer, states in zip(made, like):
            self.store(buffer, states, first)
        kind = {"dtype": self.dtype or keys.dtype, "device": keys.device, "is_initialized": True}
        self._replace(made, _loose={}, _copies=frozenset(), _length=first + count, oldest=first, **kind)

    def _forget(self) -> None:
        length = {} if self.is_sliding else {"_length": 0, "oldest": 0}
        self._replace([None] * 4, _loose={}, _copies=frozenset(), is_initialized=False, **length)

    def forget(self) -> None:
        """Let go of the buffers, and of every position."""
        self._forget()
        vars(self).update(_length=0, oldest=0)

    def _allocate(
        self, batch: int, capacity: int, like: Sequence[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Allocate buffers of the dtypes and shapes of ``like``, or of the present buffers."""
        # A tensor made in inference mode could not be written outside that mode, and a cache may be used in both.
        with torch.inference_mode(False):
            made = tuple(
                torch.empty((batch, old.shape[1], capacity, *old.shape[3:]), dtype=old.dtype, device=old.device)
                for old in like or self.buffers
            )
        for buffer in made:
            huge_pages.ask_for(buffer)
        return made

    def _resize(self, capacity: int) -> None:
        """Move all that is held into buffers of ``capacity`` slots."""
        count = min(self._length - self.oldest, capacity)
        first = self._length - count
        made = self._allocate(self.batch_size, capacity)
        if count > 0:
            for old, new in zip(self.buffers, made):
                self.store(new, self._ordered(old, count), first)
        self._replace(made, oldest=first)

    @staticmethod
    def store(buffer: torch.Tensor, states: torch.Tensor, first: int) -> None:
        """Write ``states``, of the positions from ``first`` on, into their slots; only the newest ``capacity`` fit."""
        capacity, count = buffer.shape[2], states.shape[2]
        if first + count <= capacity:  # this usual case is apart because every view costs host time
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

        Raises:
            RuntimeError: keys and values that were assigned to a layer with a window are not its newest positions.
        """
        before = self.k_buffer
        self._take_all()
        needed = self._length + num_tokens
        ring = self._ring_capacity()
        if needed <= self.capacity or (ring is not None and self.capacity >= ring):
            # Buffers that the user was shown are the user's, and what a forward overwrites must come back if it fails.
            if self._has_views or (self.is_kept and ring is not None and self._loses(needed)):
                self._resize(self.capacity)
            return self.k_buffer is not before
        grown = self._grown(needed)
        self._resize(grown if ring is None else min(grown, ring))
        return True

    def widen(self, capacity: int) -> bool:
        """Have at least so many slots, or all of a ring; return whether the buffers moved."""
        ring = self._ring_capacity()
        capacity = capacity if ring is None else min(capacity, ring)
        if moves := self.capacity < capacity:
            self._resize(capacity)
        return moves

    def _grown(self, needed: int) -> int:
        """Return the capacity of buffers that have to hold so many positions."""
        if needed < self.expected_length:
            grown = min(self.expected_length, needed + needed // 4)
        else:
            grown = max(needed, self.capacity + self.capacity // 4)
        return -(-grown // CAPACITY_STEP) * CAPACITY_STEP

    def _take_all(self) -> None:
        if self._loose and not self.take():
            raise RuntimeError(
                f"the keys assigned to a {type(self).__name__} with a window of {self.sliding_window} are "
                f"{self._loose[0].shape[2]}, expected the newest {self._held()} of {self._length} positions: set "
                "cumulative_length as well"
            )

    def _loses(self, length: int) -> bool:
        """Whether a ring filled up to ``length`` has overwritten positions that the next token sees now."""
        return length - self.capacity > max(0, self._length - self.sliding_window + 1)

    def checkpoint(self) -> dict:
        """Return all that :meth:`restore` needs to undo the changes that follow."""
        saved = dict(vars(self))
        self.is_kept = True
        return saved

    def restore(self, saved: dict) -> None:
        """Go back to the state of a :meth:`checkpoint`."""
        if self.is_sliding and (buffer := saved["k_buffer"]) is not None and buffer.shape[2] >= self._ring_capacity():
            # positions that the window does not need may have been overwritten
            saved["oldest"] = max(saved["oldest"], saved["_length"] - self.sliding_window + 1)
        vars(self).update(saved)

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write the states of the next positions, [batch, num_kv_heads, new, head_dim]."""
        self.append_stored(self._stored_as(key_states, value_states))

    def stored(self, first: int, end: int) -> tuple[torch.Tensor, ...]:
        """Return what each of the buffers has of positions ``first`` to ``end``, of a layer without a window."""
        return tuple(buffer[:, :, first:end] for buffer in self.buffers)

    def append_stored(self, stored: tuple[torch.Tensor, ...]) -> None:
        """Do as :meth:`append`, given what belongs into each of the buffers."""
        count = stored[0].shape[2]
        self.reserve(count)
        for buffer, states in zip(self.buffers, stored):
            self.store(buffer, states, self._length)
        self.advance(count)

    def advance(self, num_tokens: int) -> None:
        """Count positions that kernels have written."""
        self._length += num_tokens
        self.oldest = max(self.oldest, self._length - self.capacity)

    def hold_rows(self, longest: int, oldest: int = 0) -> None:
        """Note that kernels have written rows of different lengths.

        Args:
            longest: positions of the longest row.
            oldest: lowest position that is in its slot, as far as the capacity does not say.
        """
        self._length, self.oldest = longest, max(0, longest - self.capacity, oldest)

    def put_rows(self, source: BufferedLayer, rows: dict[int, int], length: int) -> None:
        """Copy the newest positions of texts that are ``length`` long.

        Args:
            source: a layer of the same kind, heads and storage dtype.
            rows: row of ``source`` -> the row where the text goes, which has room for it.
        """
        count = min(length, source.capacity, self.capacity)
        first = (length - count) % max(1, source.capacity)
        head = min(count, source.capacity - first)
        for old, new in zip(source.buffers, self.buffers):
            for here, there in rows.items():
                own, its = new[there : there + 1], old[here : here + 1]
                self.store(own, its[:, :, first : first + head], length - count)
                if head < count:
                    self.store(own, its[:, :, : count - head], length - count + head)
