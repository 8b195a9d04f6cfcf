"""Linear layer with a quantized weight for a few rows, fused with the norm of its input and the steps that follow."""

from __future__ import annotations

import torch

from ..choices import Activation, NormKind, PackedFormat
from ..quantization import FORMATS, PackedWeight, quantize
from ..quantization.formats import Format, padded, scale_dtype
from ..registry import OpSpec, Sample, choice_reason, nbytes, register, shape_reason, tensor_reasons
from .fused_swiglu import activate
from .gemv import ACTIVATIONS, rows_reason
from .norm import NORM_SCHEMA, NORMS, norm_reasons, normed


def reference(
    x: torch.Tensor,
    quants: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    multiplier: float,
    format: PackedFormat,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: Activation = Activation.NONE,
    norm: NormKind = NormKind.NONE,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    programmatic_launch: bool = False,
    next_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``activation(norm(x) @ weight.T + bias) + residual``.

    Args:
        x: [..., in_features], at most 16 rows in all.
        quants, scales, zeros, multiplier: the weight, as ``quantization.PackedWeight`` holds it.
        format: a name out of ``quantization.FORMATS``.
        bias: [out_features] or None.
        residual: [..., out_features] or None, added after the activation.
        activation: ``none``, ``relu``, ``silu``, ``gelu_tanh`` or ``gelu``.
        norm, norm_weight, norm_bias, norm_eps: of x, as in ``gemv``.
        programmatic_launch: as in ``gemv``.
        next_weight: quants that the next kernel on this stream reads, on x's device, or None. CUDA may prefetch parts
            of them into the L2 cache. The result does not depend on it.

    Returns:
        [..., out_features] in x's dtype, contiguous; rounded once. On a CPU, if x has 16 bits, x may be rounded so that
        sums over 128 inputs are integers: in each 32 inputs, to steps of 1/32768 to 1/16384 of the largest, for 4-bit
        weights of 1/16384 to 1/8192. On a GPU, a row of x with infinities may give NaN where PyTorch gives infinities.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, there are more than 16 rows, or the format or activation is
            unknown.

    Source: ``torch.nn.Linear`` over ``PackedWeight.dequantize()``.
    """
    x = normed(x, norm, norm_weight, norm_bias, norm_eps)
    packed = PackedWeight.of_parts(x.shape[-1], quants, scales, zeros, multiplier, format)
    out = activate(torch.nn.functional.linear(x, packed.dequantize(x.dtype), bias), activation)
    return out if residual is None else out + residual


def fake(x, quants):
    return x.new_empty(*x.shape[:-1], quants.shape[0])


def weight_reasons(x, quants, scales, zeros, format: PackedFormat) -> list[str]:
    """Return reasons why a packed weight does not fit ``x`` and its format, which is a known one."""
    known, out_features = FORMATS[format.label], quants.shape[0] if quants.dim() else 0
    groups = out_features, known.groups(x.shape[-1])
    reasons = _part_reasons("quants", x, quants, torch.uint8, (out_features, padded(x.shape[-1]) * known.bits // 8))
    columns = out_features, known.scale_columns(x.shape[-1])
    reasons += _part_reasons("scales", x, scales, scale_dtype(known), columns)
    if known.has_zeros != (zeros is not None):
        reasons.append(f"zeros is {'missing' if zeros is None else 'given'}, which format {format} does not go with")
    elif zeros is not None:
        reasons += _part_reasons("zeros", x, zeros, torch.uint8, groups)
    return reasons


def _part_reasons(name: str, x, part, dtype: torch.dtype, shape: tuple[int, ...]) -> list[str]:
    """Return reasons why a tensor of the packed weight is not what its format needs."""
    reasons = shape_reason(name, part, shape)
    if part.dtype != dtype:
        reasons.append(f"{name} has dtype {part.dtype}, expected {dtype}")
    if part.device != x.device:
        reasons.append(f"{name} is on {part.device}, expected {x.device}: move it")
    return reasons


def why_not(
    x,
    quants,
    scales,
    zeros,
    format,
    bias=None,
    residual=None,
    activation=Activation.NONE,
    norm=NormKind.NONE,
    norm_weight=None,
    norm_bias=None,
    next_weight=None,
) -> list[str]:
    reasons = choice_reason("format", format, PackedFormat)
    reasons += tensor_reasons(x, bias=bias, residual=residual)
    reasons += norm_reasons(x, norm, norm_weight, norm_bias) + rows_reason(x)
    reasons += choice_reason("activation", activation, ACTIVATIONS)
    if next_weight is not None and (next_weight.dtype != torch.uint8 or next_weight.device != x.device):
        reasons.append(f"next_weight is {next_weight.dtype} on {next_weight.device}, expected quants on {x.device}")
    if reasons:
        return reasons
    out_features = quants.shape[0] if quants.dim() else 0
    reasons += weight_reasons(x, quants, scales, zeros, format)
    reasons += shape_reason("bias", bias, (out_features,))
    return reasons + shape_reason("residual", residual, (*x.shape[:-1], out_features))


def moved(x, quants, scales, zeros, bias, residual, norm_weight, norm_bias) -> int:
    inputs = nbytes(x, quants, scales, zeros, bias, residual, norm_weight, norm_bias)
    return inputs + nbytes(fake(x, quants))


def random_weight(format: Format, rows: int, columns: int, device: torch.device) -> tuple:
    """Make a weight for samples, as the op takes it."""
    weight = torch.randn(rows, columns, device=device).clamp_(-4, 4)
    weight[0, 0] = 4  # so that all weights of a shape have the same multiplier
    return quantize(weight * columns**-0.5, format).parts


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def packed(format, rows, columns):
        return random_weight(format, rows, columns, device)

    for format in FORMATS.values():
        for rows, k, n in ((1, 768, 70), (1, 111, 37), (2, 64, 65), (3, 1000, 33), (16, 300, 41), (1, 7, 5)):
            yield Sample(randn(rows, k), *packed(format, n, k))
        yield Sample(randn(1, 1, 256), *packed(format, 300, 256), randn(300), randn(1, 1, 300))
        for activation in ACTIVATIONS:
            yield Sample(randn(5, 128), *packed(format, 48, 128), randn(48), None, activation)
        for norm in NORMS[1:]:
            shift = randn(256) if norm == NormKind.LAYER else None
            x, residual = randn(2, 256) + 1, randn(2, 72)
            weight = packed(format, 72, 256)
            yield Sample(x, *weight, None, residual, Activation.NONE, norm, randn(256), shift, 1e-5, True)
            yield Sample(x[:1], *weight, randn(72), None, Activation.GELU, norm, randn(256), shift, 1e-5)
        yield Sample(randn(8, 2048), *packed(format, 70, 2048), randn(70), randn(8, 70))
        for rows in (1, 3, 9):
            offset = dict(norm=NormKind.RMS_OFFSET, norm_weight=4 * randn(1000), norm_eps=1e-6)
            yield Sample(randn(rows, 1000), *packed(format, 70, 1000), **offset)
        yield Sample(randn(4, 3, 99).transpose(0, 1), *packed(format, 64, 99))


SPEC = register(
    OpSpec(
        name="packed_gemv",
        schema=(
            "(Tensor x, Tensor quants, Tensor scales, Tensor? zeros, float multiplier, int format, Tensor? bias=None, "
            f"Tensor? residual=None, int activation=0, {NORM_SCHEMA}, bool programmatic_launch=False, "
            "Tensor? next_weight=None) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
