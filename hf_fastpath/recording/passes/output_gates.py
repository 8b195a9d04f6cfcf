"""Passes: what a gate lets through, as of attention's output or of a shared expert's."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn

from ...decode.calls.named_calls import Call, Register
from ...decode.ranks.rank_calls import gathered
from ...ops.fused_swiglu import GATES
from ...registry import FLOAT_DTYPES
from .. import marks
from ..lowering import takes_product
from ..recorded_step import Recording, read_by
from .products import is_bare
from .views import RESHAPES

_aten = torch.ops.aten

#: calls that give a part of a tensor, or parts
_PARTS = (operator.getitem, _aten.split.Tensor, _aten.chunk.default, _aten.slice.Tensor)


def output_gates(recording: Recording, model: nn.Module) -> None:
    """Pass: make ``x * sigmoid(gate)`` one call, which takes a gate where it lies: beside its head's queries, say."""
    producers = recording.producers()
    instead: dict[int, list[Call]] = {}
    for call, shut, x in recording.lone_factors():
        if shut.op is not _aten.sigmoid.default or id(call) in instead:
            continue
        gate = shut.arguments["self"]
        if _fit(recording, call.out, x, gate) and gate.index not in recording.mutated:
            instead |= {id(shut): [], id(call): _gated(recording, producers, x, gate, call.out)}
    recording.rewrite(instead, {})


def gates_in_front(recording: Recording, model: nn.Module) -> None:
    """Pass: let a gate of whole rows, as of a shared expert, shut what a product reads instead of what it gives.

    A row's factor passes through a product, which can then take on a residual.
    """
    producers, users = recording.producers(), recording.users()
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not marks.sigmoid_gated:
            continue
        gate, product = call.arguments["gate"], producers.get(call.arguments["x"].index)
        if product is None or product.op is not marks.linear or len(users[product.out.index]) != 1:
            continue
        given = product.arguments["x"]
        if not is_bare(product) or not isinstance(given, Register) or given.index in recording.mutated:
            continue
        like = recording.fact(given)
        if recording.fact(gate).shape != (*like.shape[:-1], 1) or not takes_product(recording, product):
            continue
        shut = recording.call(marks.sigmoid_gated, like, x=given, gate=gate)
        made = Call(marks.linear, product.arguments | {"x": shut.out}, call.out)
        instead |= {id(product): [], id(call): [shut, made]}
    recording.rewrite(instead, {})


def activated_gates(recording: Recording, model: nn.Module) -> None:
    """Pass: make ``activation(gate) * up`` one call if the gate is a product, or both are parts of what all ranks have
    gathered."""
    producers = recording.producers()
    instead: dict[int, list[Call]] = {}

    def whole(register: Any) -> Any:
        """Return what gives the features of which a register is a part."""
        call = producers.get(getattr(register, "index", -1))
        while call is not None and call.op in _PARTS and (read := read_by(call)):
            call = producers.get(read[0].index)
        return call

    for call, acted, up in recording.lone_factors():
        if acted.op is not marks.activated or id(call) in instead:
            continue
        gate, activation = acted.arguments["x"], acted.arguments["activation"]
        of_gate = whole(gate)
        if of_gate is None or activation not in GATES:
            continue
        if of_gate.op is not marks.linear and not (of_gate.op is gathered and of_gate is whole(up)):
            continue
        if _fit(recording, call.out, up, gate):
            glu = Call(marks.glu, {"gate": gate, "up": up, "activation": activation}, call.out)
            instead |= {id(acted): [], id(call): [glu]}
    recording.rewrite(instead, {})


def _fit(recording: Recording, out: Register, x: Any, gate: Any) -> bool:
    """Whether the op takes ``x`` and ``gate``, and gives a tensor like ``out``."""
    if not isinstance(x, Register) or not isinstance(gate, Register):
        return False
    made, passed, gates = (recording.fact(each) for each in (out, x, gate))
    if made.dim() == 0 or made.shape != passed.shape or gates.shape not in (made.shape, (*made.shape[:-1], 1)):
        return False
    return made.dtype in FLOAT_DTYPES and made.dtype == passed.dtype == gates.dtype


def _gated(recording: Recording, producers: dict[int, Call], x: Register, gate: Register, out: Register) -> list[Call]:
    """Return the calls that give ``out``, without a copy of a gate that was made contiguous."""
    copied = producers.get(gate.index)
    apart = copied.arguments["self"] if copied is not None and copied.op in RESHAPES else None
    fact = recording.fact(out)
    is_whole = recording.fact(gate).shape == fact.shape
    if not is_whole or not isinstance(apart, Register) or not _lies_apart(recording, apart):
        return [Call(marks.sigmoid_gated, {"x": x, "gate": gate}, out)]
    like = fact.new_empty(recording.fact(apart).shape)
    seen = recording.call(_aten.view.default, like, self=x, size=list(like.shape))
    gated = recording.call(marks.sigmoid_gated, like, x=seen.out, gate=apart)
    return [seen, gated, Call(_aten.view.default, {"self": gated.out, "size": list(fact.shape)}, out)]


def _lies_apart(recording: Recording, register: Register) -> bool:
    """Whether a tensor that only its makers write to is not contiguous."""
    return register.index not in recording.mutated and not recording.fact(register).is_contiguous()
