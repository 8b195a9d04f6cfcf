"""Pass: what a sigmoid lets through, as of attention's output."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...decode.named_calls import Call, Register
from ...registry import FLOAT_DTYPES
from .. import marks
from ..recording import Recording
from .views import RESHAPES

_aten = torch.ops.aten


def output_gates(recording: Recording, model: nn.Module) -> None:
    """Pass: make ``x * sigmoid(gate)`` one call, which takes a gate where it lies: beside its head's queries, say."""
    producers, users = recording.producers(), recording.users()
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not _aten.mul.Tensor:
            continue
        for one, other in (("self", "other"), ("other", "self")):
            shut, x = producers.get(getattr(call.arguments[one], "index", -1)), call.arguments[other]
            if shut is None or shut.op is not _aten.sigmoid.default or len(users[shut.out.index]) != 1:
                continue
            gate = shut.arguments["self"]
            if not _fit(recording, call.out, x, gate) or gate.index in recording.mutated:
                continue
            instead |= {id(shut): [], id(call): _gated(recording, producers, x, gate, call.out)}
            break
    recording.rewrite(instead, {})


def _fit(recording: Recording, *registers: Any) -> bool:
    """Whether all are registers of one shape and dtype that the op takes."""
    facts = [recording.fact(each) for each in registers if isinstance(each, Register)]
    kinds = {(each.shape, each.dtype) for each in facts}
    return len(facts) == len(registers) and len(kinds) == 1 and facts[0].dtype in FLOAT_DTYPES


def _gated(recording: Recording, producers: dict[int, Call], x: Register, gate: Register, out: Register) -> list[Call]:
    """Return the calls that give ``out``, without a copy of a gate that was made contiguous."""
    copied = producers.get(gate.index)
    apart = copied.arguments["self"] if copied is not None and copied.op in RESHAPES else None
    if not isinstance(apart, Register) or apart.index in recording.mutated or recording.fact(apart).is_contiguous():
        return [Call(marks.sigmoid_gated, {"x": x, "gate": gate}, out)]
    fact = recording.fact(out)
    like = fact.new_empty(recording.fact(apart).shape)
    seen = recording.call(_aten.view.default, like, self=x, size=list(like.shape))
    gated = recording.call(marks.sigmoid_gated, like, x=seen.out, gate=apart)
    return [seen, gated, Call(_aten.view.default, {"self": gated.out, "size": list(fact.shape)}, out)]
