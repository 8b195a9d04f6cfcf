"""The first product of LoRA adapters: a few rows with their matrices of low rank, side by side in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..choices import NormKind
from ..registry import OpSpec, Sample, nbytes, register, tensor_reasons
from .gemv import rows_reason
from .norm import NORM_SCHEMA, NORMS, norm_reasons, normed

#: matrices of a call, and the sum of their ranks; the same as in csrc/common/lora.h
MAX_MATRICES, MAX_RANKS = 48, 2048


def reference(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    norm: NormKind = NormKind.NONE,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    programmatic_launch: bool = False,
    chosen: torch.Tensor | None = None,
    owners: Sequence[int] = (),
) -> torch.Tensor:
    """Compute ``norm(x) @ weight.T`` in float32 for every weight, the ranks side by side.

    Args:
        x: [..., in_features] float32, float16 or bfloat16, 1 to 16 rows in all.
        weights: 1 to MAX_MATRICES of [rank, in_features] each, the ``lora_A`` weights of adapters, together at most
            MAX_RANKS rows. All have one dtype, x's or float32. Rows may be strided; the last dimension is contiguous.
        norm, norm_weight, norm_bias, norm_eps: as in ``gemv``.
        programmatic_launch: CUDA may read all but x while the kernel in front on this stream still runs; see ``gemv``.
        chosen: int32 [rows], or None: a row takes the weights of this owner alone, and has zeros for the others.
        owners: with ``chosen``, a number for each weight.

    Returns:
        float32 [..., sum of ranks], contiguous: ``lora_up`` multiplies it. The products are not rounded to x's dtype.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, or there are too many rows, weights or ranks.

    Source: peft ``tuners/lora/layer.py@0.21``, ``Linear.forward``; arXiv:2106.09685.
    """
    x = normed(x, norm, norm_weight, norm_bias, norm_eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = [torch.nn.functional.linear(x.to(wide), weight.to(wide)) for weight in weights]
    if chosen is not None:
        taken = ((chosen == owner).view(*x.shape[:-1], 1) for owner in owners)
        parts = [part.where(mask, 0) for part, mask in zip(parts, taken, strict=True)]
    return torch.cat(parts, dim=-1)


def fake(x, weights):
    ranks = sum(weight.shape[0] for weight in weights)
    return x.new_empty(*x.shape[:-1], ranks, dtype=torch.promote_types(x.dtype, torch.float32))


def matrices_reasons(x: torch.Tensor, weights: Sequence[torch.Tensor], expected: str) -> list[str]:
    """Return reasons why these are not 1 to MAX_MATRICES matrices of one dtype, x's or float32, that have elements and
    contiguous rows; ``expected`` is their shape in words."""
    if not 1 <= len(weights) <= MAX_MATRICES:
        return [f"{len(weights)} weights, expected 1 to {MAX_MATRICES}: take the others in another call"]
    reasons = []
    for place, weight in enumerate(weights):
        name = f"weights[{place}]"
        if weight.dim() != 2 or weight.numel() == 0:
            reasons.append(f"{name} has shape {tuple(weight.shape)}, expected {expected}")
        elif weight.stride(1) != 1 and weight.shape[1] > 1:
            reasons.append(f"{name} has strides {weight.stride()}: make its rows contiguous")
        if weight.dtype not in (x.dtype, torch.float32):
            reasons.append(f"{name} has dtype {weight.dtype}, expected {x.dtype} or float32: cast it")
        elif weight.dtype != weights[0].dtype:
            reasons.append(f"{name} has dtype {weight.dtype}, weights[0] {weights[0].dtype}: cast one of them")
        if weight.device != x.device:
            reasons.append(f"{name} is on {weight.device}, expected {x.device}: move it")
    return reasons


def ranks_reason(ranks: int) -> list[str]:
    """Return a reason if these are more ranks than a call takes."""
    if ranks <= MAX_RANKS:
        return []
    return [f"weights have {ranks} ranks, expected at most {MAX_RANKS}: take the others in another call"]


def owners_reasons(
    x: torch.Tensor, weights: Sequence[torch.Tensor], chosen: torch.Tensor | None, owners: Sequence[int]
) -> list[str]:
    """Return reasons why these do not say which of x's rows take which weights."""
    if chosen is None:
        return []
    reasons, rows = [], x.numel() // max(1, x.shape[-1])
    if chosen.dtype != torch.int32 or tuple(chosen.shape) != (rows,) or chosen.device != x.device:
        what = f"{chosen.dtype} {tuple(chosen.shape)} on {chosen.device}"
        reasons.append(f"chosen is {what}, expected torch.int32 ({rows},) on {x.device}")
    if len(owners) != len(weights):
        reasons.append(f"{len(owners)} owners and {len(weights)} weights, expected as many of each")
    return reasons


