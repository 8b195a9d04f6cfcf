"""Root-mean-square norm over the last dimension."""

from __future__ import annotations

import torch

from ..registry import OpSpec, Sample, nbytes, register, shape_reason, tensor_reasons


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    programmatic_launch: bool = False,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``factor * (residual + (weight_offset + weight) * x / sqrt(mean(x^2) + eps))`` over the last dimension.

    Args:
        x: [..., hidden_size], any strides.
        weight: [hidden_size], same dtype as x; None for nothing that multiplies, whatever ``weight_offset`` is.
        eps: added to the mean of squares.
        residual: like x, added behind the norm; None for nothing.
        weight_offset: 1 where a model holds what its factors are beyond 1, as Gemma does.
        programmatic_launch: CUDA may read weight and factor while the kernel in front on this stream still runs; see
            ``gemv``.
        factor: one number, same dtype as x; None for 1.

    Returns:
        Tensor of x's shape and dtype, contiguous. Statistics and product are float32; the norm is rounded to that dtype
        before ``residual`` is added, and the sum before it is multiplied by ``factor``.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: transformers ``models/mistral/modeling_mistral.py@5.17``, ``MistralRMSNorm``; arXiv:1910.07467. With
    ``weight_offset`` ``models/gemma/modeling_gemma.py@5.17``, ``GemmaRMSNorm``. With ``factor``, and without a weight,
    ``models/gemma4/modeling_gemma4.py@5.24``, ``Gemma4TextDecoderLayer`` and ``Gemma4RMSNorm``.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    variance = wide.pow(2).mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(variance + eps)
    if weight is None:
        out = normed.to(x.dtype)
    elif weight_offset:
        out = ((weight_offset + weight.to(wide.dtype)) * normed).to(x.dtype)
    else:
        out = weight * normed.to(x.dtype)
    out = out if residual is None else residual + out
    return (out if factor is None else out * factor).contiguous()


def fake(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def why_not(x, weight, residual, factor=None) -> list[str]:
    reasons = tensor_reasons(x, weight=weight, residual=residual, factor=factor)
    if factor is not None and factor.numel() != 1:
        reasons.append(f"factor has {factor.numel()} elements, expected one")
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
    for shape in ((1, 1, 2304), (2, 1, 111), (300, 72)):
        yield Sample(randn(*shape), None, 1e-6, None, 0.0, True)
        yield Sample(randn(*shape), None, 1e-6, randn(*shape), 1.0, False, randn(1))
        yield Sample(randn(*shape), randn(shape[-1]), 1e-6, randn(*shape), 0.0, True, randn(1))
        yield Sample(randn(*shape), randn(shape[-1]), 1e-6, None, 1.0, False, randn(1, 1))


SPEC = register(
    OpSpec(
        name="rms_norm",
        schema=(
            "(Tensor x, Tensor? weight, float eps, Tensor? residual=None, float weight_offset=0.0, "
            "bool programmatic_launch=False, Tensor? factor=None) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
