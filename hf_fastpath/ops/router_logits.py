"""A router's product: scores of experts in float32, out of activations in 16 bits."""

from __future__ import annotations

import torch

from ..registry import OpSpec, Sample, nbytes, register, tensor_reasons

#: of x: blocks of CUDA's grid take four each
MAX_ROWS = 4 * 65535


def reference(x: torch.Tensor, weight: torch.Tensor, programmatic_launch: bool = False) -> torch.Tensor:
    """Compute ``x.float() @ weight.float().T``, or in float64 if x is float64.

    Args:
        x: [..., hidden_size] float32, float16 or bfloat16, at most 262,140 rows of one or more features.
        weight: [num_experts, hidden_size], x's dtype or float32. Rows may be strided; the last dimension is
            contiguous.
        programmatic_launch: see ``gemv``.

    Returns:
        float32 [..., num_experts], contiguous. Nothing is rounded to x's dtype: experts are chosen by differences of
        scores.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: transformers ``models/deepseek_v2/modeling_deepseek_v2.py@5.17``, ``DeepseekV2Moe``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.linear(x.to(wide), weight.to(wide))


def fake(x, weight):
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))


def why_not(x, weight) -> list[str]:
    if x.dim() < 1 or weight.dim() != 2 or not weight.shape[1] == x.shape[-1] >= 1:
        found = f"x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        return [f"got {found}, expected [..., hidden_size] and [num_experts, hidden_size]"]
    reasons = tensor_reasons(x)
    if weight.dtype not in (x.dtype, torch.float32):
        reasons.append(f"weight has dtype {weight.dtype}, expected {x.dtype} or float32: cast it")
    if weight.device != x.device:
        reasons.append(f"weight is on {weight.device}, expected {x.device}: move it")
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        reasons.append(f"weight has strides {weight.stride()}: make its rows contiguous")
    if x.numel() // x.shape[-1] > MAX_ROWS:
        reasons.append(f"x has {x.numel() // x.shape[-1]} rows, expected at most {MAX_ROWS}: use nn.Linear")
    return reasons


def moved(x, weight) -> int:
    return nbytes(x, weight) + 4 * x.numel() // x.shape[-1] * weight.shape[0]


def samples(device: torch.device, dtype: torch.dtype):
    def call(rows, num_experts, hidden_size, weight_dtype=dtype, **options):
        x = torch.randn(rows, hidden_size, device=device, dtype=dtype)
        weight = torch.randn(num_experts, hidden_size, device=device, dtype=weight_dtype)
        return Sample(x, weight * hidden_size**-0.5, **options)

    yield call(1, 64, 2048, programmatic_launch=True)  # DeepSeek-V2-Lite
    yield call(1, 256, 7168)  # DeepSeek-V3
    yield call(5, 8, 96)
    yield call(16, 33, 77)
    yield call(1, 64, 2560, torch.float32)  # Ernie 4.5


SPEC = register(
    OpSpec(
        name="router_logits",
        schema="(Tensor x, Tensor weight, bool programmatic_launch=False) -> Tensor",
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
