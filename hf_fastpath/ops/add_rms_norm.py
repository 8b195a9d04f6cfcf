"""Sum of a float32 residual stream and what a layer adds to it, and the sum's root-mean-square norm."""

from __future__ import annotations

import torch

from ..registry import OpSpec, Sample, nbytes, register, shape_reason, tensor_reasons


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, programmatic_launch: bool = False
) -> list[torch.Tensor]:
    """Compute ``sum = residual + x`` and ``weight * sum / sqrt(mean(sum^2) + eps)`` over the last dimension.

    Args:
        x: [..., hidden_size], any strides.
        residual: like x, float32 (float64 if x is).
        weight: [hidden_size], same dtype as x.
        eps: added to the mean of squares.
        programmatic_launch: CUDA may read the weight while the kernel in front on this stream still runs; see ``gemv``.

    Returns:
        The norm, of x's shape and dtype, and the sum, of residual's dtype; both contiguous. The sum is not rounded, and
        the norm is rounded once.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: transformers ``models/mamba2/modeling_mamba2.py@5.24``, ``Mamba2Block`` with ``residual_in_fp32``, and
    ``Mamba2RMSNorm``, which takes the sum rounded to x's dtype.
    """
    total = (residual + x).contiguous()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    return [(weight * normed).to(x.dtype), total]


def fake(x, residual):
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in (x, residual)]


def why_not(x, residual, weight) -> list[str]:
    reasons = tensor_reasons(x, weight=weight)
    wide = torch.promote_types(x.dtype, torch.float32)
    if residual.dtype != wide or residual.device != x.device:
        found = f"{residual.dtype} on {residual.device}"
        reasons.append(
            f"residual is {found}, expected {wide} on {x.device}: a residual stream of x's dtype is rms_norm's"
        )
    reasons += shape_reason("residual", residual, tuple(x.shape))
    return reasons + shape_reason("weight", weight, tuple(x.shape[-1:]))


def moved(x, residual, weight) -> int:
    return 2 * nbytes(x, residual) + nbytes(weight)


def samples(device: torch.device, dtype: torch.dtype):
    wide = torch.promote_types(dtype, torch.float32)

    def call(*shape, stream=1.0, programmatic_launch=False):
        x = torch.randn(*shape, device=device, dtype=dtype)
        residual = stream * torch.randn(*shape, device=device, dtype=wide)
        return Sample(x, residual, torch.randn(shape[-1], device=device, dtype=dtype), 1e-5, programmatic_launch)

    for shape in ((1, 1, 2560), (1, 111), (2, 1, 96), (300, 72), (1, 1, 40000)):
        yield call(*shape)
        yield call(*shape, stream=30.0, programmatic_launch=True)
    columns = call(33, 64)
    yield Sample(columns.args[0].t(), columns.args[1].t(), torch.randn(33, device=device, dtype=dtype), 1e-6)


SPEC = register(
    OpSpec(
        name="add_rms_norm",
        schema=("(Tensor x, Tensor residual, Tensor weight, float eps, bool programmatic_launch=False) -> Tensor[]"),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
