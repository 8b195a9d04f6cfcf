"""Products of the same few rows with several weights, in one pass over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..choices import NormKind
from ..registry import OpSpec, Sample, nbytes, register, tensor_reasons
from .gemv import MAX_WGMMA_ROWS, most_rows, rows_reason, weight_reason
from .norm import NORM_SCHEMA, NORMS, norm_reasons, normed

#: weights of a call; the same as kMaxGemvSegments in csrc/gemv/gemv.h
MAX_WEIGHTS = 4


def reference(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    norm: NormKind = NormKind.NONE,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    programmatic_launch: bool = False,
) -> torch.Tensor:
    """Compute ``norm(x) @ weight.T`` for every weight, the features side by side.

    Args:
        x: [..., in_features], at most 16 rows in all, or 64 as in ``gemv``.
        weights: 1 to MAX_WEIGHTS of [out_features, in_features] each, the weights of a model's ``nn.Linear`` modules.
        norm, norm_weight, norm_bias, norm_eps, programmatic_launch: as in ``gemv``.

    Returns:
        [..., out_features of all weights] in x's dtype, contiguous; accumulated in float32 and rounded once.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, or there are too many rows or weights.

    Source: transformers ``models/qwen3_5/modeling_qwen3_5.py@5.17``, projections of ``Qwen3_5GatedDeltaNet``.
    """
    x = normed(x, norm, norm_weight, norm_bias, norm_eps)
    return torch.cat([torch.nn.functional.linear(x, weight) for weight in weights], dim=-1)


def fake(x, weights):
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


def why_not(x, weights, norm, norm_weight, norm_bias) -> list[str]:
    if not 1 <= len(weights) <= MAX_WEIGHTS:
        return [f"{len(weights)} weights, expected 1 to {MAX_WEIGHTS}: take the others in another call"]
    named = {f"weights[{place}]": weight for place, weight in enumerate(weights)}
    reasons = tensor_reasons(x, **named) + norm_reasons(x, norm, norm_weight, norm_bias)
    for name, weight in named.items():
        reasons += weight_reason(name, x, weight)
    return reasons + rows_reason(x, most_rows(*weights))


def moved(x, weights, norm_weight, norm_bias) -> int:
    return nbytes(x, *weights, norm_weight, norm_bias) + nbytes(fake(x, weights))


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def weights(k, *features):
        return [randn(n, k) * k**-0.5 for n in features]

    for rows, k, features in (
        (1, 111, (37, 5, 18)),
        (1, 256, (320, 64, 1)),
        (2, 64, (65, 3)),
        (7, 100, (48,)),
        (3, 128, (24, 5, 40, 8)),
        (16, 96, (1, 2, 257)),
    ):
        yield Sample(randn(1, rows, k), weights(k, *features))
    for norm in NORMS[1:]:
        shift = randn(256) if norm == NormKind.LAYER else None
        for rows in (1, 3):
            of_norm = dict(norm=norm, norm_weight=randn(256), norm_bias=shift, norm_eps=1e-5)
            yield Sample(randn(rows, 256), weights(256, 128, 8, 24), **of_norm, programmatic_launch=True)
    of_norm = dict(norm=NormKind.RMS_OFFSET, norm_weight=randn(2048), norm_eps=1e-6, programmatic_launch=True)
    yield Sample(randn(1, 1, 2048), weights(2048, 96, 32, 32), **of_norm)
    yield Sample(randn(1, 1, 2048), weights(2048, 192, 64, 32, 32), **of_norm)
    yield Sample(randn(9, 2048), weights(2048, 33, 8), **of_norm)
    many = weights(256, 48, 16)
    if most_rows(*many) == MAX_WGMMA_ROWS:
        yield Sample(randn(17, 256), many)
        yield Sample(randn(33, 256), weights(256, 48, 16, 72, 8))


SPEC = register(
    OpSpec(
        name="joined_gemv",
        schema=f"(Tensor x, Tensor[] weights, {NORM_SCHEMA}, bool programmatic_launch=False) -> Tensor",
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
