"""The chosen experts of a mixture, for one to sixteen rows: only the weights of these experts are read."""

from __future__ import annotations

import torch

from ..registry import OpSpec, Sample, choice_reason, nbytes, register, shape_reason, tensor_reasons
from .fused_swiglu import GATES
from .fused_swiglu import reference as gated
from .gemv import rows_reason

MAX_TOP_K = 32


def reference(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    overlap: bool = False,
) -> torch.Tensor:
    """``sum over k of expert_weights[:, k] * expert(expert_ids[:, k], x) + residual``, where
    ``expert(e, x) = (activation(gate) * up) @ down_weight[e].T`` and ``gate | up = x @ gate_up_weight[e].T``.

    Args:
        x: [..., hidden_size], at most 16 rows in all.
        expert_ids: int64 [rows, top_k], top_k 1 to 32, read on the device; an id outside of [0, num_experts)
            adds nothing.
        expert_weights: float32 [rows, top_k].
        gate_up_weight: [num_experts, 2 * intermediate_size, hidden_size], of each expert gate then up, where the model
            keeps them. Experts and rows may be strided; the last dimension is contiguous.
        down_weight: [num_experts, hidden_size, intermediate_size], as ``gate_up_weight``.
        residual: [..., hidden_size] or None.
        activation: ``silu``, ``gelu_tanh`` or ``gelu``.
        overlap: CUDA may launch while the kernel before on this stream still runs; see ``gemv``. No effect on the
            result.

    Returns:
        [..., hidden_size] in x's dtype, contiguous. What an expert's activation gives is rounded to that dtype.

    Raises:
        OpInputError: shapes, dtypes or devices that do not fit, more than 16 rows, unknown activation.

    Source: transformers ``integrations/moe.py@5.23``, ``batched_mm_experts_forward``.
    """
    num_experts, hidden_size, _ = down_weight.shape
    rows, top_k = expert_ids.shape
    is_known = (expert_ids >= 0) & (expert_ids < num_experts)
    chosen = expert_ids.clamp(0, num_experts - 1).flatten()
    repeated = x.reshape(rows, -1).repeat_interleave(top_k, dim=0)
    gate, up = (gate_up_weight[chosen] @ repeated.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
    out = (down_weight[chosen] @ gated(gate, up, activation).unsqueeze(-1)).squeeze(-1)
    weighted = out.view(rows, top_k, hidden_size) * expert_weights.unsqueeze(-1)
    total = weighted.masked_fill(~is_known.unsqueeze(-1), 0).sum(dim=1).to(x.dtype).view(x.shape)
    return total if residual is None else total + residual


def fake(x, expert_ids, expert_weights, gate_up_weight, down_weight, residual=None, activation="silu", overlap=False):
    return x.new_empty(x.shape)


def _stack_reason(name: str, stack: torch.Tensor, expected: tuple[int, ...]) -> list[str]:
    """A reason if ``stack`` is not a weight matrix for every expert, with contiguous rows."""
    if tuple(stack.shape) != expected:
        return shape_reason(name, stack, expected)
    return [] if stack.stride(2) == 1 else [f"{name} has strides {stack.stride()}: make its rows contiguous"]


def why_not(
    x, expert_ids, expert_weights, gate_up_weight, down_weight, residual=None, activation="silu", overlap=False
) -> list[str]:
    reasons = tensor_reasons(x, gate_up_weight=gate_up_weight, down_weight=down_weight, residual=residual)
    reasons += rows_reason(x) + choice_reason("activation", activation, GATES)
    reasons += shape_reason("residual", residual, tuple(x.shape))
    for name, tensor, dtype in (
        ("expert_ids", expert_ids, torch.int64),
        ("expert_weights", expert_weights, torch.float32),
    ):
        if tensor.dtype != dtype:
            reasons.append(f"{name} has dtype {tensor.dtype}, expected {dtype}: cast it")
        if tensor.device != x.device:
            reasons.append(f"{name} is on {tensor.device}, expected {x.device}: move it")
    if x.dim() == 0 or down_weight.dim() != 3:
        return [*reasons, f"down_weight has shape {tuple(down_weight.shape)}, expected [experts, hidden, intermediate]"]
    hidden_size, (num_experts, _, width) = x.shape[-1], down_weight.shape
    rows, top_k = x.numel() // max(1, hidden_size), expert_ids.shape[-1] if expert_ids.dim() else 0
    if tuple(expert_ids.shape) != (rows, top_k) or not 1 <= top_k <= MAX_TOP_K:
        reasons.append(f"expert_ids has shape {tuple(expert_ids.shape)}, expected [{rows}, 1 to {MAX_TOP_K}]")
    reasons += shape_reason("expert_weights", expert_weights, tuple(expert_ids.shape))
    reasons += _stack_reason("gate_up_weight", gate_up_weight, (num_experts, 2 * width, hidden_size))
    return reasons + _stack_reason("down_weight", down_weight, (num_experts, hidden_size, width))


def moved(
    x, expert_ids, expert_weights, gate_up_weight, down_weight, residual=None, activation="silu", overlap=False
) -> int:
    count = expert_ids.unique().numel()
    weights = count * (nbytes(gate_up_weight) + nbytes(down_weight)) // gate_up_weight.shape[0]
    return 2 * nbytes(x) + nbytes(expert_ids, expert_weights, residual) + weights


def samples(device: torch.device, dtype: torch.dtype):
    def call(rows, top_k, num_experts, hidden_size, width, residual=False, **options):
        def randn(*shape, std=1.0):
            return (torch.randn(*shape, device=device) * std).to(dtype)

        scores = torch.randn(rows, num_experts, device=device)
        weights, ids = scores.softmax(-1).topk(top_k)
        stacks = randn(num_experts, 2 * width, hidden_size, std=hidden_size**-0.5)
        down = randn(num_experts, hidden_size, width, std=width**-0.5)
        added = randn(1, rows, hidden_size) if residual else None
        return Sample(randn(1, rows, hidden_size), ids, weights, stacks, down, added, **options)

    yield call(1, 2, 4, 48, 37, residual=True)
    yield call(1, 8, 16, 256, 96, overlap=True)
    yield call(2, 2, 4, 64, 72, residual=True)
    yield call(3, 3, 5, 128, 40, activation="gelu_tanh")
    yield call(4, 1, 8, 72, 264, activation="gelu")
    yield call(7, 2, 3, 96, 64, residual=True, overlap=True)
    yield call(8, 4, 32, 136, 48)
    yield call(16, 2, 4, 80, 56, residual=True)


SPEC = register(
    OpSpec(
        name="fused_experts",
        schema=(
            "(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up_weight, Tensor down_weight, "
            'Tensor? residual=None, str activation="silu", bool overlap=False) -> Tensor'
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
