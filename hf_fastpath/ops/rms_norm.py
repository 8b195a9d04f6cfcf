"""Root-mean-square norm over the last dimension."""

from __future__ import annotations

import torch

from ..registry import OpSpec, Sample, nbytes, register, shape_reason, tensor_reasons


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    programmatic_launch: bool = False,
) -> torch.Tensor:
    """Compute ``residual + (weight_offset + weight) * x / sqrt(mean(x^2) + eps)`` over the last dimension.

    Args:
        x: [..., hidden_size], any strides.
        weight: [hidden_size], same dtype as x.
        eps: added to the mean of squares.
        residual: like x, added behind the norm; None for nothing.
        weight_offset: 1 where a model holds what its factors are beyond 1, as Gemma does.
        programmatic_launch: CUDA may read the weight while the kernel in front on this stream still runs; see ``gemv``.

    Returns:
        Tensor of x's shape and dtype, contiguous. Statistics, factor and product are float32; the norm is rounded to
        that dtype before ``residual`` is added.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: transformers ``models/mistral/modeling_mistral.py@5.17``, ``MistralRMSNorm``; arXiv:1910.07467. With
    ``weight_offset`` ``models/gemma/modeling_gemma.py@5.17``, ``GemmaRMSNorm``.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    variance = wide.pow(2).mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(variance + eps)
    if weight_offset:
        out = ((weight_offset + weight.to(wide.dtype)) * normed).to(x.dtype)
    else:
        out = weight * normed.to(x.dtype)
    return (out if residual is None else residual + out).contiguous()


def fake(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def why_not(x, weight, residual) -> list[str]:
    reasons = tensor_reasons(x, weight=weight, residual=residual)
    return (
        reasons
        + shape_reason("weight", weight, tuple(x.shape[-1:]))
        + shape_reason("residual", residual, tuple(x.shape))
    )


def moved(x, weight, residual) -> int:
    return 2 * nbytes(x) + nbytes(weight, residual)


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for shape in ((1, 111), (1, 1, 4096), (5, 256), (2, 3, 96), (17, 7)):
        yield Sample(randn(*shape), randn(shape[-1]), 1e-5)
    yield Sample(randn(96, 33).t(), randn(96), 1e-6)
    yield Sample(randn(4, 200)[:, 100:], randn(100), 1e-6)
    yield Sample(randn(1, 1, 4096), randn(4096), 1e-5, randn(1, 1, 4096))
    yield Sample(randn(3, 111), randn(111), 1e-5, randn(3, 111))
    for shape in ((1, 1, 2304), (1, 1, 111), (2, 1, 8192)):
        weight = randn(shape[-1])  # not made by the kernel in front
        yield Sample(randn(*shape), weight, 1e-5, randn(*shape), 0.5, True)
        yield Sample(randn(*shape), weight, 1e-5, None, 0.0, True)
    yield Sample(randn(2, 1, 768), 0.1 * randn(768), 1e-6, None, 1.0)
    yield Sample(randn(2, 5, 72), 0.1 * randn(72), 1e-6, randn(5, 2, 72).transpose(0, 1), 1.0)


SPEC = register(
    OpSpec(
        name="rms_norm",
        schema=(
            "(Tensor x, Tensor weight, float eps, Tensor? residual=None, float weight_offset=0.0, "
            "bool programmatic_launch=False) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
