"""A sum over all bytes of a model's tensors, which tells whether weights were changed in place.

PyTorch counts changes of a tensor, but not those that go through ``tensor.data``, by which adapters are merged. The sum
reads every byte once, as a token does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ... import compat, ops


class PendingSum:
    """A sum that devices may still be computing."""

    def __init__(self, totals: list[torch.Tensor]):
        self._totals = totals
        self._events = []
        for device in {total.device for total in totals if total.is_cuda}:
            self._events.append(torch.cuda.Event())
            self._events[-1].record(torch.cuda.current_stream(device))

    def is_done(self) -> bool:
        """Whether :meth:`value` does not wait."""
        return all(event.query() for event in self._events)

    def value(self) -> tuple[int, ...]:
        """Wait for the devices; return what :func:`weights_sum` returns."""
        return tuple(int(total) for total in self._totals)


def weights_sum(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Return numbers that are others once a byte of a tensor is another one, or is elsewhere.

    Args:
        tensors: on any devices; those on "meta", which hold no data, are left out. The host waits for the devices.
    """
    return begin_sum(tensors).value()


def begin_sum(tensors: Iterable[torch.Tensor]) -> PendingSum:
    """Do as :func:`weights_sum`, and do not wait for the devices."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    known = set()
    with torch.no_grad(), torch.inference_mode(False):
        for tensor in _plain(tensors):
            if not tensor.is_meta and (memory := compat.memory_of(tensor)) not in known:
                known.add(memory)
                found.setdefault(tensor.device, []).append(_whole(tensor))
        return PendingSum([ops.bytes_sum.overload(each) for each in found.values()])


def _plain(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield tensors, and in the place of a tensor that is made of others, these."""
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            yield from _plain(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over all of the memory that ``tensor`` is a part of: itself, where it is all of that."""
    storage = tensor.untyped_storage()
    if tensor.nbytes == storage.nbytes() and tensor.is_contiguous():
        return tensor
    empty: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    whole: torch.Tensor = empty.set_(storage, 0, (storage.nbytes(),))
    return whole
