"""Pass: norms of queries and keys in front of rotation."""

from __future__ import annotations

import torch
from torch import nn

from ...decode.calls.named_calls import Call, HeadNorms, Register
from ...registry import PLAIN_TENSORS
from .. import marks
from ..recorded_step import Recording, read_by

_aten = torch.ops.aten


def head_norms(recording: Recording, model: nn.Module) -> None:
    """Pass: let the rotation do norms of queries and keys, of projections or of heads that lie anywhere."""
    producers = recording.producers()
    for call in recording.calls:
        if call.op is not marks.rotated_attention or len(call.arguments["sources"]) != 3:
            continue
        q, k, v = call.arguments["sources"]
        normed = [producers[each.index] for each in (q, k)]
        found = [_normed_by(recording, producers, each) for each in normed]
        if None in found:
            continue
        norms = [each.arguments["norm"] for each in normed]
        sizes = tuple(norm.weight.numel() for norm in norms)
        head_dim = call.arguments["head_dim"]
        of_all = tuple(call.arguments[name] * head_dim for name in ("num_heads", "num_kv_heads"))
        offsets = {_weight_offset(each) for each in normed}
        if sizes not in ((head_dim, head_dim), of_all) or len({norm.eps for norm in norms}) > 1 or len(offsets) > 1:
            continue
        q_weight, k_weight = (norm.weight for norm in norms)
        made = HeadNorms(q_weight, k_weight, norms[0].eps, offsets.pop())
        call.arguments = call.arguments | {"sources": [*found, v], "head_norms": made}


def _weight_offset(normed: Call) -> float:
    return 1.0 if normed.arguments.get("unit_offset") else normed.arguments["norm"].kind.weight_offset


def _normed_by(recording: Recording, producers: dict[int, Call], normed: Call) -> Register | None:
    """Return what an RMS norm with a weight is of: a projection, or heads of tokens; None if it is neither."""
    if normed.op is not marks.normed or normed.arguments.get("residual") is not None:
        return None
    norm, register = normed.arguments["norm"], normed.arguments["x"]
    dtype = recording.fact(normed.out).dtype
    if not norm.kind.is_rms or type(norm.weight) not in PLAIN_TENSORS or norm.weight.dtype != dtype:
        return None
    views = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}
    if recording.query_len == 1:
        views.add(_aten.transpose.int)  # a transpose moves no elements of one token
    projection, call = register, producers.get(register.index)
    while call is not None and call.op in views:
        projection = read_by(call)[0]
        call = producers.get(projection.index)
    size = recording.fact(normed.out).numel()
    if call is not None and call.op is marks.linear and recording.fact(projection).numel() == size:
        register = projection
    elif recording.fact(register).shape[:2] != (recording.batch, recording.query_len):
        return None
    return None if register.index in recording.mutated else register
