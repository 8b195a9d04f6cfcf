"""Query, key and value projections of one to sixteen rows in one pass over three weights."""

from __future__ import annotations

import torch

from ..registry import OpSpec, Sample, nbytes, register, shape_reason, tensor_reasons
from .gemv import rows_reason, weight_reason


def reference(
    x: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    v_weight: torch.Tensor,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    v_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``cat([x @ q_weight.T + q_bias, x @ k_weight.T + k_bias, x @ v_weight.T + v_bias], -1)``.

    Args:
        x: [..., hidden_size], at most 16 rows in all.
        q_weight, k_weight, v_weight: [num_heads*head_dim | num_kv_heads*head_dim, hidden_size], the three
            ``nn.Linear`` weights where the model keeps them.
        q_bias, k_bias, v_bias: one per output feature, or None.

    Returns:
        [..., (num_heads + 2*num_kv_heads)*head_dim] in x's dtype, contiguous.

    Raises:
        OpInputError: shapes, dtypes or devices that do not fit, or more than 16 rows.

    Source: transformers ``models/mistral/modeling_mistral.py@5.17``, ``MistralAttention``.
    """
    linear = torch.nn.functional.linear
    return torch.cat([linear(x, q_weight, q_bias), linear(x, k_weight, k_bias), linear(x, v_weight, v_bias)], -1)


def fake(x, q_weight, k_weight, v_weight, q_bias=None, k_bias=None, v_bias=None):
    return x.new_empty(*x.shape[:-1], q_weight.shape[0] + k_weight.shape[0] + v_weight.shape[0])


def why_not(x, q_weight, k_weight, v_weight, q_bias=None, k_bias=None, v_bias=None) -> list[str]:
    reasons = tensor_reasons(
        x, q_weight=q_weight, k_weight=k_weight, v_weight=v_weight, q_bias=q_bias, k_bias=k_bias, v_bias=v_bias
    )
    reasons += rows_reason(x)
    for name, weight, bias in (("q", q_weight, q_bias), ("k", k_weight, k_bias), ("v", v_weight, v_bias)):
        reasons += weight_reason(f"{name}_weight", x, weight) + shape_reason(f"{name}_bias", bias, weight.shape[:1])
    return reasons


def moved(x, q_weight, k_weight, v_weight, q_bias=None, k_bias=None, v_bias=None) -> int:
    inputs = nbytes(x, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias)
    return inputs + nbytes(fake(x, q_weight, k_weight, v_weight))


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for rows, k, nq, nkv in ((1, 111, 32, 8), (1, 256, 256, 64), (3, 96, 33, 17), (16, 128, 96, 96)):
        weights = [randn(n, k) * k**-0.5 for n in (nq, nkv, nkv)]
        yield Sample(randn(rows, k), *weights)
        yield Sample(randn(1, rows, k), *weights, randn(nq), randn(nkv), randn(nkv))


SPEC = register(
    OpSpec(
        name="gemv_qkv",
        schema=(
            "(Tensor x, Tensor q_weight, Tensor k_weight, Tensor v_weight, "
            "Tensor? q_bias=None, Tensor? k_bias=None, Tensor? v_bias=None) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
