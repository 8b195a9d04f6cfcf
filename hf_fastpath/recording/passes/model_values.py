"""Pass: what a step makes of the model's tensors alone."""

from __future__ import annotations

import torch
from torch import nn

from ... import compat
from ...decode.calls.named_calls import Call, Register, tensors_in
from .. import marks
from ..numbers_of_lengths import follows_length
from ..recorded_step import MadeOfModel, Recording, behind, is_effect, read_by
from .views import is_view

#: how many times as many elements as a matrix that is kept its sources have
_SMALLER = 16


def model_values(recording: Recording, model: nn.Module) -> None:
    """Pass: compute what calls make of parameters alone when a plan begins, and let calls read that as a weight: DoRA's
    norms of whole weights would take longer than all products of a token.

    It keeps vectors, and what is much smaller than what it is made of, so that memory hardly grows. Factors that are
    one number for all features stay, as do views, which are the parameters themselves.
    """
    parameters = {compat.memory_of(each) for each in model.parameters() if not each.is_meta}
    of_model = _made_of_model(recording)
    read = {each.index: each for call in recording.calls if call.out.index not in of_model for each in read_by(call)}
    instead: dict[int, torch.Tensor] = {}
    for register in read.values():
        if register.index not in of_model or register.index == recording.logits.index:
            continue
        calls = behind(recording.calls, register)
        held = [each for call in calls for each in tensors_in(call.arguments)]
        if all(map(is_view, calls)) or not _is_worth_it(recording, register, held, parameters):
            continue
        fact = recording.fact(register)
        tensor = torch.zeros(fact.shape, dtype=fact.dtype, device=fact.device)
        copied = [Call(call.op, dict(call.arguments), call.out) for call in calls]
        recording.values.append(MadeOfModel(register, copied, tensor))
        instead[register.index] = tensor
    recording.rewrite({}, instead)


def _made_of_model(recording: Recording) -> set[int]:
    """Return the registers that hold the same in every step, as long as the model's tensors stay."""
    found: set[int] = set()
    for call in recording.calls:
        tags = call.op.tags if isinstance(call.op, torch._ops.OpOverload) else ()
        if not isinstance(call.op, torch._ops.OpOverload) and call.op not in _PURE_MARKS:
            continue
        if is_effect(call) or call.out.index in recording.mutated or any(map(follows_length, call.arguments.values())):
            continue
        if torch.Tag.nondeterministic_seeded in tags:
            continue
        if all(each.index in found for each in read_by(call)):
            found.add(call.out.index)
    return found


#: marks that compute a value of what they are given, and nothing else
_PURE_MARKS = frozenset({marks.linear, marks.matmul})


def _is_worth_it(recording: Recording, register: Register, held: list[torch.Tensor], parameters: set[int]) -> bool:
    fact = recording.fact(register)
    sources = {id(each): each for each in held}.values()
    if not isinstance(fact, torch.Tensor) or not fact.is_floating_point() or fact.numel() < 2:
        return False
    if any(each.is_meta or (each.device != fact.device and each.dim()) for each in sources):
        return False
    if not any(compat.memory_of(each) in parameters for each in sources):
        return False
    is_vector = max(fact.shape) == fact.numel()
    return is_vector or _SMALLER * fact.numel() <= sum(each.numel() for each in sources)
