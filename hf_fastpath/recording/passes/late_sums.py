"""Pass: sums over ranks where there is least to sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...decode.calls.named_calls import Call, Register
from ...decode.ranks.rank_calls import summed
from ..recorded_step import Recording, read_by
from .views import RESHAPES

_aten = torch.ops.aten

#: calls on one tensor that give the same before a sum over ranks as behind it
_LINEAR = (*RESHAPES, _aten.sum.dim_IntList)


def late_sums(recording: Recording, model: nn.Module) -> None:
    """Pass: sum over ranks behind views and sums of features, and once what is added to each other."""
    while any(call.op is summed for call in recording.calls) and (instead := _later(recording)):
        recording.rewrite(instead, {})


def _later(recording: Recording) -> dict[int, list[Call]]:
    """Return the calls that take the place of sums and of the calls that read these, by the id of what they replace."""
    producers, users = recording.producers(), recording.users()
    instead: dict[int, list[Call]] = {}

    def alone(register: Any) -> Call | None:
        """Return the sum over ranks that gives ``register`` if one call reads the sum; else None."""
        call = producers.get(getattr(register, "index", -1))
        if call is None or call.op is not summed or call.arguments["residual"] is not None:
            return None
        is_plain = len(users[register.index]) == 1 and call.arguments["x"].index not in recording.mutated
        return call if is_plain else None

    for call in recording.calls:
        if call.op in _LINEAR and len(read_by(call)) == 1:
            names = ["self"]
        elif call.op is _aten.add.Tensor and call.arguments.get("alpha", 1) == 1 and _are_alike(recording, call):
            names = ["self", "other"]
        else:
            continue
        sums = [each for name in names if (each := alone(call.arguments[name])) is not None]
        if len(sums) < len(names) or call.out.index in recording.mutated:
            continue
        if not _are_rows(recording, call.out, sums[0]):
            continue
        given = {name: each.arguments["x"] for name, each in zip(names, sums)}
        made = recording.call(call.op, recording.fact(call.out), **call.arguments | given)
        instead |= {id(each): [] for each in sums}
        instead[id(call)] = [made, Call(summed, sums[0].arguments | {"x": made.out}, call.out)]
    return instead


def _are_rows(recording: Recording, out: Register, of: Call) -> bool:
    """Whether a call gives rows of the features, and the dtype, that a sum over ranks has."""
    made, fact = recording.fact(out), recording.fact(of.out)
    return made.shape[-1:] == fact.shape[-1:] and made.dtype == fact.dtype


def _are_alike(recording: Recording, call: Call) -> bool:
    """Whether an addition is of two tensors of one shape and dtype."""
    given = call.arguments["self"], call.arguments["other"]
    if not all(isinstance(each, Register) for each in given):
        return False
    one, other = map(recording.fact, given)
    return one.shape == other.shape and one.dtype == other.dtype
