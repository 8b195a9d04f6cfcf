"""A router's choice: the experts of the largest scores, and their weights."""

from __future__ import annotations

import torch

from ..registry import FLOAT_DTYPES, OpSpec, Sample, nbytes, register
from .fused_experts import MAX_TOP_K

MAX_EXPERTS = 1024


def reference(
    logits: torch.Tensor,
    expert_ids: torch.Tensor,
    normalized: bool = True,
    rounded: bool = False,
    programmatic_launch: bool = False,
) -> torch.Tensor:
    """Choose the ``top_k`` largest of ``softmax(logits)``, descending, and write their indices.

    Args:
        logits: [rows, num_experts] float32, float16 or bfloat16, at most 1024 experts.
        expert_ids: int64 [rows, top_k], written; top_k 1 to 32, at most num_experts. Equal values may be in any order.
        normalized: divide the values by their sum.
        rounded: round the values to logits' dtype at the end.
        programmatic_launch: CUDA may launch while the kernel in front on this stream still runs. The result does not
            depend on it.

    Returns:
        float32 [rows, top_k].

    Raises:
        OpInputError: shapes, dtypes or devices do not fit.

    Source: transformers ``models/mixtral/modeling_mixtral.py@5.23``, ``MixtralTopKRouter``;
    ``models/qwen3_moe/modeling_qwen3_moe.py@5.23``, ``Qwen3MoeTopKRouter``.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights, ids = logits.softmax(-1, dtype=wide).topk(expert_ids.shape[1])
    expert_ids.copy_(ids)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype).to(wide) if rounded else weights


def fake(logits, expert_ids):
    return logits.new_empty(expert_ids.shape, dtype=torch.float32)


def why_not(logits, expert_ids) -> list[str]:
    if logits.dim() != 2 or logits.dtype not in FLOAT_DTYPES or not 1 <= logits.shape[1] <= MAX_EXPERTS:
        found = f"{logits.dtype} {tuple(logits.shape)}"
        return [f"logits is {found}, expected float32, float16 or bfloat16 [rows, 1 to {MAX_EXPERTS}]"]
    reasons = []
    rows, num_experts = logits.shape
    most = min(MAX_TOP_K, num_experts)
    if expert_ids.dim() != 2 or expert_ids.shape[0] != rows or not 1 <= expert_ids.shape[1] <= most:
        reasons.append(f"expert_ids has shape {tuple(expert_ids.shape)}, expected [{rows}, 1 to {most}]")
    if expert_ids.dtype != torch.int64:
        reasons.append(f"expert_ids has dtype {expert_ids.dtype}, expected torch.int64")
    if expert_ids.device != logits.device:
        reasons.append(f"expert_ids is on {expert_ids.device}, expected {logits.device}")
    if not expert_ids.is_contiguous():
        reasons.append(f"expert_ids has strides {expert_ids.stride()}: it is written, make it contiguous")
    return reasons


def samples(device: torch.device, dtype: torch.dtype):
    def call(rows, num_experts, top_k, **options):
        logits = 3 * torch.randn(rows, num_experts, device=device)
        return Sample(logits.to(dtype), torch.zeros(rows, top_k, dtype=torch.int64, device=device), **options)

    yield call(16, MAX_EXPERTS, MAX_TOP_K, normalized=False, rounded=True)  # at both limits
    yield call(1, 128, 8, normalized=True, rounded=True, programmatic_launch=True)
    yield call(2, 8, 2)
    yield call(3, 60, 4, normalized=False)
    yield call(5, 33, 32)
    yield call(1, 1, 1)
    yield call(40, 129, 1)


SPEC = register(
    OpSpec(
        name="topk_softmax",
        schema=(
            "(Tensor logits, Tensor(a!) expert_ids, bool normalized=True, bool rounded=False, "
            "bool programmatic_launch=False) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=lambda logits, expert_ids, normalized=True, rounded=False, programmatic_launch=False: (
            nbytes(logits, expert_ids) + 4 * expert_ids.numel()
        ),
        samples=samples,
    )
)
