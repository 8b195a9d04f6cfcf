"""Pass: what a model adds to scores by how far a key is behind the query (T5's relative positions)."""

from __future__ import annotations

import torch
from torch import nn

from ...decode.calls.named_calls import Call, Register
from .. import marks
from ..probing import MISFITS, evaluate, seeded
from ..recorded_step import BiasTable, Recording, Unrecordable, read_by


def position_biases(recording: Recording, model: nn.Module) -> None:
    """Pass: keep what makes a bias of scores as a table over distances, which is filled when a plan begins.

    Raises:
        Unrecordable: the bias depends on more than distances, or on any distance that there may be.
    """
    known: dict[int, Register] = {}
    for attend in recording.calls:
        bias = attend.arguments.get("bias") if attend.op is marks.attend else None
        if bias is None:
            continue
        if bias.index not in known:
            table = _table(recording, bias)
            recording.values.append(table)
            known[bias.index] = table.register
        attend.arguments = attend.arguments | {"bias": known[bias.index]}


def _table(recording: Recording, bias: Register) -> BiasTable:
    producers, wanted, waiting = recording.producers(), {}, [bias]
    while waiting:
        register = waiting.pop()
        call = producers.get(register.index)
        if call is None:
            raise Unrecordable("a bias of scores that depends on more than positions")
        if call.out.index not in wanted:
            wanted[call.out.index] = call
            waiting += read_by(call)
    calls = [Call(call.op, dict(call.arguments), call.out) for call in recording.calls if call.out.index in wanted]
    held = [each for call in calls for each in call.arguments.values() if isinstance(each, torch.Tensor)]
    held = [each for each in held if each.is_floating_point()]
    try:
        with seeded():  # whatever the weights hold now, no two of their rows are to be alike
            weights = {id(each): torch.randn(each.shape, dtype=torch.float64) for each in held}
        scores = evaluate(calls, {}, weights)[bias.index]
    except MISFITS as error:
        raise Unrecordable(f"a bias of scores that cannot be computed alone, {type(error).__name__}: {error}") from None
    if scores.dim() != 4 or scores.shape[2] != 1 or scores.shape[3] != recording.past + 1:
        raise Unrecordable(f"a bias of scores of shape {tuple(scores.shape)}")
    if not bool((scores == scores[:1]).all()):
        raise Unrecordable("a bias of scores that differs from sequence to sequence")
    by_distance = scores[0, :, 0].flip(-1)
    differs = (by_distance != by_distance[:, -1:]).any(0).nonzero()
    size = int(differs[-1]) + 2 if len(differs) else 1
    if 2 * size > recording.past:
        raise Unrecordable("a bias of scores that differs at any distance")
    like = recording.fact(bias).new_empty(by_distance.shape[0], size, dtype=torch.float32)
    return BiasTable(recording.register(like), calls, bias, (by_distance.shape[0], size))
