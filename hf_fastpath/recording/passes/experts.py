"""Pass: what a router computes of its scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...decode.named_calls import Call, Register
from ...ops.fused_experts import MAX_TOP_K
from ...ops.topk_softmax import MAX_EXPERTS
from ...ops.topk_softmax import reference as topk_softmax
from ...registry import FLOAT_DTYPES
from .. import marks
from ..probing import MISFITS, agree, evaluate
from ..recording import Recording, read_by
from .attention import structure_of

#: rows of scores that are compared
_ROWS = 64


def routers(recording: Recording, model: nn.Module) -> None:
    """Pass: let ``ops.topk_softmax`` choose experts whose ids and weights are what the op gives of scores."""
    producers = recording.producers()
    known: dict[Any, bool | None] = {}
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not marks.experts:
            continue
        ids, weights = call.arguments["ids"], call.arguments["weights"]
        front = _front(recording, producers, (ids, weights), len(call.arguments["gate_up_weight"]))
        if front is None:
            continue
        logits, calls = front
        places = {each.out.index: place for place, each in enumerate(calls)}
        key = structure_of(recording, [logits], [], calls), places.get(ids.index), places.get(weights.index)
        if key not in known:
            known[key] = _normalized(recording, logits, calls, ids, weights)
        if (normalized := known[key]) is None:
            continue
        others = {name: value for name, value in call.arguments.items() if name not in ("ids", "weights")}
        routed = dict(
            logits=logits,
            top_k=recording.fact(ids).shape[-1],
            normalized=normalized,
            rounded=recording.fact(weights).dtype == recording.fact(logits).dtype,
        )
        instead[id(call)] = [Call(marks.routed_experts, others | routed, call.out)]
    recording.rewrite(instead, {})


def _front(
    recording: Recording, producers: dict[int, Call], wanted: tuple[Any, Any], num_experts: int
) -> tuple[Register, list[Call]] | None:
    """Return the scores that ids and weights of experts are made of, and the calls between; None if there is more."""
    found: set[int] = set()
    scores: dict[int, Register] = {}

    def visit(register: Any) -> bool:
        call = producers.get(getattr(register, "index", -1))
        if call is None or register.index in recording.mutated:
            return False
        if register.index in found or register.index in scores:
            return True
        if marks.is_mark(call.op):
            scores[register.index] = register
            return True
        if any(isinstance(each, torch.Tensor) and each.numel() > 1 for each in call.arguments.values()):
            return False  # a tensor may be the model's own, and change
        found.add(register.index)
        read = read_by(call)
        return bool(read) and all(map(visit, read))

    if not all(map(visit, wanted)) or len(scores) != 1:
        return None
    (logits,) = scores.values()
    fact, ids = recording.fact(logits), recording.fact(wanted[0])
    fits = fact.shape[-1] == num_experts <= MAX_EXPERTS and fact.dtype in FLOAT_DTYPES and ids.shape[-1] <= MAX_TOP_K
    calls = [call for call in recording.calls if call.out.index in found]
    return (logits, calls) if fits and fact.numel() == num_experts * len(ids) else None


def _normalized(
    recording: Recording, logits: Register, calls: list[Call], ids: Register, weights: Register
) -> bool | None:
    """Whether the weights are divided by their sum; None if they are not what ``ops.topk_softmax`` gives."""
    fact = recording.fact(logits)
    agreed = {True, False}
    generator = torch.Generator().manual_seed(0)
    for _ in range(-(-_ROWS // len(recording.fact(ids)))):
        scores = torch.randn(fact.shape, dtype=torch.float64, generator=generator)
        try:
            values = evaluate(calls, {logits.index: scores})
        except MISFITS:
            return None
        chosen = values[ids.index].sort(-1)
        of_chosen = values[weights.index].gather(-1, chosen.indices)
        for normalized in tuple(agreed):
            expected = torch.empty_like(values[ids.index], dtype=torch.int64)
            shares = topk_softmax(scores.flatten(0, -2), expected, normalized)
            order = expected.sort(-1)
            same = torch.equal(order.values, chosen.values.long())
            if not same or not agree(of_chosen, shares.gather(-1, order.indices)):
                agreed.discard(normalized)
    return next(iter(agreed)) if len(agreed) == 1 else None
