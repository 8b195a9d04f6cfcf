"""Layers of a cache that hold states: windows of convolutions and recurrent states, which every token overwrites."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..compat import LayerKind, LinearAttentionLayer
from .layer import FastpathLayer

#: attributes of a layer with states, each with an entry for each state
_CONTENTS = (
    *("conv_states", "recurrent_states", "is_conv_states_initialized", "is_recurrent_states_initialized"),
    *("has_previous_state", "conv_kernel_size"),
)


class StateLayer(LinearAttentionLayer):
    """Convolution windows and recurrent states of one layer, as transformers' own layer keeps them.

    A decode plan has states at fixed addresses: while a plan runs, the layer holds the plan's buffers (:meth:`hold`),
    and the layer gets memory of its own when the plan ends (:meth:`leave`). A token cannot be taken back from a state;
    :meth:`cropped_length` therefore refuses what transformers' own layer would do wrong.

    Args:
        number_of_states: pairs of a window and a recurrent state.

    Source: transformers ``cache_utils.py@5.24``, ``LinearAttentionLayer``.
    """

    is_compileable = False
    sliding_window: int | None = None

    def __init__(self, number_of_states: int = 1):
        super().__init__(number_of_states=number_of_states)
        self._length = 0

    @property
    def kind(self) -> LayerKind:
        """Return what the layer holds."""
        return LayerKind(keys=False, states=self.number_of_states)

    @property
    def cumulative_length(self) -> int:
        """Return how many tokens have passed: those of prompts, and those that plans have read. Transformers' own code
        tells a layer nothing of tokens that are read one at a time."""
        return self._length

    def advance(self, num_tokens: int) -> None:
        """Count tokens that a plan has read."""
        self._length += num_tokens

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        if state_idx == 0:
            self._length += conv_states.shape[-1]
        return super().update_conv_state(conv_states, state_idx, **kwargs)

    # ---- states as a plan takes them ----------------------------------------------------------------------------

    def _places(self) -> Iterator[tuple[dict[int, torch.Tensor], int]]:
        windows = self.conv_states, self.is_conv_states_initialized
        recurrent = self.recurrent_states, self.is_recurrent_states_initialized
        for states, is_known in (windows, recurrent):
            yield from ((states, place) for place in range(self.number_of_states) if is_known[place])

    @property
    def states(self) -> list[torch.Tensor]:
        """Return all states: windows of convolutions, then recurrent states; each has the batch as first dimension."""
        return [states[place] for states, place in self._places()]

    def admit_states(self, expected: Sequence[torch.Tensor], batch: int) -> None:
        """Check that a plan can go on from what is held.

        Args:
            expected: tensors like the states, of any number of sequences.
            batch: number of sequences.

        Raises:
            RuntimeError: the states are of another batch or model.
        """
        wanted = [((batch, *each.shape[1:]), each.dtype) for each in expected]
        held = [(tuple(each.shape), each.dtype) for each in self.states]
        if held != wanted:
            raise RuntimeError(
                f"a {type(self).__name__} holds states {_named(held)}, expected {_named(wanted)}: pass a cache of this "
                "batch and model, or reset() this one. Nothing was written"
            )

    def begin(self, like: Mapping[tuple[str, int], torch.Tensor], device: torch.device) -> None:
        """Hold states on ``device`` as they are before the first token.

        Args:
            like: name of an attribute with states, and place there -> a tensor of the state's shape and dtype.
        """
        with torch.inference_mode(False):
            for (name, place), each in like.items():
                getattr(self, name)[place] = torch.zeros(each.shape, dtype=each.dtype, device=device)
                getattr(self, f"is_{name}_initialized")[place] = True
                if name == "conv_states":
                    self.conv_kernel_size[place] = each.shape[-1]
                if self.device is None:
                    self.dtype, self.device = each.dtype, device

    def pass_prompt(self) -> None:
        """Note that kernels have written the states of a prompt."""
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), True)

    def hold(self, buffers: Sequence[torch.Tensor]) -> None:
        """Keep the states in ``buffers`` from now on.

        Raises:
            RuntimeError: the states are of another batch or model.
        """
        self.admit_states(buffers, len(buffers[0]))
        for (states, place), buffer in zip(self._places(), buffers, strict=True):
            if states[place] is not buffer:
                buffer.copy_(states[place])
                states[place] = buffer

    def leave(self) -> None:
        """Keep the states in memory that belongs to the layer alone."""
        with torch.inference_mode(False):  # a cache may be used inside and outside of that mode
            for states, place in self._places():
                states[place] = states[place].clone()

    # ---- changes --------------------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        self.cropped_length(tokens_to_remove)
        if self.record_past:
            LinearAttentionLayer.crop(self, tokens_to_remove)
            self._length -= abs(tokens_to_remove)

    def cropped_length(self, tokens_to_remove: int) -> int:
        """Return the length after ``crop(tokens_to_remove)``.

        Raises:
            RuntimeError: the tokens are part of a state.
        """
        if tokens_to_remove and not (self.record_past and self.is_croppable):
            raise RuntimeError(
                f"cannot remove {abs(tokens_to_remove)} tokens from a recurrent state or a convolution's window: pass "
                "a copy.deepcopy() of the cache to what may have to be undone"
            )
        return self._length - abs(tokens_to_remove)

    def reset(self) -> None:
        """Forget every token; the next ones may be of another batch."""
        self._length = 0
        self._forget_states()

    def _forget_states(self) -> None:
        for name in _CONTENTS:
            empty = False if name.startswith(("is_", "has_")) else None
            setattr(self, name, dict.fromkeys(range(self.number_of_states), empty))

    def _map_batch(self, select: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every state by ``select`` of it along the batch."""
        for states, place in self._places():
            states[place] = select(states[place])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map_batch(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map_batch(lambda state: state[indices.to(state.device), ...])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(str(tuple(each.shape)) for each in self.states)})"


