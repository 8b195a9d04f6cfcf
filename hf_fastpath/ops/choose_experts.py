"""A router's choice: the experts of the largest scores, and their weights."""

from __future__ import annotations

import torch

from ..choices import Scoring
from ..registry import FLOAT_DTYPES, OpSpec, Sample, choice_reason, nbytes, register
from .fused_experts import MAX_TOP_K

MAX_EXPERTS = 1024
MAX_GROUPS = 32

#: arguments of a router beside its logits, in schemas; :func:`reference` describes them
ROUTER_SCHEMA = (
    "int scoring=0, Tensor? correction_bias=None, int num_groups=1, int top_groups=1, int group_tops=2, "
    "float factor=1.0, float sum_eps=0.0"
)


def reference(
    logits: torch.Tensor,
    expert_ids: torch.Tensor,
    normalized: bool = True,
    rounded: bool = False,
    programmatic_launch: bool = False,
    scoring: Scoring = Scoring.SOFTMAX,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_tops: int = 2,
    factor: float = 1.0,
    sum_eps: float = 0.0,
) -> torch.Tensor:
    """Choose the ``top_k`` largest of ``scores + correction_bias``, descending, write their indices, and return weights
    made of their scores.

    Args:
        logits: [rows, num_experts] float32, float16 or bfloat16, at most 1024 experts.
        expert_ids: int64 [rows, top_k], written; top_k 1 to 32, at most the experts of ``top_groups`` groups. Equal
            values may be in any order.
        normalized: divide the weights by their sum + ``sum_eps``.
        rounded: round the weights to logits' dtype at the end.
        programmatic_launch: CUDA may launch while the kernel in front on this stream still runs. The result does not
            depend on it.
        scoring: scores are the ``softmax`` or the ``sigmoid`` of logits, in float32.
        correction_bias: [num_experts] float32, float16 or bfloat16, contiguous; or None. It is added for the choice
            alone, and is no part of the weights.
        num_groups: experts are in so many groups of equal size, 1 to 32, in the order of their indices.
        top_groups: only experts of so many groups are chosen.
        group_tops: these groups are those in which so many of the largest values, 1 or 2, have the largest sums.
        factor: multiplies the weights.
        sum_eps: not negative.

    Returns:
        float32 [rows, top_k].

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, or groups are not of equal size.

    Source: transformers ``models/mixtral/modeling_mixtral.py@5.23``, ``MixtralTopKRouter``;
    ``models/qwen3_moe/modeling_qwen3_moe.py@5.23``, ``Qwen3MoeTopKRouter``; with a bias, groups and a factor
    ``models/deepseek_v3/modeling_deepseek_v3.py@5.24``, ``DeepseekV3TopkRouter``.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    scores = logits.to(wide)
    scores = scores.softmax(-1) if scoring == Scoring.SOFTMAX else scores.sigmoid()
    ranked = scores if correction_bias is None else scores + correction_bias.to(wide)
    if num_groups > 1:
        groups = ranked.unflatten(-1, (num_groups, -1))
        best = groups.topk(group_tops).values.sum(-1).topk(top_groups).indices
        is_in = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=logits.device).scatter(-1, best, True)
        ranked = groups.masked_fill(~is_in.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = ranked.topk(expert_ids.shape[1]).indices
    expert_ids.copy_(ids)
    weights = scores.gather(-1, ids)
    if normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + sum_eps)
    weights = weights * factor
    return weights.to(logits.dtype).to(wide) if rounded else weights


def fake(logits, expert_ids):
    return logits.new_empty(expert_ids.shape, dtype=torch.float32)


def why_not(logits, expert_ids, scoring, correction_bias, num_groups, top_groups, group_tops, sum_eps) -> list[str]:
    if logits.dim() != 2 or logits.dtype not in FLOAT_DTYPES or not 1 <= logits.shape[1] <= MAX_EXPERTS:
        found = f"{logits.dtype} {tuple(logits.shape)}"
        return [f"logits is {found}, expected float32, float16 or bfloat16 [rows, 1 to {MAX_EXPERTS}]"]
    rows, num_experts = logits.shape
    reasons = router_reasons(logits, scoring, correction_bias, num_groups, top_groups, group_tops, sum_eps)
    most = min(MAX_TOP_K, num_experts if reasons else num_experts // num_groups * top_groups)
    if expert_ids.dim() != 2 or expert_ids.shape[0] != rows or not 1 <= expert_ids.shape[1] <= most:
        reasons.append(f"expert_ids has shape {tuple(expert_ids.shape)}, expected [{rows}, 1 to {most}]")
    if expert_ids.dtype != torch.int64:
        reasons.append(f"expert_ids has dtype {expert_ids.dtype}, expected torch.int64")
    if expert_ids.device != logits.device:
        reasons.append(f"expert_ids is on {expert_ids.device}, expected {logits.device}")
    if not expert_ids.is_contiguous():
        reasons.append(f"expert_ids has strides {expert_ids.stride()}: it is written, make it contiguous")
    return reasons


def router_reasons(logits, scoring, correction_bias, num_groups, top_groups, group_tops, sum_eps) -> list[str]:
    """Return what is wrong with a router's arguments beside its logits [..., num_experts]."""
    reasons, num_experts = choice_reason("scoring", scoring, Scoring), logits.shape[-1]
    bias = correction_bias
    if bias is not None:
        if bias.shape != (num_experts,) or bias.dtype not in FLOAT_DTYPES or not bias.is_contiguous():
            found = f"{bias.dtype} {tuple(bias.shape)}"
            reasons.append(f"correction_bias is {found}, expected contiguous floats [{num_experts}]")
        if bias.device != logits.device:
            reasons.append(f"correction_bias is on {bias.device}, expected {logits.device}: move it")
    if not 1 <= num_groups <= MAX_GROUPS or num_experts % num_groups:
        expected = f"1 to {MAX_GROUPS} of equal size"
        return [*reasons, f"num_groups is {num_groups} of {num_experts} experts, expected {expected}"]
    if not 1 <= top_groups <= num_groups:
        reasons.append(f"top_groups is {top_groups}, expected 1 to the {num_groups} groups")
    if num_groups > 1 and not 1 <= group_tops <= min(2, num_experts // num_groups):
        most = min(2, num_experts // num_groups)
        reasons.append(
            f"group_tops is {group_tops}, expected 1 to {most}: groups have {num_experts // num_groups} experts"
        )
    if not sum_eps >= 0:
        reasons.append(f"sum_eps is {sum_eps}, expected 0 or more")
    return reasons


def moved(logits, expert_ids, correction_bias) -> int:
    return nbytes(logits, expert_ids, correction_bias) + 4 * expert_ids.numel()


def samples(device: torch.device, dtype: torch.dtype):
    def call(rows, num_experts, top_k, bias=None, **options):
        logits = 3 * torch.randn(rows, num_experts, device=device)
        if bias is not None:
            options["correction_bias"] = torch.randn(num_experts, device=device).to(bias) / 4
        return Sample(logits.to(dtype), torch.zeros(rows, top_k, dtype=torch.int64, device=device), **options)

    yield call(16, MAX_EXPERTS, MAX_TOP_K, normalized=False, rounded=True)  # at both limits
    yield call(1, 128, 8, normalized=True, rounded=True, programmatic_launch=True)
    yield call(2, 8, 2)
    yield call(3, 60, 4, normalized=False)
    yield call(5, 33, 32)
    yield call(1, 1, 1)
    yield call(40, 129, 1)
    sigmoid = dict(scoring=Scoring.SIGMOID)
    groups = dict(num_groups=8, top_groups=4, factor=2.5, sum_eps=1e-20)
    yield call(1, 256, 8, bias=torch.float32, programmatic_launch=True, **groups, **sigmoid)  # DeepSeek-V3
    yield call(3, 160, 6, normalized=False, num_groups=8, top_groups=3, group_tops=1, factor=16.0)  # DeepSeek-V2
    yield call(2, 64, 6, bias=torch.float32)  # Ernie 4.5
    yield call(1, 32, 4, bias=torch.float32, rounded=True, sum_eps=1e-6, **sigmoid)  # LFM2
    yield call(7, 40, 9, bias=torch.bfloat16, normalized=False, factor=6.0)  # LongCat
    yield call(4, 1000, 32, bias=torch.float16, num_groups=20, top_groups=1, rounded=True, **sigmoid)
    yield call(2, 8, 2, normalized=False, **sigmoid)


SPEC = register(
    OpSpec(
        name="choose_experts",
        schema=(
            "(Tensor logits, Tensor(a!) expert_ids, bool normalized=True, bool rounded=False, "
            f"bool programmatic_launch=False, {ROUTER_SCHEMA}) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
