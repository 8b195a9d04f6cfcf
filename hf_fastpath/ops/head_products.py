"""A product for each head, with a matrix of its own: what multi-head latent attention makes of queries and outputs."""

from __future__ import annotations

import torch

from ..registry import OpSpec, Sample, nbytes, register, shape_reason, tensor_reasons

#: of a head's input; a block of the GPU holds the inputs of four rows in shared memory
MAX_INPUTS = 2048


def reference(
    x: torch.Tensor, weight: torch.Tensor, transposed: bool = False, programmatic_launch: bool = False
) -> torch.Tensor:
    """Compute ``x[b, h] @ weight[h].T`` for each row b and head h.

    Args:
        x: [batch, heads, inputs] float32, float16 or bfloat16, any strides; inputs 1 to 2048.
        weight: [heads, outputs, inputs], x's dtype; rows of a head are contiguous, and their distance and that of heads
            may be any (a part of the rows of ``kv_b_proj``).
        transposed: weight is [heads, inputs, outputs].
        programmatic_launch: CUDA may read weight while the kernel in front on this stream still runs. It is allowed
            only if neither that kernel nor an earlier one that may still run writes it. The result does not depend on
            it.

    Returns:
        [batch, heads, outputs] of x's dtype, contiguous. Products and sums are float32.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: arXiv:2405.04434, section 2.1: ``W_k`` absorbed into the query, ``W_v`` behind attention.
    """
    return torch.matmul(x[:, :, None], weight if transposed else weight.mT)[:, :, 0].contiguous()


def fake(x, weight, transposed=False):
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[2 if transposed else 1])


def why_not(x, weight, transposed=False) -> list[str]:
    if x.dim() != 3 or weight.dim() != 3 or not 1 <= x.shape[2] <= MAX_INPUTS:
        found = f"x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        return [f"got {found}, expected [batch, heads, 1 to {MAX_INPUTS}] and [heads, outputs, inputs]"]
    heads, inputs = x.shape[1:]
    outputs = weight.shape[2 if transposed else 1]
    expected = (heads, inputs, outputs) if transposed else (heads, outputs, inputs)
    return tensor_reasons(x, weight=weight) + shape_reason("weight", weight, expected)


def moved(x, weight, transposed=False) -> int:
    outputs = weight.shape[2 if transposed else 1]
    return nbytes(x, weight) + x.shape[0] * x.shape[1] * outputs * x.element_size()


def samples(device: torch.device, dtype: torch.dtype):
    def call(batch, heads, parts, rank, transposed, **options):
        """Of a weight that holds the rows of keys and of values of each head, either part."""
        keys, values = parts
        both = torch.randn(heads, keys + values, rank, device=device, dtype=dtype) * rank**-0.5
        weight = both[:, :keys] if transposed else both[:, keys:]
        x = torch.randn(batch, heads, (keys if transposed else rank) + 8, device=device, dtype=dtype)[..., 8:]
        return Sample(x, weight, transposed, **options)

    for transposed in (False, True):
        yield call(1, 4, (16, 24), 64, transposed)
        yield call(1, 16, (128, 128), 512, transposed, programmatic_launch=True)  # DeepSeek-V2-Lite
        yield call(3, 5, (64, 64), 256, transposed)  # MiniCPM3
        yield call(9, 2, (7, 13), 33, transposed)


SPEC = register(
    OpSpec(
        name="head_products",
        schema="(Tensor x, Tensor weight, bool transposed=False, bool programmatic_launch=False) -> Tensor",
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
