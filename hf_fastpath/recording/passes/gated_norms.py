"""Pass: norms beside a gate, which are modules of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ... import ops
from ...choices import GateActivation
from ...decode.calls.named_calls import Call
from .. import marks
from ..probing import agree, evaluate, inner_only, seeded
from ..recorded_step import Recording, Span
from .modules import EPSILONS, structure_of_span

#: calls that a norm with a gate takes at most, with conversions between dtypes
_MOST_CALLS = 32


def gated_norms(recording: Recording, model: nn.Module) -> None:
    """Pass: make a module without children one call if it computes ``ops.gated_rms_norm`` of its inputs."""
    known: dict[Any, dict[str, Any] | None] = {}
    instead: dict[int, list[Call]] = {}
    for span in recording.spans:
        weight = _weight_of(recording, model, span)
        if weight is None:
            continue
        module = model.get_submodule(span.path)
        numbers = tuple(sorted((n, v) for n, v in vars(module).items() if type(v) in (int, float)))
        structure = structure_of_span(span, {"weight": weight})
        if structure is None:
            continue
        key = type(module), weight.shape, numbers, structure, recording.fact(span.inputs[0]).shape
        if key not in known:
            known[key] = _tried(recording, span, weight, [v for _, v in numbers])
        if (found := known[key]) is not None:
            last = span.calls[-1]
            x, gate = span.inputs
            made = Call(marks.gated_norm, {"x": x, "gate": gate, "weight": weight} | found, last.out)
            instead |= {id(call): [] for call in span.calls[:-1]} | {id(last): [made]}
    recording.rewrite(instead, {})


def _weight_of(recording: Recording, model: nn.Module, span: Span) -> nn.Parameter | None:
    """Return the weight of a module that may be a norm with a gate; None if the module is none."""
    if len(span.inputs) != 2 or len(span.outputs) != 1 or not 3 < len(span.calls) <= _MOST_CALLS:
        return None
    x, gate, out = (recording.fact(each) for each in (*span.inputs, *span.outputs))
    if not x.is_floating_point() or not x.shape == gate.shape == out.shape or not x.dtype == gate.dtype == out.dtype:
        return None
    if span.calls[-1].out.index != span.outputs[0].index or not inner_only(span.calls, span.inputs):
        return None
    if any(call.out.index in recording.mutated for call in span.calls):
        return None
    parameters = list(model.get_submodule(span.path).parameters(recurse=False))
    fits = len(parameters) == 1 and parameters[0].shape == x.shape[-1:] and parameters[0].dtype == x.dtype
    return parameters[0] if fits else None


def _tried(recording: Recording, span: Span, weight: torch.Tensor, numbers: list[Any]) -> dict[str, Any] | None:
    """Return the arguments with which the op computes what the module's calls compute, or None."""
    shape = recording.fact(span.inputs[0]).shape
    with seeded():
        pairs = [[scale * torch.randn(shape, dtype=torch.float64) for _ in range(2)] for scale in (0.01, 2)]
        w = torch.randn(weight.shape, dtype=torch.float64)
    indices = [each.index for each in span.inputs]
    try:
        made = [evaluate(span.calls, dict(zip(indices, pair)), {id(weight): w}) for pair in pairs]
        expected = [each[span.outputs[0].index] for each in made]
    except (RuntimeError, TypeError, KeyError, NotImplementedError):
        return None
    for how in _candidates(shape[-1], numbers):
        if all(agree(one, ops.gated_rms_norm.reference(*pair, w, **how)) for one, pair in zip(expected, pairs)):
            return how
    return None


def _candidates(size: int, numbers: list[Any]) -> Iterator[dict[str, Any]]:
    sizes = [each for each in numbers if type(each) is int and 0 < each <= size and size % each == 0]
    groups = dict.fromkeys([1, *sizes, *(size // each for each in sizes)])
    for eps in dict.fromkeys([each for each in numbers if type(each) is float and 0 < each < 0.1] + list(EPSILONS)):
        for gate_first in (False, True):
            for activation in (GateActivation.SILU, GateActivation.SIGMOID):
                for count in groups:
                    yield dict(eps=eps, groups=count, gate_first=gate_first, activation=activation)
