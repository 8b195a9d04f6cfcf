"""Pass: experts that are all given every row, times a share that is zero for most of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...choices import Activation
from ...decode.calls.named_calls import Call, Register
from ...ops.fused_experts import MAX_TOP_K
from ...ops.fused_swiglu import GATES
from ...registry import FLOAT_DTYPES, PLAIN_TENSORS
from .. import marks
from ..probing import MISFITS, agree, evaluate, seeded
from ..recorded_step import Recording, read_by

_aten = torch.ops.aten


def scaled_experts(recording: Recording, model: nn.Module) -> None:
    """Pass: let ``ops.fused_experts`` run the chosen experts alone, where all are given rows times shares, and those
    that are not chosen a share of zero: these experts give zero."""
    producers, users = recording.producers(), recording.users()
    instead: dict[int, list[Call]] = {}
    for down in recording.calls:
        if not _is_of_stack(recording, down):
            continue
        inner = _between(recording, producers, down.arguments["self"])
        first = next((call for call in inner if _is_of_stack(recording, call)), None)
        if first is None or (activation := _activation(recording, first, inner[1:], down.arguments["self"])) is None:
            continue
        front, total = _front(recording, producers, first), _total(recording, users, down)
        if front is None or total is None:
            continue
        x, logits, top_k = front
        stacks = dict(gate_up_weight=first.arguments["mat2"], down_weight=down.arguments["mat2"])
        chosen = dict(x=x, logits=logits, top_k=top_k, activation=activation)
        made = recording.call(marks.scaled_experts, recording.fact(x), **chosen, **stacks)
        rows = {"self": made.out, "size": list(recording.fact(total.out).shape)}
        instead[id(total)] = [made, Call(_aten.view.default, rows, total.out)]
    recording.rewrite(instead, {})


def _is_of_stack(recording: Recording, call: Call) -> bool:
    """Whether a call multiplies rows of each expert, [num_experts, rows, features], by a matrix of the expert."""
    stack: Any = call.arguments.get("mat2")
    if call.op is not _aten.bmm.default or not isinstance(call.arguments["self"], Register):
        return False
    return type(stack) in PLAIN_TENSORS and not stack.is_meta and stack.dtype in FLOAT_DTYPES and stack.stride(-1) == 1


def _between(recording: Recording, producers: dict[int, Call], register: Register) -> list[Call]:
    """Return the calls, in order, that make a register out of what marks and calls with weights give, and the last
    product with a stack; none if memory is written to."""
    found: dict[int, Call] = {}
    waiting = [register]
    while waiting:
        each = waiting.pop()
        call = producers.get(each.index)
        if call is None or each.index in recording.mutated or len(found) > 40:
            return []
        if each.index in found or (marks.is_mark(call.op) and call.op is not marks.activated):
            continue
        if _is_of_stack(recording, call):
            found[each.index] = call
        elif not any(isinstance(value, torch.Tensor) for value in call.arguments.values()):
            found[each.index] = call
            waiting += read_by(call)
    return [call for call in recording.calls if call.out.index in found]


def _activation(recording: Recording, first: Call, inner: list[Call], hidden: Register) -> Activation | None:
    """Return the activation with which calls make ``activation(gate) * up`` of ``gate | up``, or None."""
    with seeded():
        both = torch.randn(recording.fact(first.out).shape, dtype=torch.float64)
    try:
        made = evaluate(inner, {first.out.index: both})[hidden.index]
    except MISFITS:
        return None
    gate, up = both.chunk(2, dim=-1)
    fits = (each for each in GATES if agree(made, marks.activated(gate, each) * up))
    return next(fits, None)


def _front(recording: Recording, producers: dict[int, Call], first: Call) -> tuple[Register, Register, int] | None:
    """Return rows, logits and the number of chosen experts if each expert is given the rows times the sigmoid of its
    logit, or times zero if it is not chosen; else None."""
    given = first.arguments["self"]
    calls = _between(recording, producers, given)
    experts, count, features = recording.fact(given).shape
    inside = {call.out.index for call in calls}
    sources = {each.index: each for call in calls for each in read_by(call) if each.index not in inside}
    choices = [call for call in calls if call.op is _aten.topk.default]
    sizes = {recording.fact(each).numel(): each for each in sources.values()}
    if len(sources) != 2 or len(choices) != 1 or sizes.keys() != {count * features, count * experts}:
        return None
    x, logits, top_k = sizes[count * features], sizes[count * experts], choices[0].arguments["k"]
    if top_k > MAX_TOP_K or recording.fact(x).dtype != first.arguments["mat2"].dtype:
        return None
    with seeded():
        rows, scores = (torch.randn(recording.fact(each).shape, dtype=torch.float64) for each in (x, logits))
    try:
        made = evaluate(calls, {x.index: rows, logits.index: scores})[given.index]
    except MISFITS:
        return None
    scores = scores.reshape(count, experts)
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(top_k).indices, 1)
    expected = (chosen * scores.sigmoid()).t()[..., None] * rows.reshape(count, features)
    return (x, logits, top_k) if agree(made, expected) else None


def _total(recording: Recording, users: dict[int, list[Any]], down: Call) -> Call | None:
    """Return the call that adds what all experts give, or None."""
    calls: list[Call] = []
    last = down
    while last.op is not _aten.sum.dim_IntList:
        readers = users.get(last.out.index, [])
        if len(readers) != 1 or readers[0] is None or len(read_by(readers[0])) != 1 or len(calls) > 4:
            return None
        (last,) = readers
        calls.append(last)
    with seeded():
        given = torch.randn(recording.fact(down.out).shape, dtype=torch.float64)
    try:
        made = evaluate(calls, {down.out.index: given})[last.out.index]
    except MISFITS:
        return None
    return last if agree(made, given.sum(0)) else None
