"""The features of all GPUs of one host side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..registry import OpSpec, Sample, nbytes, register
from . import peers


def reference(
    x: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    status: torch.Tensor,
    rank: int,
    slot: int,
    programmatic_launch: bool = False,
) -> torch.Tensor:
    """Put the features of all ranks' ``x`` side by side. Every rank calls this with the same slots in turn.

    Args:
        x: [..., features] float32, float16 or bfloat16, contiguous, with a multiple of 8 features.
        buffers, status, rank, slot: see ``ops.sum_ranks``.
        programmatic_launch: see ``ops.gemv``.

    Returns:
        [..., size * features] in x's dtype, contiguous, equal on all ranks. A NaN may come out as another NaN.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: ``torch.distributed.all_gather_into_tensor``.
    """
    return torch.cat(peers.received(x, buffers, rank, slot), dim=-1)


def fake(x, buffers):
    return x.new_empty(*x.shape[:-1], x.shape[-1] * len(buffers))


def why_not(x, buffers, status, rank, slot) -> list[str]:
    if not x.dim() or x.shape[-1] % peers.ELEMENTS:
        return [f"x has shape {tuple(x.shape)}, expected [..., features] with a multiple of {peers.ELEMENTS} features"]
    return peers.reasons(x, buffers, status, rank, slot)


def moved(x, buffers) -> int:
    return 3 * len(buffers) * nbytes(x)


def samples(device: torch.device, dtype: torch.dtype):
    def call(size, rank, *shape, slot=1, room=None):
        x = torch.randn(*shape, device=device, dtype=dtype)
        buffers = peers.sample_buffers(device, dtype, size, rank, slot, x.numel(), room or x.numel())
        return Sample(x, buffers, torch.zeros(1, dtype=torch.int32, device=device), rank, slot)

    yield call(2, 1, 1, 1, 5000)
    yield call(4, 2, 3, 2, 48, slot=0, room=400)
    yield call(8, 7, 5, 8)
    yield call(1, 0, 2, 16)


SPEC = register(
    OpSpec(
        name="gather_ranks",
        schema=(
            "(Tensor x, Tensor(a!)[] buffers, Tensor(b!) status, int rank, int slot, "
            "bool programmatic_launch=False) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
        native=("cuda",),  # on a CPU, torch.distributed gathers
    )
)
