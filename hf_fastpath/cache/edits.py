"""EditableLayer: the changes that users make to the keys and values of a cache layer, and how buffers take them in."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from ..compat import CacheLayerMixin, DynamicSlidingWindowLayer, LayerKind

#: names of the two halves of a layer
HALVES = ("keys", "values")


class EditableLayer(CacheLayerMixin):
    """Keys and values that can be read, assigned and changed in place like those of transformers' own layers.

    A half (keys or values) that the user assigned, or was shown as a copy, is *loose*: it lies outside of the buffers
    until the layer is next used, which takes the half into the buffers. So either half of an assignment may come first,
    and any write into a copy (an operation in place, through a view, by NumPy) has an effect. Halves that no ring can
    hold, for example of a window from which tokens were removed, stay loose; the methods of transformers' own layer
    then work on them.

    Args:
        sliding_window: positions that a token of this layer sees, itself included; None for all.
    """

    def __init__(self, sliding_window: int | None = None):
        self.sliding_window = sliding_window
        self.record_past = False
        self._length = 0
        self._loose: dict[int, torch.Tensor | None] = {}  # 0: keys, 1: values; the dict is replaced, never changed
        self._copies: frozenset[int] = frozenset()  # loose halves that were shown, and not assigned
        self._has_views = False  # the user may hold views of the buffers
        super().__init__()  # assigns None to both halves
        self._loose = {}

    # ---- of a subclass ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def has_buffers(self) -> bool:
        """Whether the layer has buffers yet."""

    @property
    @abstractmethod
    def shows_views(self) -> bool:
        """Whether :meth:`_read` gives views of the buffers, which can be changed in place."""

    @abstractmethod
    def _read(self, place: int) -> torch.Tensor:
        """Return the keys or values in the buffers, as many positions as transformers' own layer would show."""

    @abstractmethod
    def _put(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold these keys and values, [batch, num_kv_heads, count, head_dim]; nothing is loose then."""

    @abstractmethod
    def _forget(self) -> None:
        """Hold nothing, as a new layer does; a layer with a window goes on counting positions."""

    @abstractmethod
    def _most_held(self) -> int:
        """Return how many positions the buffers of a window can hold."""

    @abstractmethod
    def _rounded(self, states: torch.Tensor) -> torch.Tensor:
        """Return new states with the rounding that storing them would bring."""

    # ---- reading and assigning ----------------------------------------------------------------------------------

    @property
    def kind(self) -> LayerKind:
        """What the layer holds."""
        return LayerKind(window=self.sliding_window)

    @property
    def is_sliding(self) -> bool:
        return self.sliding_window is not None

    @property
    def keys(self) -> torch.Tensor | None:
        """[batch, num_kv_heads, held, head_dim] in order of position; ``held`` is as in transformers' own layers.

        Quantized keys are shown in the dtype that the states had. Keys may be changed in place, and assigned.
        """
        return self._half(0)

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        self._assign(0, states)

    @property
    def values(self) -> torch.Tensor | None:
        """The values, like ``keys``."""
        return self._half(1)

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        self._assign(1, states)

    def _half(self, place: int) -> torch.Tensor | None:
        if place in self._loose:
            return self._loose[place]
        if not self.has_buffers:
            return None
        with torch.inference_mode(False):  # the user may change, outside of that mode, what was read in it
            found = self._read(place)
            if self.shows_views:
                self._has_views = True
                return found
            found = found.clone()
        vars(self).update(_loose=self._loose | {place: found}, _copies=self._copies | {place})
        return found

    def _assign(self, place: int, states: torch.Tensor | None) -> None:
        if states is not None and not (isinstance(states, torch.Tensor) and states.is_floating_point()):
            got = states.dtype if isinstance(states, torch.Tensor) else type(states).__name__
            raise TypeError(f"{type(self).__name__}.{HALVES[place]} got {got}, expected a floating tensor or None")
        vars(self).update(_loose=self._loose | {place: states}, _copies=self._copies - {place})

    @property
    def cumulative_length(self) -> int:
        """Number of positions so far.

        In a sliding-window layer it may be set, before or after keys and values are assigned; they are then the newest
        of so many positions.
        """
        return self._length

    @cumulative_length.setter
    def cumulative_length(self, length: int) -> None:
        if not self.is_sliding:
            raise AttributeError(
                f"the cumulative_length of a {type(self).__name__} without a window follows its keys: assign keys and "
                "values, or crop()"
            )
        loose = {place: self._half(place) for place in range(2)} if self.has_buffers or self._loose else {}
        vars(self).update(_loose=loose, _copies=frozenset(), _length=length)

    # ---- taking in ----------------------------------------------------------------------------------------------

    def take(self) -> bool:
        """Bring loose halves into the buffers.

        Returns:
            Whether nothing is loose now; if something is, only transformers' own code can go on.

        Raises:
            RuntimeError: keys and values do not go together, or gradients would have to flow through them.
        """
        if not self._loose:
            return True
        for place in sorted(self._copies):
            if torch.equal(self._loose[place], self._read(place)):
                others = {other: half for other, half in self._loose.items() if other != place}
                vars(self).update(_loose=others, _copies=self._copies - {place})
        if not self._loose:
            return True
        keys, values = (self._whole_half(place) for place in range(2))
        self._check_halves(keys, values)
        if keys is None:
            self._forget()
            return True
        if self.is_sliding and not self._fits(keys.shape[2]):
            vars(self).update(_loose={0: keys, 1: values}, _copies=frozenset())
            return False
        self._put(keys.detach(), values.detach())
        return True

    def copies(self) -> list[torch.Tensor]:
        """Return copies of keys and values; the layer must have been given some."""
        self.take()
        return [(self._loose[place] if self._loose else self._read(place)).clone() for place in range(2)]

    def _whole_half(self, place: int) -> torch.Tensor | None:
        half = self._loose[place] if place in self._loose else self._read(place) if self.has_buffers else None
        # transformers' layers begin with such an empty tensor
        return None if half is not None and half.dim() == 1 and half.numel() == 0 else half

    def _fits(self, count: int) -> bool:
        """Whether a ring of ``count`` newest positions shows what transformers' own layer would."""
        shown = min(self._length, self.sliding_window - 1)
        return count == shown or (self.record_past and shown < count <= min(self._length, self._most_held()))

    def _check_halves(self, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
        shapes = [None if half is None else tuple(half.shape) for half in (keys, values)]
        if None in shapes:
            alike = keys is values
        else:
            alike = len(shapes[0]) == len(shapes[1]) == 4 and shapes[0][:3] == shapes[1][:3]
            alike = alike and keys.device == values.device
        if not alike:
            places = [half if half is None else f"{tuple(half.shape)} on {half.device}" for half in (keys, values)]
            raise RuntimeError(
                f"a {type(self).__name__} has keys {places[0]} and values {places[1]}, expected both [batch, "
                "num_kv_heads, positions, head_dim] with the same batch, heads and positions on one device: assign "
                "keys and values before the next use of the cache"
            )
        if torch.is_grad_enabled() and keys is not None and (keys.requires_grad or values.requires_grad):
            raise RuntimeError(
                f"keys or values assigned to a {type(self).__name__} require gradients, which it does not record: "
                "assign them detached, or use a transformers DynamicCache"
            )

    # ---- what stays loose ---------------------------------------------------------------------------------------

    def _stock_layer(self) -> DynamicSlidingWindowLayer:
        """Make a layer of transformers' own that holds the loose halves."""
        made = DynamicSlidingWindowLayer(sliding_window=self.sliding_window)
        made.lazy_initialization(*self._loose.values())
        made.keys, made.values = self._loose[0], self._loose[1]
        made.cumulative_length, made.record_past = self._length, self.record_past
        return made

    def _as_stock(self, method: str, *arguments: Any) -> Any:
        """Call a method of transformers' own layer on the loose halves."""
        layer = self._stock_layer()
        found = getattr(layer, method)(*arguments)
        vars(self).update(_loose={0: layer.keys, 1: layer.values}, _length=layer.cumulative_length)
        return found

    def get_seq_length(self) -> int:
        if self.is_sliding:
            return self._length
        if not self.is_initialized:
            return 0
        if 0 not in self._loose:
            return self._length
        keys = self._loose[0]
        return 0 if keys is None or keys.numel() == 0 else keys.shape[-2]
