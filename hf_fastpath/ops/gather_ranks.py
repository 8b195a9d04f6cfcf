"""The features of all GPUs of one host side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..registry import OpSpec, Sample, nbytes, register
from . import peers

#: parts of a rank's features
MAX_PARTS = 3


def reference(
    x: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    status: torch.Tensor,
    rank: int,
    slot: int,
    programmatic_launch: bool = False,
    first_end: int = 0,
    second_end: int = 0,
) -> torch.Tensor:
    """Put the features of all ranks' ``x`` side by side. Every rank calls this with the same slots in turn.

    The features may be of MAX_PARTS parts; then all ranks' first parts come first, side by side, behind them all second
    parts, then all third parts.

    Args:
        x: [..., features] float32, float16 or bfloat16, contiguous, with a multiple of 8 features.
        buffers, status, rank, slot: see ``ops.sum_ranks``.
        programmatic_launch: see ``ops.gemv``.
        first_end, second_end: where the first two parts of a rank's features end, multiples of 8.

    Returns:
        [..., size * features] in x's dtype, contiguous, equal on all ranks. A NaN may come out as another NaN.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: ``torch.distributed.all_gather_into_tensor``.
    """
    received = [each.tensor_split((first_end, second_end), dim=-1) for each in peers.received(x, buffers, rank, slot)]
    return torch.cat([each for part in zip(*received) for each in part], dim=-1)


def fake(x, buffers):
    return x.new_empty(*x.shape[:-1], x.shape[-1] * len(buffers))


def why_not(x, buffers, status, rank, slot, first_end, second_end) -> list[str]:
    if not x.dim() or x.shape[-1] % peers.ELEMENTS:
        return [f"x has shape {tuple(x.shape)}, expected [..., features] with a multiple of {peers.ELEMENTS} features"]
    ends = first_end, second_end
    if not 0 <= first_end <= second_end <= x.shape[-1] or any(each % peers.ELEMENTS for each in ends):
        return [f"first_end and second_end are {ends}, expected multiples of {peers.ELEMENTS} up to {x.shape[-1]}"]
    return peers.reasons(x, buffers, status, rank, slot)


def moved(x, buffers) -> int:
    return 3 * len(buffers) * nbytes(x)


def samples(device: torch.device, dtype: torch.dtype):
    def call(size, rank, *shape, slot=1, room=None, **ends):
        x = torch.randn(*shape, device=device, dtype=dtype)
        buffers = peers.sample_buffers(device, dtype, size, rank, slot, x.numel(), room or x.numel())
        return Sample(x, buffers, torch.zeros(1, dtype=torch.int32, device=device), rank, slot, **ends)

    yield call(2, 1, 1, 1, 5000)
    yield call(4, 2, 3, 2, 48, slot=0, room=400)
    yield call(8, 7, 5, 8)
    yield call(1, 0, 2, 16)
    yield call(2, 0, 1, 1, 400, first_end=256, second_end=384)
    yield call(4, 3, 3, 2, 48, slot=0, room=400, second_end=40)


SPEC = register(
    OpSpec(
        name="gather_ranks",
        schema=(
            "(Tensor x, Tensor(a!)[] buffers, Tensor(b!) status, int rank, int slot, "
            "bool programmatic_launch=False, int first_end=0, int second_end=0) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
        native=("cuda",),  # on a CPU, torch.distributed gathers
    )
)
