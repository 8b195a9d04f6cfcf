"""Root-mean-square norm with a gate in front of it or behind."""

from __future__ import annotations

import torch

from ..choices import GateActivation
from ..registry import OpSpec, Sample, choice_reason, nbytes, register, shape_reason, tensor_reasons


def reference(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    groups: int = 1,
    gate_first: bool = False,
    activation: GateActivation = GateActivation.SILU,
    programmatic_launch: bool = False,
) -> torch.Tensor:
    """Compute ``weight * norm(x) * activation(gate)``, or ``weight * norm(x * activation(gate))`` with ``gate_first``.

    Args:
        x: [..., hidden_size] float32, float16 or bfloat16, any strides.
        gate: like x, any strides (columns of a projection).
        weight: [hidden_size], x's dtype.
        eps: added to the mean of squares.
        groups: parts of a row that have a norm each; a divisor of hidden_size.
        gate_first: Mamba-2's order; else that of gated delta nets.
        activation: ``"silu"`` or ``"sigmoid"`` (Kimi Linear).
        programmatic_launch: CUDA may read the weight while the kernel in front on this stream still runs; see ``gemv``.
            The result does not depend on it.

    Returns:
        Tensor of x's shape and dtype, contiguous. All is computed in float32 and rounded once.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, or the activation is unknown.

    Source: transformers ``models/qwen3_next/modeling_qwen3_next.py@5.24``, ``Qwen3NextRMSNormGated``;
    ``models/mamba2/modeling_mamba2.py@5.24``, ``MambaRMSNormGated``;
    ``models/kimi_linear/modeling_kimi_linear.py@5.24``, ``KimiLinearRMSNormGated``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    factor = gate.to(wide)
    factor = torch.sigmoid(factor) if activation == GateActivation.SIGMOID else torch.nn.functional.silu(factor)
    hidden = x.to(wide) * factor if gate_first else x.to(wide)
    parts = hidden.unflatten(-1, (groups, -1))
    parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)
    normed = weight * parts.flatten(-2).to(x.dtype)
    return (normed if gate_first else normed * factor).to(x.dtype).contiguous()


def fake(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def why_not(x, gate, weight, groups=1, activation=GateActivation.SILU) -> list[str]:
    if x.dim() < 1:
        return ["x has no dimensions, expected [..., hidden_size]"]
    reasons = tensor_reasons(x, gate=gate, weight=weight)
    reasons += shape_reason("gate", gate, tuple(x.shape)) + shape_reason("weight", weight, tuple(x.shape[-1:]))
    reasons += choice_reason("activation", activation, GateActivation)
    if not 1 <= groups <= max(1, x.shape[-1]) or x.shape[-1] % groups:
        reasons.append(f"groups is {groups}, expected a divisor of hidden_size {x.shape[-1]}")
    return reasons


def moved(x, gate, weight) -> int:
    return 2 * nbytes(x) + nbytes(gate, weight)


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    yield Sample(randn(2, 4, 32), randn(2, 4, 32), randn(32), 1e-6)
    yield Sample(randn(1, 96), randn(1, 200)[:, 100:196], randn(96), 1e-5, 3, True)
    yield Sample(randn(1, 32, 128), randn(1, 32, 128), randn(128), 1e-6, programmatic_launch=True)  # Qwen3.5
    yield Sample(randn(3, 111), randn(3, 111), randn(111), 1e-5, 3, False, "sigmoid")
    yield Sample(randn(1, 1, 5120), randn(1, 1, 5120), randn(5120), 1e-5, 1, True)  # Mamba-2
    yield Sample(randn(40, 17), randn(40, 17), randn(17), 1e-6, 1, True, "sigmoid")


SPEC = register(
    OpSpec(
        name="gated_rms_norm",
        schema=(
            "(Tensor x, Tensor gate, Tensor weight, float eps, int groups=1, bool gate_first=False, "
            "int activation=0, bool programmatic_launch=False) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
