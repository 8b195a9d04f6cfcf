"""FastpathLayer: the methods that transformers calls on a cache layer, over buffers that the decode kernels use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ops.kv_cache import SCALE_DTYPE, is_quantized
from .buffers import BUFFERS, KV_DTYPES, BufferedLayer


class FastpathLayer(BufferedLayer):
    """Keys and values of one layer in two preallocated buffers [batch, num_kv_heads, capacity, head_dim].

    Quantized layers (int8, float8_e4m3fn) also have scales [batch, num_kv_heads, capacity], see
    ``ops.kv_cache.quantized``. Position p lies in slot ``p mod capacity``. A full-attention layer grows before it would
    wrap; a sliding-window layer stops growing at window + 16 slots and is a ring from then on.

    Args:
        sliding_window: positions that a token of this layer sees, itself included; None for all.
        kv_dtype: storage dtype; None takes the dtype of the first states.
    """

    is_compileable = False
    is_croppable = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        empty, values = (each.new_empty((*each.shape[:2], 0, each.shape[3])) for each in (key_states, value_states))
        # transformers' own layer goes on counting as well, without the positions before
        loose = {0: empty, 1: values} if self.is_sliding and self._length else {}
        if self.kv_dtype is not None:
            empty, values = empty.to(self.kv_dtype), values.to(self.kv_dtype)
        scales = empty.new_empty(empty.shape[:3], dtype=SCALE_DTYPE) if is_quantized(empty.dtype) else None
        kind = {"dtype": key_states.dtype, "device": key_states.device, "is_initialized": True}
        length = {} if loose else {"_length": 0, "oldest": 0}
        self._replace((empty, values, scales, scales), _loose=loose, _copies=frozenset(), **kind, **length)

    def prepare(self, states: torch.Tensor, values: torch.Tensor | None = None) -> None:
        """Prepare for keys and values of this shape, [batch, num_kv_heads, any, head_dim], and dtype; all that is held
        stays. ``values`` is None if values are as keys."""
        values = states if values is None else values
        if self.is_initialized:
            self.take()
        # a layer that was reset may get another batch
        if not self.is_initialized or (self._length == 0 and not self._loose and self._is_other(states, values)):
            self.lazy_initialization(states, values)

    def _is_other(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether the buffers, which hold nothing, are for other keys and values than these."""
        for buffer, states in ((self.k_buffer, keys), (self.v_buffer, values)):
            shape = self.batch_size, buffer.shape[1], buffer.shape[3], buffer.device
            if shape != (*states.shape[:2], states.shape[3], states.device):
                return True
        return self.kv_dtype is None and self.k_buffer.dtype != keys.dtype

    def admit(
        self, key_shape: tuple[int, int, int], value_shape: tuple[int, int, int], dtype: torch.dtype, device: Any
    ) -> bool:
        """Prepare to append states behind others.

        Args:
            key_shape, value_shape: batch, num_kv_heads and head_dim of the states.
            dtype, device: of the states.

        Returns:
            Whether kernels can append them; if not, only :meth:`update` can.

        Raises:
            RuntimeError: the layer holds states of another batch, model or device. The layer is not changed then.
        """
        fits = self.take()
        if not self.is_initialized:  # the user has assigned None
            return False
        keys, values = self._loose.values() if self._loose else (self.k_buffer, self.v_buffer)
        held = [(self.batch_size, half.shape[1], half.shape[3]) for half in (keys, values)]
        if held != [tuple(key_shape), tuple(value_shape)] or keys.device != device:
            names = "batch {}, num_kv_heads {}, head_dim {}"
            raise RuntimeError(
                f"a {type(self).__name__} of {self._length} positions got keys and values of "
                f"{names.format(*key_shape)} (values: {value_shape[2]}) on {device}, expected those of what it holds, "
                f"{names.format(*held[0])} (values: {held[1][2]}) on {keys.device}: pass a cache of this batch and "
                "model, or reset() this one. Nothing was written"
            )
        if fits and self.kv_dtype is None and (wide := torch.promote_types(self.k_buffer.dtype, dtype)) != keys.dtype:
            self._widen(wide)
        return fits

    def _widen(self, dtype: torch.dtype) -> None:
        """Convert the buffers to a dtype in which nothing is lost, as ``torch.cat`` would."""
        with torch.inference_mode(False):
            made = tuple(buffer.to(dtype) for buffer in self.buffers)
        self._replace(made, dtype=dtype)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states and return what attention sees, in order of position.

        Args:
            key_states, value_states: [batch, num_kv_heads, new, head_dim].

        Returns:
            Keys and values in the states' dtype, as they are stored (rounded to the storage dtype, or quantized and
            dequantized), so that the result does not depend on how a text is cut. Full attention sees all positions; a
            sliding window sees the newest window - 1 positions before these states, and these states.

        Raises:
            RuntimeError: gradients would have to flow through the cache, or the layer holds states of another batch,
                number of heads, head size or device.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError(
                "FastpathCache does not record gradients: run under torch.no_grad(), or train with use_cache=False "
                "or a transformers DynamicCache"
            )
        self.prepare(key_states, value_states)
        shapes = [(*states.shape[:2], states.shape[3]) for states in (key_states, value_states)]
        dtype = torch.promote_types(key_states.dtype, value_states.dtype)
        if not self.admit(*shapes, dtype, key_states.device):
            return self._as_stock("update", self._rounded(key_states), self._rounded(value_states))
        past = self._held()
        stored = self._stored_as(key_states, value_states)
        seen = None
        if self.is_sliding and past:  # read now, because append_stored() may overwrite them
            before, new = self._newest(past), self._dequantized(stored)
            seen = [torch.cat(states, dim=2) for states in zip(before, new)]
        self.append_stored(stored)
        if past == 0:
            seen = self._dequantized(stored)
        elif seen is None:
            seen = self._newest(self._length)
        return seen[0].to(key_states.dtype), seen[1].to(value_states.dtype)

    def wait_for_more(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Hold the first states as they are until something follows them, as if a user had assigned them; return False
        if more than they lies in their memory, or if storing them would change them.

        Nobody else may hold the tensors, who could write into them.
        """
        if not self._may_wait(keys, values):
            return False
        kind = {"dtype": keys.dtype, "device": keys.device, "is_initialized": True}
        vars(self).update(_length=keys.shape[2], oldest=0, _loose={0: keys, 1: values}, _copies=frozenset(), **kind)
        return True

    def _may_wait(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        if type(self) is not FastpathLayer or self.is_sliding or self.kv_dtype is not None:
            return False
        if self.has_buffers or self._loose or self._length or torch.is_grad_enabled():
            return False
        if keys.dtype != values.dtype or keys.shape[:3] != values.shape[:3] or keys.device != values.device:
            return False
        if keys.dtype not in KV_DTYPES or keys.data_ptr() == values.data_ptr():
            return False
        return _owns_memory(keys) and _owns_memory(values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the positions that ``update`` will return for ``query_length`` new tokens."""
        if not self.is_sliding:
            return self.get_seq_length() + query_length, 0
        held = self._held()
        return held + query_length, self._length - held

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def activate_past_recording(self) -> None:
        """Keep enough positions beyond the window that the next ``crop`` can remove up to 1024 tokens."""
        self.take()
        self.record_past = True
        ring = self._ring_capacity()
        if ring is not None and self.has_buffers and not self._loose and self._length > self.capacity:
            self._resize(ring)  # a ring that has wrapped needs a new layout before it may hold more
        # a ring that has not wrapped grows on its own, up to the larger capacity

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``abs(tokens_to_remove)`` positions.

        Raises:
            ValueError: the number is positive.
            RuntimeError: a sliding-window layer no longer holds what would become visible.
        """
        length = self.cropped_length(tokens_to_remove)
        if self._loose:
            self._as_stock("crop", tokens_to_remove)
        else:
            self._length = length

    def cropped_length(self, tokens_to_remove: int) -> int:
        """Return the length after ``crop(tokens_to_remove)``; raise what ``crop`` would raise."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}) is not supported: pass a negative number, the tokens to remove")
        if not self.take():
            layer = self._stock_layer()
            layer.crop(tokens_to_remove)
            return layer.cumulative_length
        length = max(0, self._length + tokens_to_remove)
        if self.is_sliding and self.oldest > max(0, length - self.sliding_window + 1):
            most = self._length - self.oldest - self.sliding_window + 1
            raise RuntimeError(
                f"cannot remove {-tokens_to_remove} tokens from a sliding-window layer that has moved on: at most "
                f"{max(0, most)}. Call activate_past_recording() before generating them."
            )
        return length

    def reset(self) -> None:
        """Forget every position; the buffers stay."""
        vars(self).update(_loose={}, _copies=frozenset(), _length=0, oldest=0)

    def _map_batch(self, select: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every buffer by ``select`` of it along the batch."""
        if not self.is_initialized:
            return
        if not self.take():
            self._loose = {place: select(half) for place, half in self._loose.items()}
            return
        if not self.is_initialized:  # the user has assigned None
            return
        used = min(self._length, self.capacity)
        chosen = [select(buffer[:, :, :used]) for buffer in self.buffers]
        made = self._allocate(chosen[0].shape[0], self.capacity)
        for buffer, states in zip(made, chosen):
            buffer[:, :, :used].copy_(states)
        self._replace(made)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.is_initialized:
            beam_idx = beam_idx.to((self._loose.get(0) if self._loose else self.k_buffer).device)
            self._map_batch(lambda states: states.index_select(0, beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map_batch(lambda states: states[indices, ...])

    def __getstate__(self) -> dict:
        """Return quantized buffers as bytes, because PyTorch cannot pickle float8."""
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
        return f"FastpathLayer({self._length} of {self.capacity} slots{window})"


def _owns_memory(states: torch.Tensor) -> bool:
    return not states.is_inference() and states.untyped_storage().nbytes() == states.nbytes
