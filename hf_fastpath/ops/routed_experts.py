"""The experts that a router's scores choose, for one to sixteen rows: choice and experts in one call."""

from __future__ import annotations

import torch

from ..choices import Activation, NormKind, Scoring
from ..registry import (
    FLOAT_DTYPES,
    OpSpec,
    Sample,
    choice_reason,
    nbytes,
    register,
    shape_reason,
    tensor_reasons,
)
from .choose_experts import MAX_EXPERTS, ROUTER_SCHEMA, router_reasons
from .choose_experts import reference as choose_experts
from .fused_experts import MAX_TOP_K, UNGATED
from .fused_experts import reference as fused_experts
from .fused_experts import why_not as experts_why_not
from .fused_swiglu import GATES
from .fused_swiglu import reference as gated
from .norm import NORM_SCHEMA, norm_reasons, normed


def reference(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    top_k: int,
    residual: torch.Tensor | None = None,
    normalized: bool = True,
    rounded: bool = False,
    activation: Activation = Activation.SILU,
    programmatic_launch: bool = False,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    transposed: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    concatenated: bool = False,
    first_expert: int | None = None,
    norm: NormKind = NormKind.NONE,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    shared_gate_weight: torch.Tensor | None = None,
    shared_up_weight: torch.Tensor | None = None,
    shared_down_weight: torch.Tensor | None = None,
    shared_logits: torch.Tensor | None = None,
    scoring: Scoring = Scoring.SOFTMAX,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_tops: int = 2,
    factor: float = 1.0,
    sum_eps: float = 0.0,
) -> torch.Tensor:
    """Run ``fused_experts`` on ``norm(x)`` with the experts and weights that ``choose_experts`` makes of ``logits``.

    Args:
        x: [..., hidden_size], at most 16 rows in all.
        logits: [..., num_scored] float32, float16 or bfloat16, as many rows as x; at most 1024 experts.
        top_k: experts that a row chooses, 1 to 32, at most num_scored. Which of equal scores are chosen is open.
        normalized, rounded: as of ``choose_experts``.
        gate_up_weight, down_weight, residual, activation, programmatic_launch, gate_up_bias, down_bias, transposed,
        alpha, limit, concatenated: as of ``fused_experts``; norm_weight is one of the weights there.
        first_expert: the weights are those of experts first_expert to first_expert + num_experts - 1, and chosen
            experts without weights add nothing; None if the weights are those of all.
        norm, norm_weight, norm_bias, norm_eps: as of ``gemv``. The residual is not normed.
        shared_gate_weight, shared_up_weight: [shared_size, hidden_size] of an expert that every row goes through
            besides; rows may be strided, the last dimension is contiguous. None without one.
        shared_down_weight: [hidden_size, shared_size], as ``shared_gate_weight``; goes with the two.
        shared_logits: [..., 1], as many rows as x: the shared expert's output is multiplied by their sigmoid. Or None.
        scoring, correction_bias, num_groups, top_groups, group_tops, factor, sum_eps: as of ``choose_experts``.

    Returns:
        [..., hidden_size] in x's dtype, contiguous.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, there are more than 16 rows, or the activation is unknown,
            or not one that a shared expert can have: silu, gelu_tanh or gelu.

    Source: transformers ``models/mixtral/modeling_mixtral.py@5.23``, ``MixtralSparseMoeBlock``;
    ``models/gpt_oss/modeling_gpt_oss.py@5.23``, ``GptOssMLP``; shared
    ``models/qwen3_5_moe/modeling_qwen3_5_moe.py@5.24``, ``Qwen3_5MoeSparseMoeBlock``.
    """
    x = normed(x, norm, norm_weight, norm_bias, norm_eps)
    scores = logits.reshape(-1, logits.shape[-1])
    ids = torch.empty(len(scores), top_k, dtype=torch.int64, device=logits.device)
    groups = num_groups, top_groups, group_tops
    weights = choose_experts(
        scores, ids, normalized, rounded, False, scoring, correction_bias, *groups, factor, sum_eps
    )
    ids = ids - (first_expert or 0)
    stacks, biases = (gate_up_weight, down_weight), (gate_up_bias, down_bias)
    chosen = fused_experts(
        x, ids, weights, *stacks, residual, activation, False, *biases, transposed, alpha, limit, concatenated
    )
    if shared_gate_weight is None or shared_up_weight is None or shared_down_weight is None:
        return chosen
    hidden = gated(x @ shared_gate_weight.T, x @ shared_up_weight.T, activation)
    if shared_logits is not None:
        hidden = hidden * torch.sigmoid(shared_logits.reshape(*x.shape[:-1], 1))
    return chosen + hidden @ shared_down_weight.T


def fake(x):
    return x.new_empty(x.shape)