def why_not(x, weights, norm, norm_weight, norm_bias, chosen, owners) -> list[str]:
    reasons = tensor_reasons(x) + norm_reasons(x, norm, norm_weight, norm_bias) + rows_reason(x)
    if x.dim() < 1:
        return reasons
    expected = f"[rank, {x.shape[-1]}]"
    if refused := matrices_reasons(x, weights, expected):
        return reasons + refused
    for place, weight in enumerate(weights):
        if weight.shape[1] != x.shape[-1]:
            reasons.append(f"weights[{place}] has shape {tuple(weight.shape)}, expected {expected}")
    reasons += owners_reasons(x, weights, chosen, owners)
    return reasons + ranks_reason(sum(weight.shape[0] for weight in weights))


def moved(x, weights, norm_weight, norm_bias) -> int:
    ranks = sum(weight.shape[0] for weight in weights)
    return nbytes(x, *weights, norm_weight, norm_bias) + 4 * ranks * (x.numel() // max(1, x.shape[-1]))


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, device=device, dtype=dtype)

    def weights(k, *ranks, dtype=dtype):
        return [randn(rank, k, dtype=dtype) * k**-0.5 for rank in ranks]

    yield Sample(randn(1, 256), weights(256, 8, 16), programmatic_launch=True)
    yield Sample(randn(1, 256), weights(256, 8, 16, 8, dtype=torch.float32), programmatic_launch=True)
    yield Sample(randn(1, 111), weights(111, 3, 1, 5))
    yield Sample(randn(1, 1, 4096), weights(4096, 16, 16, 16), programmatic_launch=True)
    yield Sample(randn(1, 14336), weights(14336, 4, dtype=torch.float32))
    yield Sample(randn(3, 96), weights(96, 64))
    yield Sample(randn(16, 77), weights(77, 5, 9, dtype=torch.float32))
    # rows of owners: of one that has several rows, of one that has none, and a row of no owner
    chosen = torch.tensor([3, -1, 0, 3, 1], dtype=torch.int32, device=device)
    yield Sample(randn(5, 256), weights(256, 8, 16, 8, 4), chosen=chosen, owners=[0, 3, 2, 3], programmatic_launch=True)
    yield Sample(randn(5, 1, 91), weights(91, 5, 9, dtype=torch.float32), chosen=chosen, owners=[1, 3])
    for norm in NORMS[1:]:
        shift = randn(256) if norm == NormKind.LAYER else None
        of_norm = dict(norm=norm, norm_weight=randn(256), norm_bias=shift, norm_eps=1e-5, programmatic_launch=True)
        for rows in (1, 6):
            yield Sample(randn(rows, 256) + 1, weights(256, 8, 3), **of_norm)
            yield Sample(randn(rows, 256) + 1, weights(256, 8, dtype=torch.float32), **of_norm)
        yield Sample(randn(5, 256) + 1, weights(256, 8, 3), **of_norm, chosen=chosen, owners=[3, 0])
    yield Sample(randn(2, 2048) + 1, weights(2048, 12), norm=NormKind.LAYER, norm_eps=1e-5)
    of_norm = dict(norm=NormKind.RMS_OFFSET, norm_weight=randn(1153), norm_eps=1e-6)
    yield Sample(randn(2, 1, 1153), weights(1153, 7, 8), **of_norm)


SPEC = register(
    OpSpec(
        name="lora_down",
        schema=(
            f"(Tensor x, Tensor[] weights, {NORM_SCHEMA}, bool programmatic_launch=False, Tensor? chosen=None, "
            "int[] owners=[]) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
