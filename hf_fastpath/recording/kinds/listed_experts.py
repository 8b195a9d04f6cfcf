"""Experts that a model keeps as modules, each of which it calls for the tokens that have chosen it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ... import compat
from ...decode.calls.named_calls import Register
from ..probing import MISFITS, agree, evaluate, seeded
from ..recorded_step import Unrecordable, between_marks
from ..recorder import Recorder

#: rows of scores whose choices are looked at
_ROWS = 64
#: features, tokens and choices of a token of the experts that are compared
_FEATURES, _TOKENS, _CHOICES = 4, 8, 3


@contextmanager
def listed_experts(recorder: Recorder) -> Iterator[None]:
    """Let modules with experts call those that every token needs, for the length of a ``with`` block."""
    bound = []
    try:
        for module in compat.modules_with_experts(recorder.skeleton.copy):
            vars(module)["forward"] = functools.partial(_experts, recorder, module)
            bound.append(module)
        for module in compat.modules_with_padding(recorder.skeleton.copy):
            vars(module)["forward"] = functools.partial(_without_mask, recorder, module.forward)
            bound.append(module)
        for module in compat.linears_beside_experts(recorder.skeleton.copy):
            vars(module)[compat.CONVERT] = functools.partial(_converted, module, getattr(module, compat.CONVERT))
            bound.append(module)
        yield
    finally:
        for module in bound:
            vars(module).pop("forward", None)
            vars(module).pop(compat.CONVERT, None)


def _converted(module: nn.Module, convert: Callable[..., Any], function: Callable[..., Any], *others: Any) -> nn.Module:
    """Leave a module as it is that is converted to what it is: tensors without data may not take each other's place."""
    is_other = any(function(each) is not each for each in module.parameters())
    return convert(function, *others) if is_other else module


def _without_mask(recorder: Recorder, forward: Callable[..., Any], x: torch.Tensor, mask: Any = None) -> Any:
    """Run a router without attention's mask, which says nothing of a token without padding in front."""
    if mask is not None and not recorder.is_rehearsing:
        recorder.mask_of(mask)
        recorder.is_unpadded = True
    return forward(x)


def _experts(recorder: Recorder, module: nn.Module, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor):
    """Run the experts that every token needs, each for all rows, and add up their shares.

    Args:
        x: [rows, features].
        chosen: int64 [rows, choices], numbers of experts.
        weights: [rows, choices].

    Raises:
        Unrecordable: tokens need different experts, or the module does not add up shares.
    """
    if recorder.is_rehearsing:
        return torch.empty_like(x)
    real = recorder.skeleton.model.get_submodule(recorder.path_of(module))
    experts = compat.experts_in(module)
    with recorder.quiet(), compat.without_modes():
        factor = _factor(real)
        numbers = None if factor is None else _needed(recorder, chosen, len(experts))
    if numbers is None or factor is None:
        raise Unrecordable("experts that are modules, of which tokens need different ones")
    shares = [((chosen == number) * weights).sum(-1, keepdim=True) for number in numbers]
    made = [experts[number](x) * (share if factor == 1 else factor * share) for number, share in zip(numbers, shares)]
    return functools.reduce(torch.add, made)


class _Stub(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.randn(_FEATURES, _FEATURES, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix


def _factor(module: nn.Module) -> float | None:
    """Return what a module multiplies each expert's result by, beside the weight of its choice; None if the module does
    more than to add these up."""
    numbers = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1]
    with seeded(), torch.no_grad():
        stubs: list[nn.Module] = [_Stub() for _ in compat.experts_in(module)]
        x = torch.randn(_TOKENS, _FEATURES, dtype=torch.float64)
        chosen = torch.randint(len(stubs), (_TOKENS, _CHOICES))
        weights = torch.rand(_TOKENS, _CHOICES, dtype=torch.float64)
        try:
            expected = type(module).forward(compat.with_experts(copy.copy(module), stubs), x, chosen, weights)
        except (*MISFITS, IndexError):
            return None
        shares = [((chosen == number) * weights).sum(-1, keepdim=True) for number in range(len(stubs))]
        found = torch.stack([stub(x) * share for stub, share in zip(stubs, shares)]).sum(0)
    return next((each for each in (1.0, *(1 - number for number in numbers)) if agree(expected, each * found)), None)


def _needed(recorder: Recorder, chosen: torch.Tensor, count: int) -> list[int] | None:
    """Return the numbers of the experts that tokens may need, of ``count``; None if no token needs all of these."""
    register = recorder.value(chosen)
    front = between_marks(recorder.calls, [register]) if isinstance(register, Register) else None
    if front is None or len(front[0]) != 1 or chosen.dim() != 2:
        return None
    (scores,), calls = front
    shape, hits = recorder.facts[scores.index].shape, []
    for seed in range(-(-_ROWS // len(chosen))):
        with seeded(seed):
            found = evaluate(calls, {scores.index: torch.randn(shape, dtype=torch.float64)})[register.index]
        hits.append((found[..., None] == torch.arange(count)).any(1))
    hit = torch.cat(hits)
    needed = hit.any(0)
    return needed.nonzero().flatten().tolist() if bool((hit == needed).all(1).any()) else None
