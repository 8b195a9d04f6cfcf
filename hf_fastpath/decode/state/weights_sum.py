"""A sum over all bytes of a model's tensors, which tells whether weights were changed in place.

PyTorch counts changes of a tensor, but not those that go through ``tensor.data``, by which adapters are merged. The sum
reads every byte once, as a token does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ... import compat

#: words of eight bytes that are summed before they are weighted by their place
_BLOCK = 512
#: of so many blocks one is also summed word by word
_BLOCKS = 16
#: an odd number whose multiples are spread over all of 64 bits
_FACTOR = -7046029254386353131


@functools.lru_cache(maxsize=16)
def _factors(count: int, device: torch.device) -> torch.Tensor:
    """Return int64 [count], odd numbers, another one for every place."""
    with torch.inference_mode(False):
        return (torch.arange(1, count + 1, device=device) * _FACTOR) | 1


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
    pieces: dict[torch.device, list[torch.Tensor]] = {}
    known = set()
    with torch.no_grad(), torch.inference_mode(False):
        for tensor in _plain(tensors):
            if tensor.is_meta or compat.memory_of(tensor) in known:
                continue
            known.add(compat.memory_of(tensor))
            pieces.setdefault(tensor.device, []).extend(_sums(tensor.untyped_storage(), tensor.device))
        totals = [_total(torch.cat(each)) for each in pieces.values()]
    return PendingSum(totals)


def _plain(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield tensors, and in the place of a tensor that is made of others, these."""
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            yield from _plain(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


def _sums(storage: torch.UntypedStorage, device: torch.device) -> list[torch.Tensor]:
    """Return int64 sums of blocks of a storage, in order. Few views are made: on a GPU, each takes the host as long as
    the device takes for some megabytes."""
    size = storage.nbytes()
    blocks, found = size // (8 * _BLOCK), []
    if blocks:
        words = _view(storage, torch.int64, 0, (blocks, _BLOCK), device)
        found = [words.sum(1), words[::_BLOCKS].sum(0)]
    if behind := size // 8 - blocks * _BLOCK:
        found.append(_view(storage, torch.int64, blocks * _BLOCK, (behind,), device))
    if single := size % 8:
        found.append(_view(storage, torch.uint8, size - single, (single,), device).long())
    return found


def _view(
    storage: torch.UntypedStorage, dtype: torch.dtype, first: int, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Return a tensor over a storage, which begins at the element ``first``."""
    empty: Any = torch.empty(0, dtype=dtype, device=device)
    made: torch.Tensor = empty.set_(storage, first, shape)
    return made


def _total(sums: torch.Tensor) -> torch.Tensor:
    # few different counts, so that factors are kept
    count = 1 << max(0, len(sums) - 1).bit_length()
    return (sums * _factors(count, sums.device)[: len(sums)]).sum()
