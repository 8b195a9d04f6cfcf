"""The chosen experts of a mixture with quantized weights, for one to sixteen rows; only these experts' are read."""

from __future__ import annotations

import torch

from ..choices import Activation, NormKind, PackedFormat
from ..quantization import FORMATS, PackedWeight
from ..quantization.formats import padded, scale_dtype
from ..registry import OpSpec, Sample, choice_reason, nbytes, register, shape_reason, tensor_reasons
from .fused_experts import EXPERT_GATES, MAX_TOP_K, clamped
from .fused_swiglu import reference as gated
from .gemv import rows_reason
from .norm import NORM_SCHEMA, norm_reasons, normed
from .packed_gemv import random_weight


def reference(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up_quants: torch.Tensor,
    gate_up_scales: torch.Tensor,
    gate_up_zeros: torch.Tensor | None,
    gate_up_multiplier: float,
    gate_up_format: PackedFormat,
    down_quants: torch.Tensor,
    down_scales: torch.Tensor,
    down_zeros: torch.Tensor | None,
    down_multiplier: float,
    down_format: PackedFormat,
    residual: torch.Tensor | None = None,
    activation: Activation = Activation.SILU,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    alternating: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    norm: NormKind = NormKind.NONE,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    programmatic_launch: bool = False,
) -> torch.Tensor:
    """Compute ``sum over k of expert_weights[:, k] * expert(expert_ids[:, k], norm(x)) + residual``, with
    ``expert(e, x) = activation(gate, up) @ down[e].T + down_bias[e]`` and
    ``gate, up = x @ gate_up[e].T + gate_up_bias[e]``.

    The matrices of all experts are one quantized weight whose rows follow each other, those of expert 0 first.

    Args:
        x: [..., hidden_size], at most 16 rows in all.
        expert_ids: int64 [rows, top_k], top_k 1 to 32, read on the device; an id outside of [0, num_experts) adds
            nothing.
        expert_weights: float32 [rows, top_k].
        gate_up_quants, gate_up_scales, gate_up_zeros, gate_up_multiplier, gate_up_format: as of ``packed_gemv``, of
            num_experts * 2 * intermediate_size rows; each expert has gate, then up, unless they alternate.
        down_quants, down_scales, down_zeros, down_multiplier, down_format: the same of num_experts * hidden_size rows.
        residual: [..., hidden_size] or None.
        activation: ``silu``, ``gelu_tanh``, ``gelu`` or ``clamped_swiglu``, see ``fused_experts``.
        gate_up_bias: [num_experts, 2 * intermediate_size] in the order of the rows, or None.
        down_bias: [num_experts, hidden_size], added to each expert's output before it is weighted, or None.
        alternating: rows of gate and up alternate: gate 0, up 0, gate 1.
        alpha, limit: of ``clamped_swiglu``; limit is positive.
        norm, norm_weight, norm_bias, norm_eps: of x, as in ``gemv``. The residual is not normed.
        programmatic_launch: as in ``gemv``.

    Returns:
        [..., hidden_size] in x's dtype, contiguous. The result of an expert's activation is rounded to that dtype.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, there are more than 16 rows, or a format or the activation
            is unknown.

    Source: ``fused_experts`` over ``PackedWeight.dequantize()`` of the chosen experts.
    """
    hidden_size, (rows, top_k) = x.shape[-1], expert_ids.shape
    num_experts = down_quants.shape[0] // hidden_size
    width = gate_up_quants.shape[0] // num_experts // 2
    is_known = (expert_ids >= 0) & (expert_ids < num_experts)
    chosen = expert_ids.clamp(0, num_experts - 1).flatten()
    given = normed(x, norm, norm_weight, norm_bias, norm_eps).reshape(rows, -1).repeat_interleave(top_k, dim=0)

    def products(of: torch.Tensor, features: int, parts: tuple, bias: torch.Tensor | None) -> torch.Tensor:
        quants, scales, zeros, multiplier, format = parts
        rows_of = (chosen[:, None] * features + torch.arange(features, device=chosen.device)).flatten()
        zeros = None if zeros is None else zeros[rows_of]
        packed = PackedWeight.of_parts(of.shape[-1], quants[rows_of], scales[rows_of], zeros, multiplier, format)
        matrices = packed.dequantize(of.dtype).view(len(chosen), features, -1)
        out = (matrices @ of.unsqueeze(-1)).squeeze(-1)
        return out if bias is None else out + bias[chosen]

    first = gate_up_quants, gate_up_scales, gate_up_zeros, gate_up_multiplier, gate_up_format
    both = products(given, 2 * width, first, gate_up_bias)
    gate, up = (both[..., ::2], both[..., 1::2]) if alternating else both.chunk(2, dim=-1)
    is_clamped = activation == Activation.CLAMPED_SWIGLU
    hidden = clamped(gate, up, alpha, limit) if is_clamped else gated(gate, up, activation)
    second = down_quants, down_scales, down_zeros, down_multiplier, down_format
    out = products(hidden, hidden_size, second, down_bias)
    weighted = out.view(rows, top_k, hidden_size) * expert_weights.unsqueeze(-1)
    total = weighted.masked_fill(~is_known.unsqueeze(-1), 0).sum(dim=1).to(x.dtype).view(x.shape)
    return total if residual is None else total + residual


