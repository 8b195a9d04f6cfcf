"""Gate and up projections with quantized weights of one to sixteen rows, and their gated activation, in one pass."""

from __future__ import annotations

import torch

from ..choices import Activation, NormKind, PackedFormat
from ..quantization import FORMATS
from ..registry import OpSpec, Sample, choice_reason, nbytes, register
from .fused_swiglu import GATES
from .fused_swiglu import reference as gated
from .norm import NORM_SCHEMA, NORMS
from .packed_gemv import random_weight
from .packed_gemv import reference as product
from .packed_gemv import why_not as product_reasons


def reference(
    x: torch.Tensor,
    quants: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    multiplier: float,
    format: PackedFormat,
    activation: Activation = Activation.SILU,
    norm: NormKind = NormKind.NONE,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    programmatic_launch: bool = False,
) -> torch.Tensor:
    """Compute ``activation(norm(x) @ gate.T) * (norm(x) @ up.T)``.

    Args:
        x: [..., hidden_size], at most 16 rows in all.
        quants, scales, zeros, multiplier, format: the rows of gate, then those of up, as in ``packed_gemv``.
        activation: ``silu``, ``gelu_tanh`` or ``gelu``.
        norm, norm_weight, norm_bias, norm_eps, programmatic_launch: as in ``gemv``.

    Returns:
        [..., intermediate_size] in x's dtype, contiguous.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, there are more than 16 rows, or the format or activation is
            unknown.

    Source: transformers ``models/mistral/modeling_mistral.py@5.17``, ``MistralMLP``, over dequantized weights.
    """
    weight = quants, scales, zeros, multiplier, format
    both = product(x, *weight, None, None, Activation.NONE, norm, norm_weight, norm_bias, norm_eps)
    gate, up = both.chunk(2, dim=-1)
    return gated(gate, up, activation)


def fake(x, quants):
    return x.new_empty(*x.shape[:-1], quants.shape[0] // 2)


def why_not(x, quants, scales, zeros, format, activation, norm, norm_weight, norm_bias) -> list[str]:
    reasons = product_reasons(
        x, quants, scales, zeros, format, None, None, Activation.NONE, norm, norm_weight, norm_bias
    )
    if not reasons and quants.shape[0] % 2:
        reasons.append(f"quants have {quants.shape[0]} rows, expected as many of gate as of up")
    return reasons + choice_reason("activation", activation, GATES)


def moved(x, quants, scales, zeros, norm_weight, norm_bias) -> int:
    return nbytes(x, quants, scales, zeros, norm_weight, norm_bias) + nbytes(fake(x, quants))


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for format in FORMATS.values():
        for rows, k, n in ((1, 768, 566), (1, 111, 293), (2, 64, 517), (3, 1000, 261), (16, 300, 325)):
            yield Sample(randn(rows, k), *random_weight(format, 2 * n, k, device))
        for activation in GATES:
            yield Sample(randn(1, 5, 128), *random_weight(format, 96, 128, device), activation)
        for norm in NORMS[1:]:
            norms = norm, randn(256), randn(256) if norm == NormKind.LAYER else None, 1e-5
            for rows in (1, 2):
                x = randn(rows, 256) + 1
                yield Sample(x, *random_weight(format, 1040, 256, device), Activation.SILU, *norms, rows == 1)


SPEC = register(
    OpSpec(
        name="packed_gemv_swiglu",
        schema=(
            "(Tensor x, Tensor quants, Tensor scales, Tensor? zeros, float multiplier, int format, "
            f"int activation=2, {NORM_SCHEMA}, bool programmatic_launch=False) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
