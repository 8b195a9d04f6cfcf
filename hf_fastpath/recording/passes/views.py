"""Passes: calls that only say how memory is viewed, and constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ... import compat
from ...decode.calls.named_calls import Call, Register, bound, tensors_in
from ..recorded_step import Recording, read_by, registers_in
from .lengths import follows_length

_aten = torch.ops.aten

#: views of all elements, in their order; of memory in another order they are copies
RESHAPES = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
#: views of a parameter, which are as good as the parameter
_OF_CONSTANTS = frozenset(
    {
        *(_aten.t.default, _aten.transpose.int, _aten.slice.Tensor, _aten.select.int, _aten.view.default),
        *(_aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim),
        *(_aten.permute.default, _aten.expand.default),
    }
)


def is_view(call: Call) -> bool:
    """Whether a call's result is a view, or a copy, of what it is given."""
    return call.op in _OF_CONSTANTS or call.op in RESHAPES


def constant_views(recording: Recording, model: nn.Module) -> None:
    """Pass: replace views of the model's tensors by tensors that share the memory."""
    values: dict[int, Any] = {}
    for call in list(recording.calls):
        arguments = {name: _known(each, values) for name, each in call.arguments.items()}
        is_view = call.op in _OF_CONSTANTS and isinstance(arguments["self"], torch.Tensor)
        # a part that follows the length stays a call, which is refused; only own_attention knows parts of masks
        if is_view and (arguments["self"].dtype == torch.bool or not follows_length(recording, call)):
            with torch.no_grad():
                values[call.out.index] = call.op(**arguments)
    recording.rewrite({}, values)
    recording.calls = [call for call in recording.calls if call.out.index not in values]


def _known(value: Any, values: dict[int, Any]) -> Any:
    return values.get(value.index, value) if isinstance(value, Register) else value


#: calls whose result differs from call to call, or is not filled yet
_NEW_EACH_TIME = ("empty", "new_empty", "rand", "zeros", "full", "ones")


def constants(recording: Recording, model: nn.Module) -> None:
    """Pass: compute what is made of numbers alone once; the model's tensors may change, so what reads one stays."""
    values: dict[int, Any] = {}
    own = {compat.memory_of(each) for each in (*model.parameters(), *model.buffers())} | recording.live
    for call in list(recording.calls):
        if not isinstance(call.op, torch._ops.OpOverload) or call.out.index in recording.mutated:
            continue
        read = read_by(call)
        if any(each.index not in values for each in read) or _holds(own, call) or follows_length(recording, call):
            continue
        if not read and any(word in str(call.op) for word in _NEW_EACH_TIME):
            continue
        arguments = {name: _known(each, values) for name, each in call.arguments.items()}
        if any(registers_in(each) for each in arguments.values()):
            continue
        op, ordered = bound(call.op, arguments)
        with torch.no_grad(), torch.inference_mode(False):
            values[call.out.index] = op(*ordered)
    recording.rewrite({}, values)
    recording.calls = [call for call in recording.calls if call.out.index not in values]
    for call in recording.calls:
        if (device := getattr(recording.fact(call.out), "device", None)) is not None:
            call.arguments = {name: _beside(each, device, own) for name, each in call.arguments.items()}


def _beside(value: Any, device: torch.device, own: set[int]) -> Any:
    """Return an argument with numbers of the host's on a device: a CUDA graph copies nothing from pageable memory."""
    if isinstance(value, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in value):
        return [_beside(each, device, own) for each in value]
    is_number = isinstance(value, torch.Tensor) and value.device.type == "cpu" != device.type
    return value.to(device) if is_number and compat.memory_of(value) not in own else value


def _holds(own: set[int], call: Call) -> bool:
    """Whether a call holds a tensor of the model's, or what stands for a quantized one."""
    return any(each.is_meta or compat.memory_of(each) in own for each in tensors_in(call.arguments))


def no_change(recording: Recording, model: nn.Module) -> None:
    """Pass: make views of views one view, and leave out calls that change nothing."""
    producers = recording.producers()
    values: dict[int, Any] = {}
    for call in recording.calls:
        if call.out.index in recording.mutated:
            continue
        given: Any = next(iter(call.arguments.values()), None)
        if call.op is _aten.cat.default and len(given) == 1:
            (given,) = given
        while isinstance(given, Register) and given.index in values:
            given = values[given.index]
        if not isinstance(given, Register) or given.index in recording.mutated:
            continue
        if call.op in RESHAPES:
            inner = producers.get(given.index)
            while inner is not None and inner.op in RESHAPES and inner.out.index not in recording.mutated:
                given = next(iter(inner.arguments.values()))
                if not isinstance(given, Register):
                    break
                inner = producers.get(given.index)
            if isinstance(given, Register):
                call.arguments = call.arguments | {next(iter(call.arguments)): given}
        if _changes_nothing(recording, call, given):
            values[call.out.index] = given
    recording.rewrite({}, values)


def inverse_transposes(recording: Recording, model: nn.Module) -> None:
    """Pass: leave out pairs of transpositions that give back what was there before."""
    producers = recording.producers()
    values: dict[int, Any] = {}
    for call in recording.calls:
        if call.op is not _aten.transpose.int or call.out.index in recording.mutated:
            continue
        inner = producers.get(getattr(call.arguments["self"], "index", -1))
        if inner is not None and inner.op is _aten.transpose.int and _dims(recording, inner) == _dims(recording, call):
            values[call.out.index] = inner.arguments["self"]
    recording.rewrite({}, values)


def _dims(recording: Recording, call: Call) -> set[int]:
    count = recording.fact(call.out).dim()
    return {call.arguments["dim0"] % count, call.arguments["dim1"] % count}


def _changes_nothing(recording: Recording, call: Call, given: Any) -> bool:
    if not isinstance(given, Register):
        return False
    out, taken = recording.fact(call.out), recording.fact(given)
    if not isinstance(out, torch.Tensor) or not isinstance(taken, torch.Tensor):
        return False
    if out.shape != taken.shape or out.dtype != taken.dtype:
        return False
    if call.op in (*RESHAPES, _aten.expand.default, _aten.slice.Tensor, _aten.clone.default, _aten._to_copy.default):
        return True
    if call.op is _aten.mul.Tensor:
        return isinstance(call.arguments["other"], (int, float)) and call.arguments["other"] == 1
    return call.op in (_aten.alias.default, _aten.detach.default, _aten.cat.default)
