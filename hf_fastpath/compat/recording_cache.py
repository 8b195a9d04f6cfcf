"""A cache that passes keys and values on to a recorder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from .caches import LayerKind, LinearAttentionLayer, layer_kinds, made_layer


class RecordingCache(Cache):
    """A cache whose layers pass keys and values on to ``append(k, v, layer)``, and keep states as transformers' own
    layers do.

    Args:
        config: the config of the model.
        append: takes new keys, new values and the index of the layer; returns all keys and values.
        refuse: is told which attribute of a cache of transformers' was asked for and is not there.

    Attributes:
        kinds: what each layer holds.

    Raises:
        ValueError: the model has layers that hold something else than keys, values and states.
    """

    def __init__(self, config: Any, append: Callable[..., Any], refuse: Callable[[str], None] = lambda name: None):
        kinds = layer_kinds(config)
        if kinds is None:
            raise ValueError("a cache that holds more than keys, values and states")
        self.kinds, self._refuse = kinds, refuse
        super().__init__(layers=[_recording_layer(index, kind, append, refuse) for index, kind in enumerate(kinds)])

    def __getattr__(self, name: str) -> Any:
        if hasattr(DynamicCache(), name):  # else stock code does not find it either
            self._refuse(name)
        raise AttributeError(f"{type(self).__name__} has no {name}", name=name, obj=self)

    def keep(self, count: int) -> None:
        """Leave out all layers but the first ``count``: a config may tell of more layers than its decoder has."""
        self.kinds = self.kinds[:count]
        del self.layers[count:]

    def claim(self, length: int) -> None:
        """Say from now on that ``length`` tokens are held."""
        for layer, kind in zip(self.layers, self.kinds):
            if kind.keys:
                layer.length = length

    def begin(self) -> None:
        """Say from now on that no token has passed: the states are there, and hold nothing."""
        for layer, kind in zip(self.layers, self.kinds):
            if kind.states:
                layer.has_previous_state = dict.fromkeys(layer.has_previous_state, False)

    def states(self) -> list[dict[tuple[str, int], torch.Tensor]]:
        """Return the states of each layer that a forward has made so far: windows of convolutions, recurrent states.

        Returns:
            Of each layer the attribute that holds a state, and the state's place there -> the state.
        """
        found = []
        for layer, kind in zip(self.layers, self.kinds):
            both = [(name, getattr(layer, name)) for name in ("conv_states", "recurrent_states")] if kind.states else []
            of_layer = {(name, place): state for name, states in both for place, state in states.items()}
            found.append({where: state for where, state in of_layer.items() if state is not None})
        return found

    def copy_states(self, first: int, other: int) -> None:
        """Let the layer ``other`` hold states like those of the layer ``first``."""
        if self.kinds[first].states:
            own = ("index", "_append", "_refuse")
            held = {name: value for name, value in vars(self.layers[first]).items() if name not in own}
            vars(self.layers[other]).update(_alike(held))


def _alike(value: Any) -> Any:
    """Return ``value`` with a new tensor in the place of each tensor in it."""
    if isinstance(value, torch.Tensor):
        return value.new_empty_strided(value.size(), value.stride())
    return {name: _alike(each) for name, each in value.items()} if isinstance(value, dict) else value


class _RecordingLayer(CacheLayerMixin):
    is_compileable = False
    is_croppable = False

    def __init__(self, index: int, window: int | None, append: Callable[..., Any], refuse: Callable[[str], None]):
        CacheLayerMixin.__init__(self)
        self.index, self.length, self._append, self._refuse = index, 0, append, refuse
        self.is_sliding, self.sliding_window = window is not None, window
        self.is_initialized = True

    @property
    def keys(self) -> Any:
        self._refuse("keys of a layer")
        return None

    @property
    def values(self) -> Any:
        self._refuse("values of a layer")
        return None

    @keys.setter
    def keys(self, value: Any) -> None:
        if value is not None:
            self._refuse("keys of a layer")

    @values.setter
    def values(self, value: Any) -> None:
        if value is not None:
            self._refuse("values of a layer")

    def lazy_initialization(self, *states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        all_ = self._append(key_states, value_states, self.index)
        self.length = self.length + key_states.shape[2]
        return all_

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def __deepcopy__(self, memo: dict) -> _RecordingLayer:
        raise NotImplementedError("a layer of the cache is copied")


class _RecordingBoth(LinearAttentionLayer, _RecordingLayer):
    def __init__(self, index: int, kind: LayerKind, *given: Callable[..., Any]):
        self._refuse = given[-1]
        LinearAttentionLayer.__init__(self, number_of_states=kind.states)
        _RecordingLayer.__init__(self, index, kind.window, *given)


def _recording_layer(index: int, kind: LayerKind, *given: Callable[..., Any]) -> Any:
    if not kind.keys:
        return made_layer(kind)
    return _RecordingBoth(index, kind, *given) if kind.states else _RecordingLayer(index, kind.window, *given)
