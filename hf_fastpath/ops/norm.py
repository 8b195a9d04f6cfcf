"""The norm that the gemv ops can apply to their input."""

from __future__ import annotations

import torch

from ..choices import NormKind
from ..registry import choice_reason, shape_reason, tensor_reasons
from .layer_norm import reference as layer_norm
from .rms_norm import reference as rms_norm

NORMS = tuple(NormKind)
RMS_NORMS = tuple(norm for norm in NORMS if norm.is_rms)
#: the last arguments in the schema of every op with a norm in front
NORM_SCHEMA = "int norm=0, Tensor? norm_weight=None, Tensor? norm_bias=None, float norm_eps=0.0"


def normed(
    x: torch.Tensor, norm: NormKind, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Apply the norm of kind ``norm`` to ``x``."""
    norm = NormKind(norm)
    if norm.is_rms and weight is not None:
        return rms_norm(x, weight, eps, weight_offset=norm.weight_offset)
    return layer_norm(x, weight, bias, eps) if norm == NormKind.LAYER else x


def norm_reasons(x: torch.Tensor, norm: NormKind, weight: torch.Tensor | None, bias: torch.Tensor | None) -> list[str]:
    """Return reasons why the norm's arguments do not fit ``x``."""
    features = tuple(x.shape[-1:])
    reasons = choice_reason("norm", norm, NORMS) + tensor_reasons(x, norm_weight=weight, norm_bias=bias)
    reasons += shape_reason("norm_weight", weight, features) + shape_reason("norm_bias", bias, features)
    if norm == NormKind.NONE and (weight is not None or bias is not None):
        reasons.append("norm_weight and norm_bias are given but norm is 'none': name the norm")
    if norm in RMS_NORMS and (weight is None or bias is not None):
        reasons.append(f"norm {NormKind(norm).label!r} takes norm_weight and no norm_bias")
    return reasons