def why_not(
    x,
    logits,
    gate_up_weight,
    down_weight,
    top_k,
    residual,
    activation,
    gate_up_bias,
    down_bias,
    transposed,
    limit,
    concatenated,
    first_expert,
    norm,
    norm_weight,
    norm_bias,
    shared_gate_weight,
    shared_up_weight,
    shared_down_weight,
    shared_logits,
    scoring,
    correction_bias,
    num_groups,
    top_groups,
    group_tops,
    sum_eps,
) -> list[str]:
    held = down_weight.shape[0] if down_weight.dim() else 0
    num_experts = logits.shape[-1] if logits.dim() else 0
    if logits.dtype not in FLOAT_DTYPES or not logits.dim() or (first_expert is None and num_experts != held):
        found = f"{logits.dtype} {tuple(logits.shape)}"
        return [f"logits is {found}, expected float32, float16 or bfloat16 [..., {held}]"]
    reasons = norm_reasons(x, norm, norm_weight, norm_bias)
    if first_expert is not None and not 0 <= first_expert <= num_experts - held:
        reasons.append(f"first_expert is {first_expert}, expected 0 to {num_experts - held}: {held} have weights")
    if not 1 <= num_experts <= MAX_EXPERTS:
        reasons.append(f"there are {num_experts} experts, expected 1 to {MAX_EXPERTS}")
    if num_experts:
        of_router = router_reasons(logits, scoring, correction_bias, num_groups, top_groups, group_tops, sum_eps)
        reasons += of_router
        most = num_experts if of_router else num_experts // num_groups * top_groups
        if top_k > most:
            of_groups = f" of {top_groups} groups" if most < num_experts else ""
            reasons.append(f"top_k is {top_k}, expected at most the {most} experts{of_groups}")
    if logits.device != x.device:
        reasons.append(f"logits is on {logits.device}, expected {x.device}: move it")
    rows, scored = x.numel() // max(1, x.shape[-1]) if x.dim() else 0, logits.numel() // max(1, num_experts)
    if rows != scored:
        reasons.append(f"logits has {scored} rows, expected the {rows} of x")
    shared = shared_gate_weight, shared_up_weight, shared_down_weight, shared_logits
    reasons += _shared_reasons(x, *shared, activation, rows)
    if not 1 <= top_k <= MAX_TOP_K:
        return [*reasons, f"top_k is {top_k}, expected 1 to {MAX_TOP_K}"]
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(rows, top_k, device=x.device)
    return reasons + experts_why_not(
        x,
        ids,
        weights,
        gate_up_weight,
        down_weight,
        residual,
        activation,
        gate_up_bias,
        down_bias,
        transposed,
        limit,
        concatenated,
    )


def _shared_reasons(x, gate, up, down, logits, activation, rows) -> list[str]:
    """Return what is wrong with the weights of a shared expert."""
    named = {"shared_gate_weight": gate, "shared_up_weight": up, "shared_down_weight": down}
    absent = [name for name, each in named.items() if each is None]
    if len(absent) == 3 and logits is None:
        return []
    if absent:
        return [f"{', '.join(absent)} are missing: the weights of a shared expert go together"]
    if gate.dim() != 2 or not x.dim():
        return [f"shared_gate_weight has shape {tuple(gate.shape)}, expected [features, hidden_size]"]
    size, hidden_size = len(gate), x.shape[-1]
    reasons = tensor_reasons(x, **named) + choice_reason("activation", activation, GATES)
    for name, shape in zip(named, ((size, hidden_size), (size, hidden_size), (hidden_size, size))):
        reasons += shape_reason(name, named[name], shape)
        if named[name].stride(-1) != 1:
            reasons.append(f"{name} has strides {named[name].stride()}: make its rows contiguous")
    if logits is not None:
        reasons += tensor_reasons(x, shared_logits=logits)
        if logits.numel() != rows:
            reasons.append(
                f"shared_logits has shape {tuple(logits.shape)}, expected one number for each of {rows} rows"
            )
    return reasons


def moved(
    x,
    logits,
    gate_up_weight,
    down_weight,
    top_k,
    residual,
    gate_up_bias,
    down_bias,
    first_expert,
    norm_weight,
    norm_bias,
    shared_gate_weight,
    shared_up_weight,
    shared_down_weight,
    shared_logits,
    correction_bias,
) -> int:
    first = first_expert or 0
    chosen = logits.reshape(-1, logits.shape[-1]).topk(top_k).indices.unique()
    count = int(((chosen >= first) & (chosen < first + len(down_weight))).sum())
    weights = count * nbytes(gate_up_weight, down_weight, gate_up_bias, down_bias) // gate_up_weight.shape[0]
    weights += nbytes(shared_gate_weight, shared_up_weight, shared_down_weight)
    return 2 * nbytes(x) + nbytes(logits, residual, norm_weight, norm_bias, shared_logits, correction_bias) + weights


