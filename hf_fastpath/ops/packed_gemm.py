"""Linear layer with a quantized weight for many rows."""

from __future__ import annotations

import torch

from ..choices import PackedFormat
from ..quantization import FORMATS, PackedWeight
from ..registry import OpSpec, Sample, choice_reason, nbytes, register, shape_reason, tensor_reasons
from .packed_gemv import random_weight, weight_reasons


def reference(
    x: torch.Tensor,
    quants: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    multiplier: float,
    format: PackedFormat,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``x @ weight.T + bias``.

    Args:
        x: [..., in_features], any number of rows.
        quants, scales, zeros, multiplier: the weight, as ``quantization.PackedWeight`` holds it.
        format: a name out of ``quantization.FORMATS``.
        bias: [out_features] or None.

    Returns:
        [..., out_features] in x's dtype, contiguous. Weights are rounded to x's dtype as ``PackedWeight.dequantize``
        does; accumulators are float32 and are rounded once.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, there are no features, or the format is unknown.

    Source: ``torch.nn.Linear`` over ``PackedWeight.dequantize()``.
    """
    packed = PackedWeight.of_parts(x.shape[-1], quants, scales, zeros, multiplier, format)
    return torch.nn.functional.linear(x, packed.dequantize(x.dtype), bias).contiguous()


def fake(x, quants):
    return x.new_empty(*x.shape[:-1], quants.shape[0])


def why_not(x, quants, scales, zeros, format, bias) -> list[str]:
    reasons = choice_reason("format", format, PackedFormat) + tensor_reasons(x, bias=bias)
    if not x.dim() or not x.shape[-1]:
        reasons.append(f"x has shape {tuple(x.shape)}, expected [..., in_features] with at least one feature")
    if reasons:
        return reasons
    reasons = weight_reasons(x, quants, scales, zeros, format)
    return reasons + shape_reason("bias", bias, (quants.shape[0] if quants.dim() else 0,))


def moved(x, quants, scales, zeros, bias) -> int:
    return nbytes(x, quants, scales, zeros, bias) + nbytes(fake(x, quants))


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for format in FORMATS.values():
        for rows, k, n in ((17, 768, 70), (32, 111, 37), (100, 64, 65), (67, 300, 33), (1, 7, 5)):
            yield Sample(randn(rows, k), *random_weight(format, n, k, device))
        yield Sample(randn(1, 20, 256), *random_weight(format, 300, 256, device), randn(300))
        yield Sample(randn(4, 13, 120)[..., 7:106], *random_weight(format, 64, 99, device))
    format = FORMATS["int4_g32"]
    yield Sample(randn(150, 1024), *random_weight(format, 520, 1024, device), randn(520))


SPEC = register(
    OpSpec(
        name="packed_gemm",
        schema=(
            "(Tensor x, Tensor quants, Tensor scales, Tensor? zeros, float multiplier, int format, "
            "Tensor? bias=None) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
