"""Recordings of a model with one adapter, taken for the model with another one of the same kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from .. import compat
from ..decode.calls.named_calls import Call
from ..decode.model.weight import AdaptedWeight, Adapter
from .recorded_step import BiasTable, MadeOfModel, Recording


def adopt(self: Any, kept: Any, differs: Sequence[str]) -> bool:
    """Take the recordings of a part whose model differs in its active adapters alone, if these are of one kind.

    Args:
        self: a ``RecordedModel`` of the model as it is, of which nothing was recorded yet.
        kept: one of the model as it was, without a reason against it.
        differs: places where the Python values of the model differ.

    Returns:
        Whether it could.
    """
    now, before = self._looked_at.adapters, kept._looked_at.adapters
    # Adapters that are not active may be of classes that no other module is of.
    classes = kept.held.names_of_classes() ^ self.held.names_of_classes()
    others = (place for place in differs if place.rpartition(".")[0] not in classes)
    if not now or not all(compat.is_of_adapters(each, now) or compat.is_of_adapters(each, before) for each in others):
        return False
    if kept.lengths != (None, None) or kept.by_length.fingerprints() or kept._recording_reason is not None:
        return False
    try:
        swap = Swap(before, now)
        recordings = {
            key: swap.recording(each) for key, each in kept._recordings.items() if isinstance(each, Recording)
        }
        prompts = self.prompts.like(kept.prompts, swap.recording)
    except (ValueError, OtherScale):
        return False
    self._recordings, self.prompts, self._looked_at.code = recordings, prompts, kept._looked_at.code
    self._arguments, self._passes_mask_on = dict(kept._arguments), kept._passes_mask_on
    self.verdict, self._recording_reason = kept.verdict, None
    return True


class OtherScale(Exception):
    """A number of a list may be an adapter's factor, of which the other adapter has another one."""


class Swap:
    """The tensors of one set of adapters, and those of another set that take their place.

    Args:
        before, now: see :func:`compat.active_adapters`.

    Raises:
        ValueError: the adapters are of several kinds.
    """

    def __init__(self, before: Mapping[str, compat.ActiveAdapters], now: Mapping[str, compat.ActiveAdapters]):
        if before.keys() != now.keys() or any(before[path].kind != now[path].kind for path in before):
            raise ValueError("adapters of other kinds")
        self._instead: dict[int, torch.Tensor] = {}
        # storage of a tensor when lists took views of it -> where the tensor began in it, and the other tensor
        self._of_memory: dict[int, tuple[int, torch.Tensor]] = {}
        self._scales: dict[int, tuple[float, float]] = {}  # id of a tensor of an adapter -> its factor, and the other's
        self._same_scales = True
        for path, old in before.items():
            new = now[path]
            self._same_scales &= old.scales == new.scales
            factors = set(zip(old.scales, new.scales))
            for one, other, (memory, begin) in zip(old.tensors, new.tensors, old.memories):
                known = self._instead.setdefault(id(one), other)
                if self._of_memory.setdefault(memory, (begin, other))[1] is not known or known is not other:
                    raise ValueError("adapters whose tensors share memory")
                if len(factors) == 1 and None not in (factor := next(iter(factors))):
                    self._scales[id(other)] = factor  # type: ignore[assignment]

    def recording(self, found: Recording) -> Recording:
        """Return a list of the other adapters.

        Raises:
            OtherScale: see there.
        """
        values = [self._value_of_model(each) for each in found.values]
        weights = [(matrix, self._weight(weight)) for matrix, weight in found.stand_ins]
        return replace(found, calls=self._calls(found.calls), spans=[], stand_ins=weights, values=values)

    def _value_of_model(self, value: BiasTable | MadeOfModel) -> BiasTable | MadeOfModel:
        calls = self._calls(value.calls)
        if isinstance(value, BiasTable):
            return replace(value, calls=calls)
        made = torch.empty_like(value.tensor)
        self._instead[id(value.tensor)] = made
        self._of_memory[compat.memory_of(value.tensor)] = int(value.tensor.storage_offset()), made
        return replace(value, calls=calls, tensor=made)

    def _calls(self, calls: Sequence[Call]) -> list[Call]:
        given = ({name: self.value(each) for name, each in call.arguments.items()} for call in calls)
        return [Call(call.op, arguments, call.out) for call, arguments in zip(calls, given)]

    def value(self, value: Any) -> Any:
        """Return an argument of a call with the other adapters' tensors in it."""
        if isinstance(value, torch.Tensor):
            if not self._same_scales and self._is_of_adapters(value):
                raise OtherScale
            return self._tensor(value)
        if isinstance(value, (list, tuple)) and any(map(_may_hold_tensors, value)):
            return type(value)(map(self.value, value))
        if is_dataclass(value) and not isinstance(value, type):
            return _replaced(value, self.value)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if (other := self._instead.get(id(tensor))) is not None:
            return other
        pair = None if tensor.is_meta else self._of_memory.get(compat.memory_of(tensor))
        if pair is None:
            return tensor
        begin, other = pair  # of which this is a view
        offset = tensor.storage_offset() - begin + other.storage_offset()
        return other.detach().as_strided(tensor.shape, tensor.stride(), offset)

    def _is_of_adapters(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_meta and compat.memory_of(tensor) in self._of_memory

    def _weight(self, weight: Any) -> Any:
        if not isinstance(weight, AdaptedWeight):
            return self.value(weight)
        return AdaptedWeight(self.value(weight.base), tuple(map(self._adapter, weight.adapters)))

    def _adapter(self, adapter: Adapter) -> Adapter:
        down, up = self._tensor(adapter.down), self._tensor(adapter.up)
        if self._same_scales:
            return Adapter(down, up, adapter.scale)
        before, now = self._scales.get(id(down), (None, 0.0))
        if before != adapter.scale:
            raise OtherScale
        return Adapter(down, up, now)


def _may_hold_tensors(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, list, tuple)) or is_dataclass(value)


def _replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with its fields changed; the value itself if none has changed."""
    inside = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
    changed = {name: change(each) for name, each in inside.items()}
    return value if all(changed[name] is each for name, each in inside.items()) else replace(value, **changed)