def samples(device: torch.device, dtype: torch.dtype):
    def call(
        rows,
        top_k,
        num_scored,
        hidden_size,
        width,
        residual=False,
        biases=False,
        of=None,
        held=None,
        shared=0,
        is_shut=False,
        **options,
    ):
        num_experts = held or num_scored

        def randn(*shape, std=1.0):
            return (torch.randn(*shape, device=device) * std).to(dtype)

        # scores that differ in every dtype
        logits = torch.stack([torch.randperm(num_scored, device=device) for _ in range(rows)]) / 8 - 2
        features = width if options.get("activation") == UNGATED else 2 * width
        stacks = randn(num_experts, features, hidden_size, std=hidden_size**-0.5)
        down = randn(num_experts, hidden_size, width, std=width**-0.5)
        if options.get("transposed"):
            stacks, down = (stack.mT.contiguous() for stack in (stacks, down))
        if biases:
            options |= dict(gate_up_bias=randn(num_experts, 2 * width), down_bias=randn(num_experts, hidden_size))
        if shared:
            options |= {
                f"shared_{name}_weight": randn(shared, hidden_size, std=hidden_size**-0.5) for name in ("gate", "up")
            }
            options["shared_down_weight"] = randn(hidden_size, shared, std=shared**-0.5)
            options["shared_logits"] = randn(1, rows, 1) if is_shut else None
        added = randn(1, rows, hidden_size) if residual else None
        logits = logits.to(of or dtype).unsqueeze(0)
        return Sample(randn(1, rows, hidden_size), logits, stacks, down, top_k, added, **options)

    yield call(1, 2, 4, 48, 37, residual=True)
    yield call(1, 8, 16, 256, 96, rounded=True, programmatic_launch=True)
    yield call(1, 4, 128, 136, 24, residual=True, normalized=False)
    yield call(1, 3, 260, 64, 40, of=torch.float32)
    yield call(1, 8, 256, 64, 40, residual=True, rounded=True, programmatic_launch=True)
    yield call(1, 1, 5, 72, 264, of=torch.float32, activation=Activation.GELU)
    yield call(4, 2, 8, 64, 72, residual=True, rounded=True)
    yield call(16, 3, 9, 80, 56, normalized=False)
    yield call(1, 6, 8, 128, 64, transposed=True, concatenated=True, programmatic_launch=True)  # Aria
    yield call(1, 6, 8, 96, 56, activation=UNGATED, residual=True)  # Nemotron-H
    yield call(1, 4, 16, 64, 40, held=4, first_expert=8, residual=True, programmatic_launch=True)
    yield call(3, 2, 6, 72, 24, held=3, first_expert=0)
    oss = dict(transposed=True, biases=True, activation=Activation.CLAMPED_SWIGLU)
    yield call(1, 4, 32, 128, 96, residual=True, programmatic_launch=True, **oss)
    yield call(1, 2, 4, 60, 37, limit=0.5, alpha=1.3, rounded=True, **oss)
    yield call(1, 4, 8, 64, 48, held=4, first_expert=4, **oss)
    yield call(9, 2, 3, 72, 64, residual=True, transposed=True)
    for rows, options in ((1, {}), (1, oss), (1, dict(programmatic_launch=True)), (3, {})):
        rms = dict(norm=NormKind.RMS_OFFSET if rows > 1 else NormKind.RMS, norm_eps=1e-5, **options)
        yield call(rows, 2, 8, 256, 40, norm_weight=torch.randn(256, device=device).to(dtype), residual=True, **rms)
    yield call(1, 2, 6, 40, 24, norm=NormKind.LAYER, norm_eps=1e-5)
    offset = dict(norm=NormKind.RMS_OFFSET, norm_weight=torch.randn(256, device=device).to(dtype), norm_eps=1e-6)
    yield call(
        1, 8, 256, 256, 64, residual=True, shared=64, is_shut=True, programmatic_launch=True, **offset
    )  # Qwen3.5
    yield call(1, 6, 64, 128, 88, residual=True, shared=176, programmatic_launch=True)  # DeepSeek-V2
    yield call(1, 3, 260, 64, 40, shared=160, is_shut=True, of=torch.float32)
    yield call(1, 2, 8, 96, 40, residual=True, shared=60)  # not as wide as several experts
    yield call(5, 2, 8, 64, 72, residual=True, shared=72, is_shut=True, norm=NormKind.LAYER, norm_eps=1e-5)
    yield call(1, 2, 8, 64, 32, shared=64, transposed=True, concatenated=True)
    router = dict(scoring=Scoring.SIGMOID, factor=2.5, sum_eps=1e-20, of=torch.float32)
    for rows, num_groups in ((1, 8), (1, 1), (3, 2)):  # DeepSeek-V3, GLM-4.7-Flash
        bias = torch.randn(64, device=device) / 8
        groups = dict(correction_bias=bias, num_groups=num_groups, top_groups=-(-num_groups // 2))
        yield call(rows, 4, 64, 72, 40, residual=True, shared=40, programmatic_launch=True, **groups, **router)


SPEC = register(
    OpSpec(
        name="routed_experts",
        schema=(
            "(Tensor x, Tensor logits, Tensor gate_up_weight, Tensor down_weight, int top_k, Tensor? residual=None, "
            "bool normalized=True, bool rounded=False, int activation=2, bool programmatic_launch=False, "
            "Tensor? gate_up_bias=None, Tensor? down_bias=None, bool transposed=False, float alpha=1.702, "
            f"float limit=7.0, bool concatenated=False, int? first_expert=None, {NORM_SCHEMA}, "
            "Tensor? shared_gate_weight=None, Tensor? shared_up_weight=None, Tensor? shared_down_weight=None, "
            f"Tensor? shared_logits=None, {ROUTER_SCHEMA}) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
