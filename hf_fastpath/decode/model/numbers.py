"""Numbers that modules and configs hold, and why a step cannot hold one of them: it is none, or the kernels take it for
something else."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from ...reasons import Cause
from .modules import found_at


def number_reason(module: nn.Module | None, path: str | None) -> str | None:
    """Return why a step cannot hold what is at ``path`` inside ``module``, which models compute with whatever it is
    (None raises there, and a tensor may change in place); None if it is a finite number, or without a path."""
    if path is None:
        return None
    found = found_at(module, path)
    is_number = type(found) in (int, float) and math.isfinite(found)
    return None if is_number else Cause("unsupported_config", f"{path}={found!r}", module)


def positive_reason(module: nn.Module, path: str | None) -> str | None:
    """Do as :func:`number_reason` for a number that has to be above 0: PyTorch's attention multiplies its mask by the
    factor on scores, and makes NaN of 0."""
    reason = number_reason(module, path)
    if reason is not None or path is None or found_at(module, path) > 0:
        return reason
    return Cause("unsupported_config", f"{path}={found_at(module, path)!r}", module)


def softcap_reason(module: nn.Module, path: str | None) -> str | None:
    """Do as :func:`positive_reason` for a soft-cap: with None a model does not cap, with 0 it caps to 0, or to NaN."""
    return None if path is None or found_at(module, path) is None else positive_reason(module, path)


def reason_of_model(part: Any) -> str | None:
    """Return why a step cannot hold the numbers that a described model, a ``ModelInRoles``, has beside its layers; or
    None."""
    spec, offset = part.architecture, part.architecture.position_offset
    reasons = [number_reason(part.decoder, spec.embedding_multiplier)]
    reasons += [number_reason(part.module, path) for path in (spec.logits_multiplier, spec.logits_divisor)]
    reasons.append(softcap_reason(part.module, spec.logits_softcap))
    of_angles = () if part.rotary is None else vars(part.rotary)
    reasons += [number_reason(part.rotary, name) for name in of_angles if name.endswith("attention_scaling")]
    if offset is not None and type(found := found_at(part.position_embedding, offset)) is not int:
        reasons.append(Cause("unsupported_config", f"{offset}={found!r}", part.position_embedding))
    return next(filter(None, reasons), None)
