"""The second product of LoRA adapters: what they add to a base product, and what follows that."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..choices import Activation
from ..registry import OpSpec, Sample, choice_reason, nbytes, register, shape_reason, tensor_reasons
from .fused_swiglu import activate
from .gemv import ACTIVATIONS, rows_reason
from .lora_down import matrices_reasons, owners_reasons, ranks_reason


def reference(
    base: torch.Tensor,
    hidden: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[float],
    firsts: Sequence[int],
    residual: torch.Tensor | None = None,
    activation: Activation = Activation.NONE,
    gated: bool = False,
    programmatic_launch: bool = False,
    chosen: torch.Tensor | None = None,
    owners: Sequence[int] = (),
) -> torch.Tensor:
    """Compute ``activation(base + scale * (hidden @ weight.T) of every weight) + residual``, in float32.

    Args:
        base: [..., features] float32, float16 or bfloat16, 1 to 16 rows in all: the product with the base weight.
        hidden: float32 [..., sum of ranks], as ``lora_down`` returns it.
        weights: 1 to MAX_MATRICES of [some features, rank] each, the ``lora_B`` weights of adapters, in the order of
            their ranks in ``hidden``. All have one dtype, base's or float32. Rows may be strided; the last dimension is
            contiguous.
        scales: what each weight's product is multiplied by.
        firsts: the first feature of base to which each weight's product is added. Several may be added to the same
            features, and features that no weight reaches stay as base has them.
        residual: like the result, or None; added after the activation, and not if ``gated``.
        activation: ``none``, ``relu``, ``silu``, ``gelu_tanh`` or ``gelu``.
        gated: features are two halves, and the result is ``activation(first half) * second half``.
        programmatic_launch: CUDA may read weights and ``chosen`` while the kernel in front on this stream still runs;
            see ``gemv``.
        chosen: int32 [rows], or None: a row takes the weights of this owner alone. What other weights and their parts
            of ``hidden`` hold does not matter to the row, not even NaN.
        owners: with ``chosen``, a number for each weight.

    Returns:
        [..., features], or half as many if ``gated``, in base's dtype, contiguous; rounded once.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, there are too many rows, weights or ranks, a weight reaches
            beyond base's features, or the activation is unknown.

    Source: peft ``tuners/lora/layer.py@0.21``, ``Linear.forward``; arXiv:2106.09685.
    """
    wide = torch.promote_types(base.dtype, torch.float32)
    total = base.to(wide, copy=True)
    parts = hidden.to(wide).split([weight.shape[1] for weight in weights], dim=-1)
    for place, (part, weight, scale, first) in enumerate(zip(parts, weights, scales, firsts, strict=True)):
        added = scale * torch.nn.functional.linear(part, weight.to(wide))
        if chosen is not None:
            added = added.where((chosen == owners[place]).view(*base.shape[:-1], 1), 0)
        total[..., first : first + weight.shape[0]] += added
    if gated:
        gate, up = total.chunk(2, dim=-1)
        total = activate(gate, activation) * up
    else:
        total = activate(total, activation)
    if residual is not None:
        total = total + residual.to(wide)
    return total.to(base.dtype).contiguous()


def fake(base, gated):
    features = base.shape[-1]
    return base.new_empty(*base.shape[:-1], features // 2 if gated else features)


def why_not(base, hidden, weights, scales, firsts, residual, activation, gated, chosen, owners) -> list[str]:
    reasons = tensor_reasons(base, residual=residual) + rows_reason(base)
    reasons += choice_reason("activation", activation, ACTIVATIONS)
    if base.dim() < 1:
        return reasons
    if hidden.dtype != torch.float32 or hidden.device != base.device:
        reasons.append(f"hidden is {hidden.dtype} on {hidden.device}, expected torch.float32 on {base.device}")
    if not len(scales) == len(firsts) == len(weights):
        reasons.append(
            f"{len(weights)} weights, {len(scales)} scales and {len(firsts)} firsts, expected as many of each"
        )
    features = base.shape[-1]
    if gated and (features % 2 or residual is not None):
        reasons.append(f"gated with {features} features takes an even number of them and no residual")
    if not gated:
        reasons += shape_reason("residual", residual, tuple(base.shape))
    if refused := matrices_reasons(base, weights, "[features, rank]"):
        return reasons + refused
    for place, (weight, first) in enumerate(zip(weights, firsts)):
        if not 0 <= first <= features - weight.shape[0]:
            reach = f"features {first} to {first + weight.shape[0]}"
            reasons.append(f"weights[{place}] reaches {reach}, expected within base's {features}")
    reasons += owners_reasons(base, weights, chosen, owners)
    ranks = sum(weight.shape[1] for weight in weights)
    return reasons + ranks_reason(ranks) + shape_reason("hidden", hidden, (*base.shape[:-1], ranks))


def moved(base, hidden, weights, residual, gated) -> int:
    return nbytes(base, hidden, *weights, residual) + nbytes(base) // (2 if gated else 1)


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, device=device, dtype=dtype)

    def call(rows, features, matrices, weight_dtype=dtype, residual=False, owners=None, **options):
        """Make a call of ``matrices``: the rank, first feature and number of features of each."""
        hidden = torch.randn(*rows, sum(rank for rank, _, _ in matrices), device=device)
        weights = [randn(count, rank, dtype=weight_dtype) * rank**-0.5 for rank, _, count in matrices]
        scales = [2.0 / (place + 1) for place in range(len(matrices))]
        firsts = [first for _, first, _ in matrices]
        added = randn(*rows, features) if residual else None
        if owners is not None:
            count = torch.Size(rows).numel()
            chosen = torch.arange(-1, count - 1, dtype=torch.int32, device=device) % 4 - 1  # -1: no weight at all
            options |= dict(chosen=chosen, owners=owners)
        return Sample(randn(*rows, features), hidden, weights, scales, firsts, added, **options)

    yield call((1,), 256, [(8, 0, 128), (16, 128, 64)], residual=True, programmatic_launch=True)
    yield call((1,), 256, [(8, 0, 256)], torch.float32, programmatic_launch=True)
    yield call((1, 1), 300, [(16, 0, 300), (8, 0, 300)], residual=True)  # two adapters
    yield call((1,), 111, [(3, 0, 37), (5, 30, 81), (1, 0, 111)])
    yield call((1, 1), 4096, [(64, 0, 4096)], torch.float32, residual=True, programmatic_launch=True)
    yield call((3,), 96, [(64, 0, 96)])
    yield call((2, 8), 77, [(5, 7, 70), (9, 0, 3)], torch.float32, residual=True)
    for activation in ACTIVATIONS:
        yield call((5,), 48, [(8, 0, 48)], activation=activation, residual=True)
        yield call((2,), 96, [(8, 0, 48), (8, 48, 48)], torch.float32, activation=activation, gated=True)
    yield call((1,), 512, [(16, 0, 256), (16, 256, 256)], activation="silu", gated=True, programmatic_launch=True)
    yield call((7,), 90, [(4, 45, 45)], activation="gelu", gated=True)  # the second half alone
    yield call((4,), 40, [(32, 0, 40)] * 16)
    yield call((1,), 24, [(2048, 0, 24)])
    yield call((6,), 96, [(8, 0, 96), (16, 0, 48), (3, 0, 96), (8, 48, 48)], residual=True, owners=[0, 1, 2, 1])
    yield call((3, 1), 64, [(16, 0, 32), (8, 32, 32)], activation="silu", gated=True, owners=[0, 1])
    yield call((1,), 40, [(8, 0, 40), (8, 0, 40)], torch.float32, owners=[-1, 0])


SPEC = register(
    OpSpec(
        name="lora_up",
        schema=(
            "(Tensor base, Tensor hidden, Tensor[] weights, float[] scales, int[] firsts, Tensor? residual=None, "
            "int activation=0, bool gated=False, bool programmatic_launch=False, Tensor? chosen=None, "
            "int[] owners=[]) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
