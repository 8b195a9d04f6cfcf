"""Pass: writes at places that a mask tells, as PyTorch's choice between two tensors.

PyTorch finds such places on the host, which a graph cannot hold: T5Gemma 2 puts a vector in the place of one token's.
"""

from __future__ import annotations

import torch
from torch import nn

from ...decode.calls.named_calls import Call, Register
from ..recorded_step import Recording

_aten = torch.ops.aten


def masked_writes(recording: Recording, model: nn.Module) -> None:
    """Pass: ``x[mask] = value``, with the same value in every place, is ``where(mask, value, x)``."""
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not _aten.index_put.default or call.arguments.get("accumulate"):
            continue
        given, values = call.arguments["self"], call.arguments["values"]
        (mask, *others) = call.arguments["indices"]
        if others or not isinstance(mask, Register) or recording.fact(mask).dtype is not torch.bool:
            continue
        of_mask, x, value = map(recording.fact, (mask, given, values))
        inside = x.dim() - of_mask.dim()
        if value.dim() > inside or value.dtype != x.dtype:
            continue
        if value.device != x.device:  # a number of the host's
            if isinstance(values, Register):
                continue
            values = values.to(x.device)
        sizes = [*of_mask.shape, *[1] * inside]
        wide = recording.call(_aten.view.default, of_mask.reshape(sizes), self=mask, size=sizes)
        chosen = Call(_aten.where.self, dict(condition=wide.out, self=values, other=given), call.out)
        instead[id(call)] = [wide, chosen]
    recording.rewrite(instead, {})
