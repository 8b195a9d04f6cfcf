"""Largest magnitude of a buffer: the least work that reads everything. The op measures the read bandwidth."""

from __future__ import annotations

import torch

from ..native import loader
from ..registry import OpSpec, Sample, nbytes, register, tensor_reasons

#: ways to read on a GPU, by number; on a CPU number 0 is one stream for each thread, the others are eight streams
VARIANTS = ("tile", "persistent", "bulk")


def reference(buffer: torch.Tensor, variant: int = 0) -> torch.Tensor:
    """Compute ``max(|buffer|)``: the result depends on every element, so that no read can be left out, and is exact.

    Args:
        buffer: float32, float16 or bfloat16, any shape, contiguous, not empty.
        variant: how the buffer is read, with the same result. On CUDA 0: one tile for each block, 1: persistent blocks,
            2: bulk copies to shared memory (compute capability 9.0 or newer). On the CPU 0: one stream for each thread,
            else eight.

    Returns:
        float32 [1]; NaN if any element is NaN.

    Raises:
        OpInputError: the dtype or the variant is unknown, or the buffer is empty or not contiguous.

    Source: a read-only relative of the STREAM benchmark (McCalpin, 1995); the maximum needs no rounding.
    """
    return buffer.abs().amax().to(torch.float32).reshape(1)


def fake(buffer):
    return buffer.new_empty(1, dtype=torch.float32)


def variants(device: torch.device) -> tuple[int, ...]:
    """Return the numbers of the variants that differ on ``device``."""
    if device.type != "cuda":
        return (0, 1)
    return (0, 1, 2) if loader.has_hopper_code(device) else (0, 1)


def why_not(buffer, variant=0) -> list[str]:
    reasons = tensor_reasons(buffer)
    if not buffer.is_contiguous():
        reasons.append("buffer is not contiguous: pass the whole buffer")
    if not buffer.numel():
        reasons.append("buffer is empty: it has no largest element")
    if not 0 <= variant < len(VARIANTS):
        reasons.append(f"variant is {variant}, expected 0 to {len(VARIANTS) - 1} ({', '.join(VARIANTS)})")
    elif buffer.device.type == "cuda" and variant not in variants(buffer.device):
        needs = "compute capability 9.0 and a library made for it"
        reasons.append(f"variant {variant} ({VARIANTS[variant]}) needs {needs}: use 0 or 1")
    return reasons


def samples(device: torch.device, dtype: torch.dtype):
    for variant in variants(torch.device(device)):
        for shape in (
            (1,),
            (7,),
            (3, 33, 111),
            (4096,),
            (300_001,),
        ):  # a part of a tile, one tile, several tiles and a rest
            yield Sample(torch.randn(shape, device=device, dtype=dtype), variant)
        for position in (0, 1, 69_999):  # the largest element is at an end, off a 16-byte boundary
            buffer = torch.randn(70_001, device=device, dtype=dtype)[1:]
            buffer[position] = -9
            yield Sample(buffer, variant)


SPEC = register(
    OpSpec(
        name="read_stream",
        schema="(Tensor buffer, int variant=0) -> Tensor",
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=lambda buffer, variant=0: nbytes(buffer),
        samples=samples,
    )
)
