"""The arguments that ops over the GPUs of one host share: buffers through which the ranks send each other data.

A buffer is [slots, size, elements], where region [slot, r] receives what rank r sends. Elements that have not arrived
are all ones in every bit, a NaN; each rank makes its own buffer so at first (:func:`clear`), and an op leaves it so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..registry import tensor_reasons

#: ranks of one host; the same as kMaxRanks in csrc/common/peers.h
MAX_RANKS = 8
#: elements that are sent at once are a multiple of it: 16 bytes of the narrowest type
ELEMENTS = 8


def clear(buffer: torch.Tensor) -> None:
    """Note that nothing has arrived in a contiguous buffer."""
    buffer.view(torch.uint8).fill_(0xFF)


def received(x: torch.Tensor, buffers: Sequence[torch.Tensor], rank: int, slot: int) -> list[torch.Tensor]:
    """Send ``x`` to the other ranks' buffers, and take what they have sent out of this rank's.

    Returns:
        The tensors of all ranks in order, of x's shape.
    """
    count, found = x.numel(), []
    for other, buffer in enumerate(buffers):
        if other == rank:
            found.append(x)
            continue
        buffer[slot, rank, :count] = x.reshape(-1)
        region = buffers[rank][slot, other, :count]
        found.append(region.view(x.shape).clone())
        region.fill_(float("nan"))
    return found


def reasons(x: torch.Tensor, buffers: Sequence[torch.Tensor], status: torch.Tensor, rank: int, slot: int) -> list[str]:
    """Return the reasons why these arguments are not taken."""
    size = len(buffers)
    if not 1 <= size <= MAX_RANKS or not 0 <= rank < size:
        return [f"rank is {rank} of {size}, expected one of at most {MAX_RANKS}"]
    found = tensor_reasons(x, **{f"buffers[{number}]": buffer for number, buffer in enumerate(buffers)})
    shape = buffers[0].shape
    for number, buffer in enumerate(buffers):
        if buffer.dim() != 3 or buffer.shape != shape or shape[1] != size or shape[2] % ELEMENTS:
            found.append(
                f"buffers[{number}] has shape {tuple(buffer.shape)}, expected [slots, {size}, a multiple of {ELEMENTS}]"
            )
        elif not buffer.is_contiguous() or buffer.data_ptr() % 16:
            found.append(f"buffers[{number}] is written, and not contiguous or not aligned to 16 bytes")
    if status.dtype != torch.int32 or status.numel() != 1:
        found.append(f"status is {status.dtype} {tuple(status.shape)}, expected one int32")
    elif status.device != x.device and not (x.is_cuda and status.is_pinned()):
        found.append(f"status is on {status.device}, expected {x.device} or pinned memory")
    if not x.is_contiguous() or x.numel() % ELEMENTS or x.data_ptr() % 16:
        found.append(f"x has {x.numel()} elements and strides {x.stride()}, expected a multiple of {ELEMENTS}, aligned")
    if not found and not (0 <= slot < shape[0] and x.numel() <= shape[2]):
        found.append(f"slot is {slot} of {shape[0]}, with room for {shape[2]} elements, x has {x.numel()}")
    return found


def sample_buffers(
    device: torch.device, dtype: torch.dtype, size: int, rank: int, slot: int, sent: int, room: int, slots: int = 2
) -> list[torch.Tensor]:
    """Make the buffers of ``size`` ranks where all others have sent ``sent`` elements to ``rank``."""
    buffers = [torch.empty(slots, size, room, device=device, dtype=dtype) for _ in range(size)]
    for buffer in buffers:
        clear(buffer)
    for other in range(size):
        if other != rank:
            buffers[rank][slot, other, :sent] = torch.randn(sent, device=device, dtype=dtype)
    return buffers