def fake(x):
    return x.new_empty(x.shape)


def _stack_reasons(name, x, parts, format, rows: int, in_features: int) -> list[str]:
    """Return reasons why tensors are not the quantized matrices of all experts."""
    known, (quants, scales, zeros) = FORMATS[PackedFormat(format).label], parts
    expected = {
        "quants": (quants, torch.uint8, padded(in_features) * known.bits // 8),
        "scales": (scales, scale_dtype(known), known.scale_columns(in_features)),
    }
    reasons = []
    if known.has_zeros != (zeros is not None):
        absent = "missing" if zeros is None else "given"
        reasons.append(f"{name}_zeros is {absent}, which format {PackedFormat(format)} does not go with")
    elif zeros is not None:
        expected["zeros"] = zeros, torch.uint8, known.groups(in_features)
    for part, (tensor, dtype, columns) in expected.items():
        reasons += shape_reason(f"{name}_{part}", tensor, (rows, columns))
        if tensor.dtype != dtype:
            reasons.append(f"{name}_{part} has dtype {tensor.dtype}, expected {dtype}")
        if tensor.device != x.device:
            reasons.append(f"{name}_{part} is on {tensor.device}, expected {x.device}: move it")
    return reasons


def why_not(
    x,
    expert_ids,
    expert_weights,
    gate_up_quants,
    gate_up_scales,
    gate_up_zeros,
    gate_up_format,
    down_quants,
    down_scales,
    down_zeros,
    down_format,
    residual,
    activation,
    gate_up_bias,
    down_bias,
    limit,
    norm,
    norm_weight,
    norm_bias,
) -> list[str]:
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    reasons = tensor_reasons(x, residual=residual, **biases) + rows_reason(x)
    reasons += choice_reason("activation", activation, EXPERT_GATES)
    reasons += choice_reason("gate_up_format", gate_up_format, PackedFormat)
    reasons += choice_reason("down_format", down_format, PackedFormat)
    reasons += norm_reasons(x, norm, norm_weight, norm_bias) + shape_reason("residual", residual, tuple(x.shape))
    if not limit > 0:
        reasons.append(f"limit is {limit}, expected a positive number")
    for name, tensor, dtype in (
        ("expert_ids", expert_ids, torch.int64),
        ("expert_weights", expert_weights, torch.float32),
    ):
        if tensor.dtype != dtype:
            reasons.append(f"{name} has dtype {tensor.dtype}, expected {dtype}: cast it")
        if tensor.device != x.device:
            reasons.append(f"{name} is on {tensor.device}, expected {x.device}: move it")
    if reasons:
        return reasons
    hidden_size = max(1, x.shape[-1])
    rows, top_k = x.numel() // hidden_size, expert_ids.shape[-1] if expert_ids.dim() else 0
    if tuple(expert_ids.shape) != (rows, top_k) or not 1 <= top_k <= MAX_TOP_K:
        reasons.append(f"expert_ids has shape {tuple(expert_ids.shape)}, expected [{rows}, 1 to {MAX_TOP_K}]")
    reasons += shape_reason("expert_weights", expert_weights, tuple(expert_ids.shape))
    down_rows = down_quants.shape[0] if down_quants.dim() == 2 else 0
    gate_up_rows = gate_up_quants.shape[0] if gate_up_quants.dim() == 2 else 0
    num_experts = down_rows // hidden_size
    if not num_experts or down_rows % hidden_size:
        return [*reasons, f"down_quants has {down_rows} rows, expected {hidden_size} for each expert"]
    if not gate_up_rows or gate_up_rows % (2 * num_experts):
        rule = f"expected an even number for each of {num_experts} experts"
        return [*reasons, f"gate_up_quants has {gate_up_rows} rows, {rule}"]
    width = gate_up_rows // num_experts // 2
    first = (gate_up_quants, gate_up_scales, gate_up_zeros), gate_up_format, gate_up_rows, hidden_size
    second = (down_quants, down_scales, down_zeros), down_format, down_rows, width
    reasons += _stack_reasons("gate_up", x, *first) + _stack_reasons("down", x, *second)
    reasons += shape_reason("gate_up_bias", gate_up_bias, (num_experts, 2 * width))
    return reasons + shape_reason("down_bias", down_bias, (num_experts, hidden_size))


def moved(
    x,
    expert_ids,
    expert_weights,
    gate_up_quants,
    gate_up_scales,
    gate_up_zeros,
    down_quants,
    down_scales,
    down_zeros,
    residual,
    gate_up_bias,
    down_bias,
    norm_weight,
    norm_bias,
) -> int:
    num_experts, count = down_quants.shape[0] // x.shape[-1], expert_ids.unique().numel()
    stacks = nbytes(gate_up_quants, gate_up_scales, gate_up_zeros, down_quants, down_scales, down_zeros)
    weights = count * (stacks + nbytes(gate_up_bias, down_bias)) // num_experts
    return 2 * nbytes(x) + nbytes(expert_ids, expert_weights, residual, norm_weight, norm_bias) + weights


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def call(format, rows, top_k, num_experts, hidden_size, width, residual=False, biases=False, down=None, **options):
        weights, ids = torch.randn(rows, num_experts, device=device).softmax(-1).topk(top_k)
        stacks = random_weight(FORMATS[format], num_experts * 2 * width, hidden_size, device)
        below = random_weight(FORMATS[down or format], num_experts * hidden_size, width, device)
        if biases:
            options |= dict(gate_up_bias=randn(num_experts, 2 * width), down_bias=randn(num_experts, hidden_size))
        added = randn(1, rows, hidden_size) if residual else None
        return Sample(randn(1, rows, hidden_size), ids, weights, *stacks, *below, added, **options)

    oss = dict(alternating=True, biases=True, activation=Activation.CLAMPED_SWIGLU)
    names = list(FORMATS)
    for place, format in enumerate(names):
        other = names[(place + 1) % len(names)]  # of down
        yield call(format, 1, 4, 6, 360, 264, residual=True, programmatic_launch=True, **oss)
        rms = dict(norm=NormKind.RMS, norm_weight=randn(136), norm_eps=1e-5)
        yield call(format, 1, 3, 8, 136, 24, residual=True, down=other, programmatic_launch=True, **rms)
        yield call(format, 9, 2, 3, 80, 56, residual=True)
    for format, other in (("int4_g32", "int8"), ("mxfp4", "int4_g32_zeros")):
        yield call(format, 1, 2, 4, 48, 37, residual=True)
        yield call(format, 1, 8, 12, 256, 96, programmatic_launch=True)
        yield call(format, 3, 2, 5, 130, 40, activation=Activation.GELU_TANH, biases=True)
        offset = dict(norm=NormKind.RMS_OFFSET, norm_weight=randn(72), norm_eps=1e-6)
        yield call(format, 2, 2, 4, 72, 64, activation=Activation.GELU, alternating=True, down=other, **offset)
        layer = dict(norm=NormKind.LAYER, norm_weight=randn(40), norm_bias=randn(40), norm_eps=1e-5)
        yield call(format, 16, 1, 3, 40, 24, residual=True, limit=0.5, alpha=1.3, **oss, **layer)


SPEC = register(
    OpSpec(
        name="packed_experts",
        schema=(
            "(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up_quants, Tensor gate_up_scales, "
            "Tensor? gate_up_zeros, float gate_up_multiplier, int gate_up_format, Tensor down_quants, "
            "Tensor down_scales, Tensor? down_zeros, float down_multiplier, int down_format, Tensor? residual=None, "
            "int activation=2, Tensor? gate_up_bias=None, Tensor? down_bias=None, bool alternating=False, "
            f"float alpha=1.702, float limit=7.0, {NORM_SCHEMA}, bool programmatic_launch=False) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
