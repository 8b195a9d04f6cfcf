"""The sum of a tensor over the GPUs of one host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..registry import OpSpec, Sample, nbytes, register, shape_reason, tensor_reasons
from . import peers


def reference(
    x: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    status: torch.Tensor,
    rank: int,
    slot: int,
    residual: torch.Tensor | None = None,
    programmatic_launch: bool = False,
) -> torch.Tensor:
    """Compute the sum of all ranks' ``x``, plus ``residual``. Every rank calls this with the same slots in turn.

    A kernel waits for the other ranks' data. Elsewhere they have to be in this rank's buffer already.

    Args:
        x: [...] float32, float16 or bfloat16, contiguous, with a multiple of 8 elements.
        buffers: of each rank, [slots, size, elements] of x's dtype; a GPU writes to the memory of the others. See
            :mod:`.peers`.
        status: int32 with one element, on the device or in pinned memory; set to 1 if a rank has not come for 20
            seconds. The result is then arbitrary, and later calls with this ``status`` wait no more.
        rank: number of this rank.
        slot: which slot of the buffers the data go through. The same slot may be used again two calls later.
        residual: like x, added once; None for nothing.
        programmatic_launch: see ``ops.gemv``.

    Returns:
        Tensor of x's shape and dtype, contiguous, with the same bits on all ranks: the ranks' ``x`` are added in order
        in float32, then ``residual``, and the sum is rounded once.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: ``torch.distributed.all_reduce``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros_like(x, dtype=wide)
    for each in peers.received(x, buffers, rank, slot):
        total += each
    return (total if residual is None else total + residual).to(x.dtype).contiguous()


def fake(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def why_not(x, buffers, status, rank, slot, residual) -> list[str]:
    found = peers.reasons(x, buffers, status, rank, slot) + tensor_reasons(x, residual=residual)
    return found + shape_reason("residual", residual, tuple(x.shape))


def moved(x, buffers, residual) -> int:
    return 2 * len(buffers) * nbytes(x) + nbytes(residual)


def samples(device: torch.device, dtype: torch.dtype):
    def call(size, rank, *shape, slot=1, added=False, room=None):
        x = torch.randn(*shape, device=device, dtype=dtype)
        buffers = peers.sample_buffers(device, dtype, size, rank, slot, x.numel(), room or x.numel())
        residual = torch.randn(*shape, device=device, dtype=dtype) if added else None
        return Sample(x, buffers, torch.zeros(1, dtype=torch.int32, device=device), rank, slot, residual)

    yield call(2, 0, 1, 1, 4096, added=True)
    yield call(2, 1, 3, 8, slot=0, room=64)
    yield call(8, 5, 2, 1, 1000, added=True)
    yield call(3, 2, 40, room=48)
    yield call(1, 0, 1, 56, added=True)
    yield call(4, 0, 17, 3, 104, slot=0)


SPEC = register(
    OpSpec(
        name="sum_ranks",
        schema=(
            "(Tensor x, Tensor(a!)[] buffers, Tensor(b!) status, int rank, int slot, Tensor? residual=None, "
            "bool programmatic_launch=False) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
        native=("cuda",),  # on a CPU, torch.distributed sums
    )
)
