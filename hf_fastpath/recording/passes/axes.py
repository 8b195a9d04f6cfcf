"""Pass: positions of several axes (time, height, width) that are one behind a prompt.

Qwen3-VL makes angles of each axis and writes some of one axis's over those of another. All axes have the same positions
here, so that a write puts numbers where they are already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...decode.calls.named_calls import Call, Register
from .. import marks
from ..recorded_step import Recording
from .regions import Memory

_aten = torch.ops.aten

#: views by which one axis is told from another
_VIEWS = frozenset(
    {
        *(_aten.select.int, _aten.slice.Tensor, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.expand.default),
        *(_aten.view.default, _aten.transpose.int, _aten.permute.default, _aten.alias.default),
    }
)
#: calls that compute every place of the result's first dimension by itself
_BY_PLACE = frozenset(
    {
        marks.matmul,
        *(_aten._to_copy.default, _aten.cos.default, _aten.sin.default, _aten.neg.default, _aten.clone.default),
        *(_aten.mul.Tensor, _aten.add.Tensor, _aten.sub.Tensor, _aten.div.Tensor),
    }
)


def writes_of_like_axes(recording: Recording, model: nn.Module) -> None:
    """Pass: writes that change nothing, because they copy from one axis to another and both are alike, are left out."""
    memory = Memory(recording)
    if not memory.writers:
        return
    producers, alike = recording.producers(), _alike(recording)
    harmless = {
        number
        for number, calls in memory.writers.items()
        if all(call.op is _aten.copy_.default and _is_where_it_goes(producers, call, alike) for call in calls)
    }
    removed = [call for number in harmless for call in memory.writers[number]]
    if not removed:
        return
    shared = {index for index in recording.mutated if memory.of(Register(index)) in harmless}
    recording.mutated -= shared | {call.out.index for call in removed}
    recording.rewrite({id(call): [] for call in removed}, {call.out.index: call.arguments["self"] for call in removed})


def _is_where_it_goes(producers: dict[int, Call], write: Call, alike: set[int]) -> bool:
    """Whether ``write`` copies from the same places of another axis of a tensor whose axes are alike."""
    one, other = write.arguments["self"], write.arguments["src"]
    while isinstance(one, Register) and isinstance(other, Register):
        if one.index == other.index:
            return True
        first, second = (_behind_writes(producers, each) for each in (one, other))
        if first is None or second is None or first.op is not second.op or first.op not in _VIEWS:
            return False
        names = first.arguments.keys() - {"self"}
        differ = {name for name in names if first.arguments[name] != second.arguments.get(name)}
        one, other = first.arguments["self"], second.arguments["self"]
        if differ and not (_is_choice_of_axis(first, second, differ) and _index(one) == _index(other) in alike):
            return False
    return False


def _behind_writes(producers: dict[int, Call], register: Register) -> Call | None:
    call = producers.get(register.index)
    while call is not None and call.op is _aten.copy_.default:  # its result is what it has written to
        call = producers.get(_index(call.arguments["self"]))
    return call


def _is_choice_of_axis(first: Call, second: Call, differ: set[str]) -> bool:
    return first.op is _aten.select.int and differ == {"index"} and first.arguments["dim"] == 0


def _index(value: Any) -> int:
    return value.index if isinstance(value, Register) else -1


def _alike(recording: Recording) -> set[int]:
    """Return the registers of tensors that are the same at every place of their first dimension."""
    found: set[int] = set()
    for call in recording.calls:
        out, given = recording.fact(call.out), next(iter(call.arguments.values()), None)
        if not isinstance(out, torch.Tensor) or not isinstance(given, (Register, torch.Tensor)) or out.dim() < 2:
            continue
        inside = recording.fact(given)
        if call.op is _aten.expand.default and out.shape[0] > 1:
            is_alike = inside.dim() < out.dim() or inside.shape[0] == 1 or _index(given) in found
        elif call.op is _aten.slice.Tensor:
            is_alike = _index(given) in found
        elif call.op is _aten.unsqueeze.default:
            is_alike = _index(given) in found and call.arguments["dim"] % out.dim() > 0
        elif call.op is _aten.transpose.int:
            dims = (call.arguments[name] % out.dim() for name in ("dim0", "dim1"))
            is_alike = _index(given) in found and 0 not in dims
        elif call.op in _BY_PLACE:
            operands = [each for each in call.arguments.values() if isinstance(each, (Register, torch.Tensor))]
            is_alike = all(_is_alike(recording, each, out.dim(), found) for each in operands)
        else:
            is_alike = False
        if is_alike:
            found.add(call.out.index)
    return found


def _is_alike(recording: Recording, value: Any, dims: int, found: set[int]) -> bool:
    """Whether an operand is the same at every place of the first of ``dims`` dimensions of the result."""
    fact = recording.fact(value)
    return _index(value) in found or fact.dim() < dims or fact.shape[0] == 1 or fact.stride(0) == 0
