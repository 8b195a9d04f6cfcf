"""Copies, layouts and allocator states of tensors, which the checks vary besides the values."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch


def duplicate(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with its own memory but the same strides, offset and gaps."""
    storage = tensor.untyped_storage().clone()
    like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return like.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def upcast(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float64 copy of a floating tensor; other tensors, quants among them, are copied as they are."""
    is_value = tensor.is_floating_point() and tensor.element_size() > 1
    return tensor.to(torch.float64, copy=True) if is_value else tensor.clone()


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in fresh memory."""
    return tensor.clone(memory_format=torch.contiguous_format)


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memory behind two tensors, gaps between elements included, holds the same bytes."""
    return torch.equal(*(torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()) for t in (a, b)))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and values are bitwise equal: NaN equals NaN, 0 differs from -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(compact(a).view(-1).view(torch.uint8), compact(b).view(-1).view(torch.uint8))


def _filler(tensor: torch.Tensor) -> float | int:
    # A float that leaks in from outside the view shows as NaN. Lengths and positions have no NaN; 1 is wrong
    # for nearly every sample and never sends a kernel out of bounds.
    return float("nan") if tensor.is_floating_point() else 1


def offset(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy, one element off the alignment of a fresh allocation, with filler on both sides."""
    buffer = tensor.new_full((tensor.numel() + 2,), _filler(tensor))
    view = buffer[1:-1].view(tensor.shape)
    view.copy_(tensor)
    return view


def padded_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose rows are contiguous but further apart than they are long (a slice of a wider tensor)."""
    if tensor.dim() == 0:
        return tensor
    buffer = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 5), _filler(tensor))
    view = buffer[..., 2 : 2 + tensor.shape[-1]]
    view.copy_(tensor)
    return view


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose elements are two apart in memory."""
    if tensor.dim() == 0:
        return tensor
    view = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), _filler(tensor))[..., ::2]
    view.copy_(tensor)
    return view


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose last dimension is outermost in memory."""
    axes = range(tensor.dim())[::-1]
    return compact(tensor.permute(*axes)).permute(*axes)


LAYOUTS = (offset, padded_rows, every_second, transposed)


@contextlib.contextmanager
def poisoned(device: torch.device, size: int) -> Iterator[None]:
    """Inside the block, memory that the allocator hands out for ``size`` bytes fails :func:`intact`."""
    if device.type == "cuda":  # the caching allocator hands out the memory that was freed last
        blocks = [torch.full((size,), 255, dtype=torch.uint8, device=device) for _ in range(8)]
        del blocks
        yield
        return
    mallopt, perturb = ctypes.CDLL(None).mallopt, -6  # glibc's M_PERTURB: malloc fills with the complement
    mallopt(perturb, 0x80)
    blocks = [torch.full((size,), 0x7F, dtype=torch.uint8) for _ in range(8)]  # small ones come from a cache unfilled
    del blocks
    try:
        yield
    finally:
        mallopt(perturb, 0)


def intact(tensor: torch.Tensor) -> bool:
    """Whether no element is poison: NaN, or bytes of 0x7f, which only float16 reads as NaN."""
    return not (tensor.isnan() | (tensor.abs() > 1e38)).any()
