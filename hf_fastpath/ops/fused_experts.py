"""The chosen experts of a mixture for one to sixteen rows; only the weights of these experts are read."""

from __future__ import annotations

import torch

from ..choices import Activation
from ..registry import OpSpec, Sample, choice_reason, nbytes, register, shape_reason, tensor_reasons
from .fused_swiglu import GATES
from .fused_swiglu import reference as gated
from .gemv import rows_reason

MAX_TOP_K = 32
#: activations of a gate: functions of one value, and the activation that clamps gate and up
EXPERT_GATES = (*GATES, Activation.CLAMPED_SWIGLU)
#: the activation of experts without a gate
UNGATED = Activation.SQUARED_RELU


def reference(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    activation: Activation = Activation.SILU,
    programmatic_launch: bool = False,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    transposed: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    concatenated: bool = False,
) -> torch.Tensor:
    """Compute ``sum over k of expert_weights[:, k] * expert(expert_ids[:, k], x) + residual``, with
    ``expert(e, x) = (activation(gate) * up) @ down_weight[e].T`` and ``gate | up = x @ gate_up_weight[e].T``.

    Args:
        x: [..., hidden_size], at most 16 rows in all.
        expert_ids: int64 [rows, top_k], top_k 1 to 32, read on the device; an id outside of [0, num_experts) adds
            nothing.
        expert_weights: float32 [rows, top_k].
        gate_up_weight: [num_experts, 2 * intermediate_size, hidden_size], the model's own tensor; each expert has gate,
            then up. Experts and rows may be strided; the last dimension is contiguous. With ``squared_relu`` experts
            have no gate: [num_experts, intermediate_size, hidden_size].
        down_weight: [num_experts, hidden_size, intermediate_size], as ``gate_up_weight``.
        residual: [..., hidden_size] or None.
        activation: ``silu``, ``gelu_tanh`` or ``gelu``; with ``transposed`` also ``clamped_swiglu``, which is
            ``gate * sigmoid(alpha * gate) * (up + 1)`` with gate at most ``limit`` and up within ``limit`` of zero;
            without it also ``squared_relu``, which is ``relu(up)**2``.
        programmatic_launch: CUDA may launch while the kernel in front on this stream still runs; see ``gemv``. The
            result does not depend on it.
        gate_up_bias: [num_experts, 2 * intermediate_size], added to gate and up, or None; only with ``transposed``.
        down_bias: [num_experts, hidden_size], added to each expert's output before it is weighted, or None; only with
            ``transposed``.
        transposed: the weights are stored [num_experts, hidden_size, 2 * intermediate_size] and
            [num_experts, intermediate_size, hidden_size], and gate and up features alternate: gate 0, up 0, gate 1.
        alpha, limit: of ``clamped_swiglu``; limit is positive.
        concatenated: gate features come first, then up features, though the weights are ``transposed``.

    Returns:
        [..., hidden_size] in x's dtype, contiguous. The result of an expert's activation is rounded to that dtype.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, there are more than 16 rows, or the activation is unknown.

    Source: transformers ``integrations/moe.py@5.23``, ``batched_mm_experts_forward``; transposed
    ``models/gpt_oss/modeling_gpt_oss.py@5.23``, ``GptOssExperts``; transposed and concatenated
    ``models/aria/modeling_aria.py@5.24``, ``AriaExperts``; without a gate
    ``models/nemotron_h/modeling_nemotron_h.py@5.24``, ``NemotronHExperts``.
    """
    num_experts, hidden_size = down_weight.shape[0], x.shape[-1]
    rows, top_k = expert_ids.shape
    is_known = (expert_ids >= 0) & (expert_ids < num_experts)
    chosen = expert_ids.clamp(0, num_experts - 1).flatten()
    repeated = x.reshape(rows, -1).repeat_interleave(top_k, dim=0)
    gate_up = _products(repeated, gate_up_weight[chosen], transposed)
    if gate_up_bias is not None:
        gate_up = gate_up + gate_up_bias[chosen]
    if activation == UNGATED:
        hidden = torch.relu(gate_up).square()
    else:
        alternating = transposed and not concatenated
        gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if alternating else gate_up.chunk(2, dim=-1)
        is_clamped = activation == Activation.CLAMPED_SWIGLU
        hidden = clamped(gate, up, alpha, limit) if is_clamped else gated(gate, up, activation)
    out = _products(hidden, down_weight[chosen], transposed)
    if down_bias is not None:
        out = out + down_bias[chosen]
    weighted = out.view(rows, top_k, hidden_size) * expert_weights.unsqueeze(-1)
    total = weighted.masked_fill(~is_known.unsqueeze(-1), 0).sum(dim=1).to(x.dtype).view(x.shape)
    return total if residual is None else total + residual