class KeysAndStatesLayer(StateLayer, FastpathLayer):
    """Keys and values, and states, of a layer with attention beside a recurrence.

    Args:
        sliding_window, kv_dtype: as of :class:`.layer.FastpathLayer`.
        number_of_states: as of :class:`StateLayer`.
    """

    def __init__(
        self, sliding_window: int | None = None, kv_dtype: torch.dtype | None = None, number_of_states: int = 1
    ):
        StateLayer.__init__(self, number_of_states)
        FastpathLayer.__init__(self, sliding_window, kv_dtype)

    cumulative_length = FastpathLayer.cumulative_length
    advance = FastpathLayer.advance
    get_max_length = FastpathLayer.get_max_length
    __repr__ = FastpathLayer.__repr__

    @property
    def kind(self) -> LayerKind:
        return LayerKind(window=self.sliding_window, states=self.number_of_states)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        return LinearAttentionLayer.update_conv_state(self, conv_states, state_idx, **kwargs)

    def lazy_initialization(self, *states: torch.Tensor, **named: Any) -> None:
        if states:  # keys and values
            FastpathLayer.lazy_initialization(self, *states)
        else:
            LinearAttentionLayer.lazy_initialization(self, **named)

    def activate_past_recording(self) -> None:
        FastpathLayer.activate_past_recording(self)

    def crop(self, tokens_to_remove: int) -> None:
        self.cropped_length(tokens_to_remove)
        if any(True for _ in self._places()) and self.record_past:
            LinearAttentionLayer.crop(self, tokens_to_remove)
        FastpathLayer.crop(self, tokens_to_remove)

    def cropped_length(self, tokens_to_remove: int) -> int:
        StateLayer.cropped_length(self, tokens_to_remove)
        return FastpathLayer.cropped_length(self, tokens_to_remove)

    def reset(self) -> None:
        FastpathLayer.reset(self)
        self._forget_states()

    def _map_batch(self, select: Callable[[torch.Tensor], torch.Tensor]) -> None:
        StateLayer._map_batch(self, select)
        FastpathLayer._map_batch(self, select)


def copy_states(source: LinearAttentionLayer, target: LinearAttentionLayer) -> None:
    """Give ``target``, an empty layer, copies of the states of ``source``."""
    for name in _CONTENTS:
        found = getattr(source, name)
        copies = {place: each.clone() if isinstance(each, torch.Tensor) else each for place, each in found.items()}
        setattr(target, name, copies)
    target.device, target.dtype, target.record_past = source.device, source.dtype, source.record_past


def _named(states: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {shape}" for shape, dtype in states) or "none"
