"""Passes: the experts of a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ... import compat
from ...choices import Activation
from ...decode.calls.named_calls import Call, by_name
from ...ops.fused_experts import EXPERT_GATES, UNGATED
from ...ops.fused_experts import reference as fused_experts
from ...registry import PLAIN_TENSORS
from .. import marks
from ..probing import MISFITS, seeded
from ..recorded_step import Recording, Unrecordable

_aten = torch.ops.aten

#: rows of scores that are compared
_ROWS = 64
#: experts, features and inner features of the experts that are compared, and further experts without weights
_EXPERTS, _FEATURES, _WIDTH, _WITHOUT = 3, 4, 6, 2
#: sizes of the numbers that these are given: one at which activations bend, one that limits cut
_SCALES = (1.0, 30.0)
#: relative difference of two results of one formula: some gates compute in float32, whatever they are given
_TOLERANCE = 1e-6


def identity_experts(recording: Recording, model: nn.Module) -> None:
    """Pass: put a sum in the place of experts of which the last ones have no weights and give what they are given.

    A loop that knows such experts (LongCat-Flash) keeps matrices down of the others alone.
    """
    instead: dict[int, list[Call]] = {}
    known: dict[Any, bool] = {}
    for call in recording.calls:
        if call.op is not marks.other_experts or not compat.loops_over_experts(module := call.arguments["module"]):
            continue
        stacks = compat.expert_stacks(module)
        if stacks is None or len(counts := {len(each) for each in stacks.tensors.values()}) == 1:
            continue
        if (key := _described(module)) not in known:
            known[key] = _passes_on(module, stacks)
        if known[key]:
            instead[id(call)] = list(_with_passed_on(recording, call, stacks, min(counts)))
    recording.rewrite(instead, {})


def _with_passed_on(recording: Recording, call: Call, stacks: compat.ExpertStacks, count: int) -> Iterator[Call]:
    """Yield calls that give what a call of experts gives, of which ``count`` have weights."""
    x, ids, weights = (call.arguments[name] for name in ("x", "ids", "weights"))
    fact = {name: recording.fact(call.arguments[name]) for name in ("x", "ids", "weights")}
    yield (has_weights := recording.call(_aten.lt.Scalar, fact["ids"].bool(), self=ids, other=count))
    yield (others := recording.call(_aten.mul.Tensor, fact["ids"], self=ids, other=has_weights.out))
    yield (parts := recording.call(_aten.mul.Tensor, fact["weights"], self=weights, other=has_weights.out))
    yield (rest := recording.call(_aten.sub.Tensor, fact["weights"], self=weights, other=parts.out))
    share = fact["weights"][:, :1]
    yield (total := recording.call(_aten.sum.dim_IntList, share, self=rest.out, dim=[-1], keepdim=True))
    few = compat.with_stacks(
        call.arguments["module"], {name: each.detach()[:count] for name, each in stacks.tensors.items()}
    )
    given = dict(x=x, ids=others.out, weights=parts.out, module=few)
    yield (made := Call(marks.other_experts, given, recording.register(fact["x"])))
    wide = fact["x"].to(torch.promote_types(fact["x"].dtype, fact["weights"].dtype))
    yield (passed := recording.call(_aten.mul.Tensor, wide, self=x, other=total.out))
    if wide.dtype != fact["x"].dtype:
        yield (passed := recording.call(_aten._to_copy.default, fact["x"], self=passed.out, dtype=fact["x"].dtype))
    yield Call(_aten.add.Tensor, by_name(_aten.add.Tensor, (made.out, passed.out), {}), call.out)


def _passes_on(module: nn.Module, stacks: compat.ExpertStacks) -> bool:
    """Whether the experts of a loop that have no weights give what they are given, and the others do as usual."""
    with seeded(), torch.no_grad():
        changed, _, (rows, ids, weights) = _few_experts(module, stacks)
        few = compat.with_stacks(changed, {name: each[:_EXPERTS] for name, each in changed.named_parameters()})
        has_weights = ids < _EXPERTS
        expected = compat.gathered_experts(few, rows, ids * has_weights, weights * has_weights)
        expected += rows * (weights * ~has_weights).sum(-1, keepdim=True)
        try:
            return _agree_by_row(compat.own_experts(changed, rows, ids, weights), expected)
        except (*MISFITS, IndexError, AttributeError):
            return False


def stacked_experts(recording: Recording, model: nn.Module) -> None:
    """Pass: let ``ops.fused_experts`` run the experts of a module that computes what the op does.

    Raises:
        Unrecordable: a module has a loop of its own that computes something else than transformers' functions.
    """
    known: dict[Any, dict[str, Any] | None] = {}
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not marks.other_experts:
            continue
        module, dtype = call.arguments["module"], recording.fact(call.arguments["x"]).dtype
        stacks = compat.expert_stacks(module)
        key = _described(module)
        if compat.loops_over_experts(module) and key not in known and not (stacks and _gathers(module, stacks)):
            raise Unrecordable(f"experts in a loop of {type(module).__name__}'s own")
        if stacks is None or not all(_is_stack(each, dtype) for each in stacks.tensors.values()):
            continue
        if key not in known:
            known[key] = next(_formulas(module, stacks), None)
        if (layout := known[key]) is not None:
            others = {name: value for name, value in call.arguments.items() if name != "module"}
            weights = {role: stacks.tensors[name] for role, name in stacks.roles.items()}
            instead[id(call)] = [Call(marks.experts, others | weights | layout, call.out)]
    recording.rewrite(instead, {})


def formula_of(module: nn.Module, stacks: compat.ExpertStacks) -> dict[str, Any] | None:
    """Return arguments of ``ops.fused_experts``, besides weights, with which the op computes what a module does; None
    if there are none."""
    if compat.loops_over_experts(module) and not _gathers(module, stacks):
        return None
    return next(_formulas(module, stacks), None)


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
    with seeded(), torch.no_grad():
        changed, small, given = _few_experts(module, stacks)
        try:
            expected = compat.gathered_experts(changed, *given)
        except MISFITS:
            return
        rows, ids, weights = given
        for layout in _layouts(module, stacks):
            arguments: dict[str, Any] = {**small, **layout}
            if _agree_by_row(fused_experts(rows, ids, weights, **arguments), expected):
                yield layout


def _gathers(module: nn.Module, stacks: compat.ExpertStacks) -> bool:
    """Whether the loop of a module's class computes what transformers' functions do."""
    if len({len(each) for each in stacks.tensors.values()}) > 1:  # some experts have no weights
        return False
    with seeded(), torch.no_grad():
        changed, _, given = _few_experts(module, stacks)
        try:
            return _agree_by_row(compat.gathered_experts(changed, *given), compat.own_experts(changed, *given))
        except (*MISFITS, IndexError, AttributeError):
            return False


def _few_experts(
    module: nn.Module, stacks: compat.ExpertStacks
) -> tuple[nn.Module, dict[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return a module like ``module`` with three small experts, and two more if some have no weights; their random
    weights by role; and rows, ids and weights of experts that the module may be given."""
    first = 2 * _WIDTH if stacks.has_gate else _WIDTH
    sides: dict[str, tuple[int, ...]] = {"gate_up_weight": (first, _FEATURES), "down_weight": (_FEATURES, _WIDTH)}
    sides = {role: each[::-1] if stacks.is_transposed else each for role, each in sides.items()}
    sides |= {"gate_up_bias": (first,), "down_bias": (_FEATURES,)}
    counts = sorted({len(each) for each in stacks.tensors.values()})
    fewer = {counts[-1]: _EXPERTS + _WITHOUT * (len(counts) > 1), counts[0]: _EXPERTS}  # by the number that there is
    small = {
        role: torch.randn(fewer.get(len(stacks.tensors[name]), _EXPERTS), *sides[role], dtype=torch.float64)
        for role, name in stacks.roles.items()
    }
    rows = torch.cat([scale * torch.randn(8, _FEATURES, dtype=torch.float64) for scale in _SCALES])
    weights, ids = torch.rand(len(rows), fewer[counts[-1]], dtype=torch.float64).topk(2)
    changed = compat.with_stacks(module, {name: small[role] for role, name in stacks.roles.items()})
    if len(counts) > 1:  # how many there are of both decides what the module does
        vars(changed).update(
            {name: fewer[value] for name, value in vars(changed).items() if _is_number_in(value, fewer)}
        )
    return changed, small, (rows, ids, weights)


def _is_number_in(value: Any, known: dict[int, int]) -> bool:
    return type(value) is int and value in known


def _agree_by_row(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((found - expected).abs() <= _TOLERANCE * expected.abs().amax(-1, keepdim=True)).all())


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
