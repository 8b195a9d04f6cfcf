"""Passes: norms and activations, which are modules of their own; and functions that are one of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...choices import Activation, NormKind
from ...decode.calls.named_calls import Call, Norm, Register
from .. import marks
from ..probing import agree, evaluate, inner_only, seeded, structure
from ..recorded_step import Recording, Span

_aten = torch.ops.aten

#: PyTorch's own activations -> what kernels have
_FUNCTIONS: dict[Any, Activation] = {
    _aten.silu.default: Activation.SILU,
    _aten.relu.default: Activation.RELU,
}
#: sizes of numbers at which formulas are compared: one where an epsilon counts, one where a limit does
_SCALES = (0.01, 2, 100)
#: values that norms add to a mean of squares, if the module does not say
EPSILONS = (1e-12, 1e-8, 1e-6, 1e-5, 1e-3)


def module_formulas(recording: Recording, model: nn.Module) -> None:
    """Pass: make a module without children one call if it computes a norm or an activation."""
    known: dict[Any, Callable[..., dict[str, Any]] | None] = {}
    instead: dict[int, list[Call]] = {}
    for span in recording.spans:
        found = _formula(recording, model, span, known)
        if found is None:
            continue
        op, arguments = found
        last = span.calls[-1]
        made = Call(op, {"x": span.inputs[0]} | arguments, last.out)
        instead |= {id(call): [] for call in span.calls[:-1]} | {id(last): [made]}
    recording.rewrite(instead, {})


def _formula(recording: Recording, model: nn.Module, span: Span, known: dict) -> tuple[Any, dict[str, Any]] | None:
    """Return the mark that a module is, and the mark's arguments but x; or None."""
    if len(span.inputs) != 1 or len(span.outputs) != 1 or not span.calls or len(span.calls) > 24:
        return None
    taken, made = (recording.fact(each) for each in (span.inputs[0], span.outputs[0]))
    if span.calls[-1].out.index != span.outputs[0].index or not inner_only(span.calls, span.inputs):
        return None
    if any(call.out.index in recording.mutated for call in span.calls):
        return None
    if taken.shape != made.shape or taken.dtype != made.dtype or not taken.is_floating_point():
        return None
    module = model.get_submodule(span.path)
    parameters = {name: each for name, each in module.named_parameters(recurse=False)}
    names = "weight" if "weight" in parameters else next((n for n in parameters if "bias" not in n), None)
    bias = next((n for n in parameters if n != names), None)
    if len(parameters) > 2 or any(each.shape != taken.shape[-1:] for each in parameters.values()):
        return None
    if any(each.dtype != taken.dtype for each in parameters.values()):
        return None
    weight = parameters.get(names) if names is not None else None
    shift = parameters.get(bias) if bias is not None else None
    numbers = tuple(sorted((n, v) for n, v in vars(module).items() if isinstance(v, float)))
    structure = structure_of_span(span, parameters)
    if structure is None:
        return None
    key = type(module), tuple(parameters), taken.shape[-1], numbers, structure
    if key not in known:
        known[key] = _tried(recording, span, weight, shift, [v for _, v in numbers])
    if known[key] is None:
        return None
    op, arguments = known[key]
    if op is marks.normed:
        norm: Norm = arguments["norm"]
        return op, arguments | {"norm": Norm(norm.kind, weight, shift, norm.eps)}
    return op, arguments


def structure_of_span(span: Span, parameters: dict[str, Any]) -> tuple | None:
    """Return what is the same in modules that compute the same; None if a module holds tensors besides its parameters
    that may change."""
    names = {id(each): name for name, each in parameters.items()}
    try:
        return structure(span.calls, span.inputs, lambda tensor: names[id(tensor)])
    except KeyError:
        return None


def _tried(recording: Recording, span: Span, weight: Any, bias: Any, numbers: list[float]) -> Any:
    """Return the first formula that computes what the module's calls compute."""
    shape = recording.fact(span.inputs[0]).shape
    with seeded():
        xs = [scale * (torch.randn(shape, dtype=torch.float64) + 0.1) for scale in _SCALES]
        w = None if weight is None else torch.randn(weight.shape, dtype=torch.float64)
        b = None if bias is None else torch.randn(bias.shape, dtype=torch.float64)
    stand_in = {id(each): values for each, values in ((weight, w), (bias, b)) if values is not None}
    try:
        expected = [evaluate(span.calls, {span.inputs[0].index: x}, stand_in)[span.outputs[0].index] for x in xs]
    except (RuntimeError, TypeError, KeyError, NotImplementedError):
        return None
    for op, arguments, given in _candidates(w, b, numbers):
        if all(agree(each, op(x, **given)) for each, x in zip(expected, xs)):
            return op, arguments
    return None


def _candidates(w: Any, b: Any, numbers: list[float]) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any]]]:
    if w is None and b is None:
        for activation in (Activation.SILU, Activation.GELU, Activation.GELU_TANH, Activation.RELU):
            yield marks.activated, {"activation": activation}, {"activation": activation}
    for eps in dict.fromkeys([each for each in numbers if 0 < each < 0.1] + list(EPSILONS)):
        for kind in (NormKind.RMS, NormKind.LAYER):
            if kind == NormKind.RMS and b is not None:
                continue
            for offset in (False, True) if w is not None else (False,):
                named = {"norm": Norm(kind, None, None, eps)} | ({"unit_offset": True} if offset else {})
                yield marks.normed, named, named | {"norm": Norm(kind, w, b, eps)}


def activation_functions(recording: Recording, model: nn.Module) -> None:
    """Pass: replace PyTorch's activations that kernels have by calls of one mark."""
    for call in recording.calls:
        activation = _FUNCTIONS.get(call.op)
        if call.op is _aten.gelu.default:
            tanh = call.arguments.get("approximate", "none") == "tanh"
            activation = Activation.GELU_TANH if tanh else Activation.GELU
        if activation is not None:
            (x,) = (each for each in call.arguments.values() if isinstance(each, (Register, torch.Tensor)))
            call.op, call.arguments = marks.activated, {"x": x, "activation": activation}
