"""Passes: the experts of a mixture, and what a router computes of its scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ... import compat
from ...choices import Activation
from ...decode.named_calls import Call, Register
from ...ops.fused_experts import EXPERT_GATES, MAX_TOP_K, UNGATED
from ...ops.fused_experts import reference as fused_experts
from ...ops.topk_softmax import MAX_EXPERTS
from ...ops.topk_softmax import reference as topk_softmax
from ...registry import FLOAT_DTYPES, PLAIN_TENSORS
from .. import marks
from ..probing import MISFITS, agree, evaluate, seeded
from ..recording import Recording, between_marks, read_by
from .attention import structure_of
from .products import is_bare

_aten = torch.ops.aten

#: rows of scores that are compared
_ROWS = 64
#: experts, features and inner features of the experts that are compared
_EXPERTS, _FEATURES, _WIDTH = 3, 4, 6
#: sizes of the numbers that these are given: one at which activations bend, one that limits cut
_SCALES = (1.0, 30.0)
#: relative difference of two results of one formula: some gates compute in float32, whatever they are given
_TOLERANCE = 1e-6


def stacked_experts(recording: Recording, model: nn.Module) -> None:
    """Pass: let ``ops.fused_experts`` run the experts of a module that computes what the op does."""
    known: dict[Any, dict[str, Any] | None] = {}
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not marks.other_experts:
            continue
        module, dtype = call.arguments["module"], recording.fact(call.arguments["x"]).dtype
        stacks = compat.expert_stacks(module)
        if stacks is None or not all(_is_stack(each, dtype) for each in stacks.tensors.values()):
            continue
        if (key := _described(module)) not in known:
            known[key] = next(_formulas(module, stacks), None)
        if (layout := known[key]) is not None:
            others = {name: value for name, value in call.arguments.items() if name != "module"}
            weights = {role: stacks.tensors[name] for role, name in stacks.roles.items()}
            instead[id(call)] = [Call(marks.experts, others | weights | layout, call.out)]
    recording.rewrite(instead, {})


def _is_stack(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return type(tensor) in PLAIN_TENSORS and tensor.dtype == dtype and tensor.stride(-1) == 1


def _described(module: nn.Module) -> tuple:
    """Return what is the same in modules that compute the same with other weights."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, (int, float, str))}
    inside = [getattr(module, "act_fn", None), *module.children()]
    known = [(type(each), vars(each) if isinstance(each, nn.Module) else each) for each in inside]
    return type(module), str(plain), str(known)


def _formulas(module: nn.Module, stacks: compat.ExpertStacks) -> Iterator[dict[str, Any]]:
    """Yield arguments of ``ops.fused_experts``, besides weights, with which the op computes what a module does."""
    if not stacks.is_transposed and (len(stacks.roles) > 2 or not stacks.is_concatenated):
        return  # which no kernel has
    first = 2 * _WIDTH if stacks.has_gate else _WIDTH
    sides = {"gate_up_weight": (first, _FEATURES), "down_weight": (_FEATURES, _WIDTH)}
    sides = {role: each[::-1] if stacks.is_transposed else each for role, each in sides.items()}
    sides |= {"gate_up_bias": (first,), "down_bias": (_FEATURES,)}
    with seeded(), torch.no_grad():
        small = {role: torch.randn(_EXPERTS, *sides[role], dtype=torch.float64) for role in stacks.roles}
        rows = torch.cat([scale * torch.randn(8, _FEATURES, dtype=torch.float64) for scale in _SCALES])
        weights, ids = torch.rand(len(rows), _EXPERTS, dtype=torch.float64).topk(2)
        try:
            changed = compat.with_stacks(module, {name: small[role] for role, name in stacks.roles.items()})
            expected = compat.gathered_experts(changed, rows, ids, weights)
        except MISFITS:
            return
        for layout in _layouts(module, stacks):
            found = fused_experts(rows, ids, weights, **small, **layout)
            if bool(((found - expected).abs() <= _TOLERANCE * expected.abs().amax(-1, keepdim=True)).all()):
                yield layout


def _layouts(module: nn.Module, stacks: compat.ExpertStacks) -> Iterator[dict[str, Any]]:
    layout = {"transposed": True, "concatenated": stacks.is_concatenated} if stacks.is_transposed else {}
    numbers = [value for value in vars(module).values() if isinstance(value, float) and value > 0]
    for activation in EXPERT_GATES if stacks.has_gate else (UNGATED,):
        if activation != Activation.CLAMPED_SWIGLU:
            yield layout | {"activation": activation}
        elif stacks.is_transposed:
            yield from (
                layout | dict(activation=activation, alpha=alpha, limit=limit) for alpha in numbers for limit in numbers
            )


def router_logits(recording: Recording, model: nn.Module) -> None:
    """Pass: replace a product in float32 of rows and of a matrix that are both cast for it by ``ops.router_logits``."""
    producers = recording.producers()

    def before_cast(value: Any) -> Any:
        call = producers.get(getattr(value, "index", -1))
        if call is None or call.op is not _aten._to_copy.default or call.arguments.get("dtype") != torch.float32:
            return None
        return call.arguments["self"]

    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not marks.linear or call.arguments.get("norm") is not None or not is_bare(call):
            continue
        x, weight = before_cast(call.arguments["x"]), before_cast(call.arguments["weight"])
        if not isinstance(x, Register) or x.index in recording.mutated or type(weight) not in PLAIN_TENSORS:
            continue
        if weight.dim() != 2 or weight.is_meta:  # "meta" stands for a quantized one
            continue
        if weight.stride(-1) == 1 and weight.dtype == recording.fact(x).dtype in FLOAT_DTYPES:
            instead[id(call)] = [Call(marks.router_logits, {"x": x, "weight": weight}, call.out)]
    recording.rewrite(instead, {})


def routers(recording: Recording, model: nn.Module) -> None:
    """Pass: let ``ops.topk_softmax`` choose experts whose ids and weights are what the op gives of scores."""
    known: dict[Any, bool | None] = {}
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not marks.experts:
            continue
        ids, weights = call.arguments["ids"], call.arguments["weights"]
        front = _front(recording, (ids, weights), len(call.arguments["gate_up_weight"]))
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


def _front(recording: Recording, wanted: tuple[Any, Any], num_experts: int) -> tuple[Register, list[Call]] | None:
    """Return the scores that ids and weights of experts are made of, and the calls between; None if there is more."""
    if not all(isinstance(each, Register) for each in wanted):
        return None
    front = between_marks(recording.calls, wanted)
    if front is None or len(front[0]) != 1:
        return None
    (logits,), calls = front
    if not all(map(read_by, calls)) or {logits.index, *(call.out.index for call in calls)} & recording.mutated:
        return None
    fact, ids = recording.fact(logits), recording.fact(wanted[0])
    fits = fact.shape[-1] == num_experts <= MAX_EXPERTS and fact.dtype in FLOAT_DTYPES and ids.shape[-1] <= MAX_TOP_K
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
