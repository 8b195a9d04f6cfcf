"""Passes: what stands beside a norm and is part of the norm's kernel, apart from a residual of its dtype."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn

from ...choices import NormKind
from ...decode.calls.named_calls import Call, Register
from ...registry import FLOAT_DTYPES
from .. import marks
from ..recorded_step import Recording

_aten = torch.ops.aten


def float32_residuals(recording: Recording, model: nn.Module) -> None:
    """Pass: make one call of a sum in float32, as Mamba keeps its residual stream, and the norm of the rounded sum."""
    users = recording.users()
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not _aten.add.Tensor or call.arguments.get("alpha", 1) != 1:
            continue
        given = call.arguments["self"], call.arguments["other"]
        if not all(isinstance(each, Register) for each in given) or call.out.index in recording.mutated:
            continue
        x, residual = sorted(given, key=lambda each: recording.fact(each).dtype.itemsize)
        narrow, wide = recording.fact(x), recording.fact(residual)
        if narrow.dtype not in FLOAT_DTYPES or narrow.dtype == wide.dtype or wide.dtype != torch.float32:
            continue
        if narrow.shape != wide.shape or residual.index in recording.mutated:
            continue
        rounded = [each for each in users.get(call.out.index, []) if _rounds(each, narrow.dtype)]
        normed = users.get(rounded[0].out.index, []) if len(rounded) == 1 else []
        if len(normed) != 1 or not _takes_sum(normed[0], narrow.dtype):
            continue
        both = recording.call(marks.add_normed, narrow, x=x, residual=residual, norm=normed[0].arguments["norm"])
        parts = [Call(operator.getitem, {"a": both.out, "b": 0}, normed[0].out)]
        parts.append(Call(operator.getitem, {"a": both.out, "b": 1}, call.out))
        instead |= {id(call): [both, *parts], id(rounded[0]): [], id(normed[0]): []}
    recording.rewrite(instead, {})


def _rounds(call: Any, dtype: torch.dtype) -> bool:
    return call is not None and call.op is _aten._to_copy.default and call.arguments.get("dtype") == dtype


def _takes_sum(call: Any, dtype: torch.dtype) -> bool:
    """Whether a call is a norm that ``ops.add_rms_norm`` computes."""
    if call is None or call.op is not marks.normed or call.arguments.get("unit_offset"):
        return False
    norm = call.arguments["norm"]
    if call.arguments.get("residual") is not None or norm.kind != NormKind.RMS:
        return False
    return isinstance(norm.weight, torch.Tensor) and norm.weight.dtype == dtype


def norm_factors(recording: Recording, model: nn.Module) -> None:
    """Pass: let norms multiply what they give, with what they add to it, by one number that the model has learned."""
    instead: dict[int, list[Call]] = {}
    for call, normed, factor in recording.lone_factors():
        if normed.op is not marks.normed or not isinstance(factor, torch.Tensor) or factor.numel() != 1:
            continue
        if normed.arguments["norm"].kind == NormKind.LAYER or normed.arguments.get("factor") is not None:
            continue
        like = recording.fact(normed.out)
        if recording.fact(call.out).shape != like.shape or (factor.dtype, factor.device) != (like.dtype, like.device):
            continue
        made = Call(marks.normed, normed.arguments | {"factor": factor}, call.out)
        instead |= {id(normed): [], id(call): [made]}
    recording.rewrite(instead, {})
