"""Layer norm over the last dimension."""

from __future__ import annotations

import torch

from ..registry import OpSpec, Sample, nbytes, register, shape_reason, tensor_reasons


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``residual + (x - mean) / sqrt(var + eps) * weight + bias`` over the last dimension (biased variance).

    Args:
        x: [..., hidden_size], any strides.
        weight, bias: [hidden_size] in x's dtype, or None for 1 and 0.
        eps: added to the variance.
        residual: like x, added behind the norm; None for nothing.

    Returns:
        Tensor of x's shape and dtype, contiguous. Statistics and product are float32; the norm is rounded to that dtype
        before ``residual`` is added.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: ``torch.nn.LayerNorm``; arXiv:1607.06450.
    """
    out = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return (out if residual is None else residual + out).contiguous()


def fake(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def why_not(x, weight, bias, residual) -> list[str]:
    features = tuple(x.shape[-1:])
    reasons = tensor_reasons(x, weight=weight, bias=bias, residual=residual)
    reasons += shape_reason("residual", residual, tuple(x.shape))
    return reasons + shape_reason("weight", weight, features) + shape_reason("bias", bias, features)


def moved(x, weight, bias, residual) -> int:
    return 2 * nbytes(x) + nbytes(weight, bias, residual)


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for shape in ((1, 111), (1, 1, 768), (5, 256), (2, 3, 96), (17, 7)):
        yield Sample(randn(*shape) + 1, randn(shape[-1]), randn(shape[-1]), 1e-5)
    yield Sample(randn(3, 64), None, None, 1e-5)
    yield Sample(randn(3, 64), randn(64), None, 1e-5)
    yield Sample(randn(96, 33).t(), randn(96), randn(96), 1e-6)
    yield Sample(randn(1, 1, 768), randn(768), randn(768), 1e-5, randn(1, 1, 768))
    yield Sample(randn(3, 111), randn(111), None, 1e-5, randn(111, 3).t())


SPEC = register(
    OpSpec(
        name="layer_norm",
        schema="(Tensor x, Tensor? weight, Tensor? bias, float eps, Tensor? residual=None) -> Tensor",
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
