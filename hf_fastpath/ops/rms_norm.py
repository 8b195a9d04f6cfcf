"""Root-mean-square norm over the last dimension."""

from __future__ import annotations

import torch

from ..registry import OpSpec, Sample, nbytes, register, shape_reason, tensor_reasons


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension.

    Args:
        x: [..., hidden_size], any strides.
        weight: [hidden_size], same dtype as x.
        eps: added to the mean of squares.

    Returns:
        Tensor of x's shape and dtype, contiguous. Statistics and product are float32.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: transformers ``models/mistral/modeling_mistral.py@5.17``, ``MistralRMSNorm``; arXiv:1910.07467.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    variance = wide.pow(2).mean(-1, keepdim=True)
    return (weight * (wide * torch.rsqrt(variance + eps)).to(x.dtype)).contiguous()


def fake(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def why_not(x, weight) -> list[str]:
    return tensor_reasons(x, weight=weight) + shape_reason("weight", weight, tuple(x.shape[-1:]))


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for shape in ((1, 111), (1, 1, 4096), (5, 256), (2, 3, 96), (17, 7)):
        yield Sample(randn(*shape), randn(shape[-1]), 1e-5)
    yield Sample(randn(96, 33).t(), randn(96), 1e-6)
    yield Sample(randn(4, 200)[:, 100:], randn(100), 1e-6)


SPEC = register(
    OpSpec(
        name="rms_norm",
        schema="(Tensor x, Tensor weight, float eps) -> Tensor",
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=lambda x, weight, eps: 2 * nbytes(x) + nbytes(weight),
        samples=samples,
    )
)