def _products(x: torch.Tensor, weights: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Multiply each row of x by its own matrix: [pairs, features]."""
    return ((x.unsqueeze(1) @ weights) if transposed else (weights @ x.unsqueeze(-1)).mT).squeeze(1)


def clamped(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Compute ``gate * sigmoid(alpha * gate) * (up + 1)`` of values that ``limit`` bounds."""
    gate = gate.clamp(max=limit)
    return (up.clamp(min=-limit, max=limit) + 1) * (gate * torch.sigmoid(gate * alpha))


def fake(x):
    return x.new_empty(x.shape)


def _stack_reason(name: str, stack: torch.Tensor, expected: tuple[int, ...]) -> list[str]:
    """Return a reason if ``stack`` is not a weight matrix for every expert, with contiguous rows."""
    if tuple(stack.shape) != expected:
        return shape_reason(name, stack, expected)
    return [] if stack.stride(2) == 1 else [f"{name} has strides {stack.stride()}: make its rows contiguous"]


def why_not(
    x,
    expert_ids,
    expert_weights,
    gate_up_weight,
    down_weight,
    residual,
    activation,
    gate_up_bias,
    down_bias,
    transposed,
    limit,
    concatenated,
) -> list[str]:
    stacks = {"gate_up_weight": gate_up_weight, "down_weight": down_weight}
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    reasons = tensor_reasons(x, **stacks, residual=residual, **biases)
    reasons += rows_reason(x)
    reasons += choice_reason("activation", activation, EXPERT_GATES if transposed else (*GATES, UNGATED))
    if not transposed:
        reasons += [f"{name} goes with transposed" for name, bias in biases.items() if bias is not None]
    if concatenated and not transposed:
        reasons.append("concatenated goes with transposed: gate and up of other weights always follow each other")
    if not limit > 0:
        reasons.append(f"limit is {limit}, expected a positive number")
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
    hidden_size, num_experts, width = x.shape[-1], down_weight.shape[0], down_weight.shape[1 if transposed else 2]
    rows, top_k = x.numel() // max(1, hidden_size), expert_ids.shape[-1] if expert_ids.dim() else 0
    if tuple(expert_ids.shape) != (rows, top_k) or not 1 <= top_k <= MAX_TOP_K:
        reasons.append(f"expert_ids has shape {tuple(expert_ids.shape)}, expected [{rows}, 1 to {MAX_TOP_K}]")
    reasons += shape_reason("expert_weights", expert_weights, tuple(expert_ids.shape))
    first = width if activation == UNGATED else 2 * width
    for name, features, in_features in (("gate_up", first, hidden_size), ("down", hidden_size, width)):
        sides = (in_features, features) if transposed else (features, in_features)
        reasons += _stack_reason(f"{name}_weight", stacks[f"{name}_weight"], (num_experts, *sides))
        reasons += shape_reason(f"{name}_bias", biases[f"{name}_bias"], (num_experts, features))
    return reasons


def moved(x, expert_ids, expert_weights, gate_up_weight, down_weight, residual, gate_up_bias, down_bias) -> int:
    count = expert_ids.unique().numel()
    weights = count * nbytes(gate_up_weight, down_weight, gate_up_bias, down_bias) // gate_up_weight.shape[0]
    return 2 * nbytes(x) + nbytes(expert_ids, expert_weights, residual) + weights


def samples(device: torch.device, dtype: torch.dtype):
    def call(rows, top_k, num_experts, hidden_size, width, residual=False, biases=False, **options):
        def randn(*shape, std=1.0):
            return (torch.randn(*shape, device=device) * std).to(dtype)

        scores = torch.randn(rows, num_experts, device=device)
        weights, ids = scores.softmax(-1).topk(top_k)
        features = width if options.get("activation") == UNGATED else 2 * width
        stacks = randn(num_experts, features, hidden_size, std=hidden_size**-0.5)
        down = randn(num_experts, hidden_size, width, std=width**-0.5)
        if options.get("transposed"):
            stacks, down = (stack.mT.contiguous() for stack in (stacks, down))
        if biases:
            options |= dict(gate_up_bias=randn(num_experts, 2 * width), down_bias=randn(num_experts, hidden_size))
        added = randn(1, rows, hidden_size) if residual else None
        return Sample(randn(1, rows, hidden_size), ids, weights, stacks, down, added, **options)

    yield call(1, 2, 4, 48, 37, residual=True)
    yield call(1, 8, 16, 256, 96, programmatic_launch=True)
    yield call(2, 2, 4, 64, 72, residual=True)
    yield call(3, 3, 5, 128, 40, activation=Activation.GELU_TANH)
    yield call(4, 1, 8, 72, 264, activation=Activation.GELU)
    yield call(7, 2, 3, 96, 64, residual=True, programmatic_launch=True)
    yield call(8, 4, 32, 136, 48)
    yield call(16, 2, 4, 80, 56, residual=True)
    oss = dict(transposed=True, biases=True, activation=Activation.CLAMPED_SWIGLU)
    yield call(1, 4, 8, 128, 96, residual=True, programmatic_launch=True, **oss)
    yield call(2, 2, 4, 60, 37, limit=0.5, alpha=1.3, **oss)
    yield call(9, 2, 3, 72, 64, residual=True, transposed=True)
    yield call(1, 6, 8, 128, 64, transposed=True, concatenated=True, programmatic_launch=True)  # Aria
    yield call(5, 2, 3, 60, 37, residual=True, transposed=True, concatenated=True, biases=True)
    yield call(1, 6, 8, 96, 56, activation=UNGATED, programmatic_launch=True)  # Nemotron-H
    yield call(4, 2, 3, 61, 19, residual=True, activation=UNGATED)


SPEC = register(
    OpSpec(
        name="fused_experts",
        schema=(
            "(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up_weight, Tensor down_weight, "
            "Tensor? residual=None, int activation=2, bool programmatic_launch=False, Tensor? gate_up_bias=None, "
            "Tensor? down_bias=None, bool transposed=False, float alpha=1.702, float limit=7.0, "
            "bool concatenated=False) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
