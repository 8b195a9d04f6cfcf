"""Gate and up projections of few rows with their gated activation, in one pass over both weights."""

from __future__ import annotations

import torch

from ..choices import Activation, NormKind
from ..registry import OpSpec, Sample, choice_reason, nbytes, register, shape_reason, tensor_reasons
from .fused_swiglu import GATES
from .fused_swiglu import reference as gated
from .gemv import MAX_WGMMA_ROWS, most_rows, rows_reason, weight_reason
from .norm import NORM_SCHEMA, NORMS, norm_reasons, normed


def reference(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    activation: Activation = Activation.SILU,
    norm: NormKind = NormKind.NONE,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    programmatic_launch: bool = False,
    next_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``activation(norm(x) @ gate_weight.T) * (norm(x) @ up_weight.T)``.

    Args:
        x: [..., hidden_size], at most 16 rows in all, or 64 as in ``gemv``.
        gate_weight, up_weight: [intermediate_size, hidden_size], the weights of the model's two ``nn.Linear`` modules.
        activation: ``silu``, ``gelu_tanh`` or ``gelu``.
        norm, norm_weight, norm_bias, norm_eps, programmatic_launch, next_weight: as in ``gemv``.

    Returns:
        [..., intermediate_size] in x's dtype, contiguous; rounded once.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, there are too many rows, or the activation is unknown.

    Source: transformers ``models/mistral/modeling_mistral.py@5.17``, ``MistralMLP``.
    """
    x = normed(x, norm, norm_weight, norm_bias, norm_eps)
    linear = torch.nn.functional.linear
    return gated(linear(x, gate_weight), linear(x, up_weight), activation)


def fake(x, gate_weight):
    return x.new_empty(*x.shape[:-1], gate_weight.shape[0])


def why_not(x, gate_weight, up_weight, activation, norm, norm_weight, norm_bias, next_weight) -> list[str]:
    reasons = tensor_reasons(x, gate_weight=gate_weight, up_weight=up_weight, next_weight=next_weight)
    reasons += rows_reason(x, most_rows(gate_weight, up_weight))
    reasons += norm_reasons(x, norm, norm_weight, norm_bias)
    reasons += weight_reason("gate_weight", x, gate_weight)
    reasons += shape_reason("up_weight", up_weight, tuple(gate_weight.shape))
    if not reasons:
        reasons += weight_reason("up_weight", x, up_weight)
    return reasons + choice_reason("activation", activation, GATES)


def moved(x, gate_weight, up_weight, norm_weight, norm_bias) -> int:
    return nbytes(x, gate_weight, up_weight, norm_weight, norm_bias) + nbytes(fake(x, gate_weight))


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for rows, k, n in ((1, 111, 37), (1, 256, 704), (2, 64, 65), (7, 100, 48), (16, 128, 96)):
        for activation in GATES:
            yield Sample(randn(1, rows, k), randn(n, k) * k**-0.5, randn(n, k) * k**-0.5, activation)
    weights = [randn(40, 2048) / 45 for _ in range(2)]
    yield Sample(randn(4, 2048), *weights, Activation.SILU, NormKind.RMS, randn(2048), None, 1e-5, True)
    yield Sample(randn(7, 2048), *weights, Activation.GELU)
    for norm in NORMS[1:]:
        shift = randn(256) if norm == NormKind.LAYER else None
        weights = [randn(72, 256) / 16 for _ in range(2)]
        yield Sample(randn(1, 256), *weights, Activation.SILU, norm, randn(256), shift, 1e-5, True)
        yield Sample(randn(3, 256), *weights, Activation.GELU, norm, randn(256), shift, 1e-5)
    weights = [randn(72, 256) / 16 for _ in range(2)]
    if most_rows(*weights) == MAX_WGMMA_ROWS:
        for rows in (17, 40, MAX_WGMMA_ROWS):
            yield Sample(randn(rows, 256), *weights, Activation.GELU_TANH, NormKind.RMS, randn(256), None, 1e-5, True)


SPEC = register(
    OpSpec(
        name="gemv_swiglu",
        schema=(
            "(Tensor x, Tensor gate_weight, Tensor up_weight, int activation=2, "
            f"{NORM_SCHEMA}, bool programmatic_launch=False, Tensor? next_weight=None) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
