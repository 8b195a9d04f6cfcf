"""Passes: products with weights, and what is fused with them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...choices import Activation, NormKind
from ...decode.calls.named_calls import Call, Register
from ...decode.ranks.rank_calls import COLLECTIVES, summed
from ...registry import FLOAT_DTYPES, PLAIN_TENSORS
from .. import marks
from ..lowering import takes_product
from ..recorded_step import Recording, read_by

_aten = torch.ops.aten

#: calls between a product and what takes slices of it
_SLICES = (
    *(_aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default, operator.getitem),
    *(_aten.view.default, _aten._unsafe_view.default, _aten.transpose.int, _aten.unsqueeze.default),
    *(_aten.select.int, _aten.squeeze.dim, _aten.mul.Tensor),
)


def matrix_products(recording: Recording, model: nn.Module) -> None:
    """Pass: make every product of an activation with a matrix of the model a :func:`..marks.linear`."""
    for call in recording.calls:
        if call.op is marks.matmul and _is_matrix(call.arguments["b"]) and isinstance(call.arguments["a"], Register):
            _set_linear(call, call.arguments["a"], call.arguments["b"], None)
        elif call.op is _aten.mm.default and _is_matrix(call.arguments["mat2"]):
            _set_linear(call, call.arguments["self"], call.arguments["mat2"], None)
        elif call.op is _aten.addmm.default and _is_matrix(call.arguments["mat2"]):
            if call.arguments.get("beta", 1) == call.arguments.get("alpha", 1) == 1:
                if isinstance(call.arguments["self"], torch.Tensor) and call.arguments["self"].dim() == 1:
                    _set_linear(call, call.arguments["mat1"], call.arguments["mat2"], call.arguments["self"])


def products_from_the_left(recording: Recording, model: nn.Module) -> None:
    """Pass: replace the product of a matrix of the model with columns by one of rows, viewed as columns again."""
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not marks.matmul or not _is_matrix(call.arguments["a"]):
            continue
        columns = call.arguments["b"]
        fact = recording.fact(columns)
        if not isinstance(columns, Register) or fact.dim() != 3:
            continue
        rows = recording.call(_aten.transpose.int, fact.mT, self=columns, dim0=1, dim1=2)
        out = recording.fact(call.out)
        product = recording.call(marks.linear, out.mT, x=rows.out, weight=call.arguments["a"], bias=None)
        seen = Call(_aten.transpose.int, {"self": product.out, "dim0": 1, "dim1": 2}, call.out)
        instead[id(call)] = [rows, product, seen]
    recording.rewrite(instead, {})


def _is_matrix(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2


def _set_linear(call: Call, x: Any, matrix: torch.Tensor, bias: Any) -> None:
    """Make a call the product with ``matrix`` [in_features, out_features], whichever way that lies."""
    call.op = marks.linear
    if matrix.stride(0) == 1 and matrix.stride(-1) != 1:
        call.arguments = {"x": x, "weight": matrix.t(), "bias": bias}
    else:
        call.arguments = {"x": x, "weight": matrix, "bias": bias, "transposed": True}


#: experts whose ops add a residual
_EXPERTS = (marks.experts, marks.routed_experts)
#: calls on rows, in whatever order these lie -> the arguments that are rows
_ON_ROWS: dict[Any, tuple[str, ...]] = {
    marks.linear: ("x",),
    marks.activated: ("x",),
    marks.experts: ("x",),
    **{each: ("x",) for each in COLLECTIVES},
    _aten.sigmoid.default: ("self",),
    _aten.mul.Tensor: ("self", "other"),
    _aten.add.Tensor: ("self", "other"),
}
_FLATTENING = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)


def unflattened(recording: Recording, model: nn.Module) -> None:
    """Pass: let a call on rows that were flattened take the rows as they were."""
    producers = recording.producers()
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        out = recording.fact(call.out) if call.op in _ON_ROWS else None
        if out is None or call.out.index in recording.mutated:
            continue
        given = {name: call.arguments[name] for name in _ON_ROWS[call.op]}
        rows = {
            name: _before_flattening(recording, producers, each)
            for name, each in given.items()
            if not isinstance(each, (int, float))
        }
        if None in rows.values() or len({recording.fact(each).shape[:-1] for each in rows.values()}) != 1:
            continue
        leading = recording.fact(next(iter(rows.values()))).shape[:-1]
        made = recording.register(out.new_empty(*leading, out.shape[-1]))
        flat = Call(_aten.view.default, {"self": made, "size": list(out.shape)}, call.out)
        call.arguments, call.out = call.arguments | rows, made
        instead[id(call)] = [call, flat]
        producers |= {made.index: call, flat.out.index: flat}
    recording.rewrite(instead, {})


def _before_flattening(recording: Recording, producers: dict[int, Call], register: Any) -> Register | None:
    """Return what a register of rows was before all dimensions but the last became one; None if it was none."""
    view = producers.get(getattr(register, "index", -1))
    if view is None or view.op not in _FLATTENING:
        return None
    rows = view.arguments["self"]
    if not isinstance(rows, Register) or rows.index in recording.mutated:
        return None
    before, after = recording.fact(rows), recording.fact(view.out)
    return rows if after.dim() == 2 and before.dim() > 2 and before.shape[-1] == after.shape[-1] else None


def split_products(recording: Recording, model: nn.Module) -> None:
    """Pass: replace a product that is only read in slices of its features by a product with rows of its matrix for
    each slice, if no call takes slices as they lie."""
    users, together = recording.users(), _taken_in_slices(recording)
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not marks.linear or call.arguments.get("transposed") or not _plain(call.arguments["weight"]):
            continue
        if call.out.index in together:
            continue
        readers = users.get(call.out.index, [])
        slices = [read for each in readers if (read := _slices(recording, each, call.out, users)) is not None]
        if not slices or len(slices) < len(readers):
            continue
        made: list[Call] = []
        for each, found in zip(readers, slices):
            for register, start, length in found:
                weight, bias = call.arguments["weight"], call.arguments.get("bias")
                part = {
                    "weight": weight.narrow(0, start, length),
                    "bias": None if bias is None else bias.narrow(0, start, length),
                }
                made.append(Call(marks.linear, call.arguments | part, register))
            instead[id(each)] = []
        instead[id(call)] = made
        for each in readers:
            if each.op is not _aten.slice.Tensor:
                instead |= {id(item): [] for item in users.get(each.out.index, [])}
    recording.rewrite(instead, {})


def _taken_in_slices(recording: Recording) -> set[int]:
    """Return the registers that calls which take any strides read, also through views."""
    producers, found = recording.producers(), set()
    waiting = [each for call in recording.calls if call.op in marks.STRIDED for each in read_by(call)]
    while waiting:
        register = waiting.pop()
        found.add(register.index)
        call = producers.get(register.index)
        if call is not None and call.op in _SLICES and register.index not in recording.mutated:
            waiting += read_by(call)
    return found


def _slices(recording: Recording, call: Any, of: Register, users: dict) -> list[tuple[Register, int, int]] | None:
    """Return the registers that hold slices of the last dimension, with start and length; None without slices."""
    if call is None:
        return None
    whole = recording.fact(of)
    last = whole.dim() - 1
    if call.op is _aten.slice.Tensor:
        if call.arguments.get("dim", 0) % whole.dim() != last or call.arguments.get("step", 1) != 1:
            return None
        start, size = call.arguments.get("start") or 0, recording.fact(call.out).shape[-1]
        return [(call.out, start % whole.shape[-1] if start < 0 else start, size)]
    if call.op in (_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default):
        if call.arguments.get("dim", 0) % whole.dim() != last:
            return None
        items = users.get(call.out.index, [])
        if any(item is None or item.op is not operator.getitem for item in items):
            return None
        sizes = [each.shape[-1] for each in recording.facts[call.out.index]]
        return [(item.out, sum(sizes[: item.arguments["b"]]), sizes[item.arguments["b"]]) for item in items]
    return None


def _plain(weight: Any) -> bool:
    return type(weight) in PLAIN_TENSORS and weight.dim() == 2 and weight.dtype in FLOAT_DTYPES


def is_bare(call: Call) -> bool:
    """Whether a product is one with a matrix [out_features, in_features], and nothing is added or applied to it."""
    given = call.arguments
    if any(given.get(name) is not None for name in ("bias", "residual")) or given.get("transposed"):
        return False
    return given.get("activation", Activation.NONE) == Activation.NONE


def gates(recording: Recording, model: nn.Module) -> None:
    """Pass: make one call of ``activation(x @ gate) * (x @ up)``."""
    only = only_reader(recording)
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not _aten.mul.Tensor:
            continue
        for one, other in (("self", "other"), ("other", "self")):
            acted, up = only(call.arguments[one], marks.activated), only(call.arguments[other], marks.linear)
            gate = None if acted is None else only(acted.arguments["x"], marks.linear)
            if acted is None or gate is None or up is None or not _alike(recording, gate, up):
                continue
            if acted.arguments["activation"] == Activation.RELU:
                continue
            made = Call(
                marks.gated,
                {
                    "x": gate.arguments["x"],
                    "gate_weight": gate.arguments["weight"],
                    "up_weight": up.arguments["weight"],
                    "activation": acted.arguments["activation"],
                },
                call.out,
            )
            instead |= {id(gate): [], id(acted): [], id(up): [], id(call): [made]}
            break
    recording.rewrite(instead, {})


def activations(recording: Recording, model: nn.Module) -> None:
    """Pass: make one call of a product and the activation behind it."""
    only = only_reader(recording)
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        product = only(call.arguments["x"], marks.linear) if call.op is marks.activated else None
        if product is not None and takes_product(recording, product):
            made = Call(marks.linear, product.arguments | {"activation": call.arguments["activation"]}, call.out)
            instead |= {id(product): [], id(call): [made]}
    recording.rewrite(instead, {})


def only_reader(recording: Recording) -> Callable[[Any, Any], Call | None]:
    """Make a function that returns the call of an op that makes a register which one call alone reads; else None."""
    producers, users = recording.producers(), recording.users()

    def only(register: Any, op: Any) -> Call | None:
        call = producers.get(register.index) if isinstance(register, Register) else None
        return call if call is not None and call.op is op and len(users[register.index]) == 1 else None

    return only


def _alike(recording: Recording, one: Call, other: Call) -> bool:
    """Whether two products are of one input and of matrices that ``ops.gemv_swiglu`` takes together."""
    if not takes_product(recording, one) or not takes_product(recording, other):
        return False
    if one.arguments["x"].index != other.arguments["x"].index:
        return False
    if not (is_bare(one) and is_bare(other)):
        return False
    return one.arguments["weight"].shape == other.arguments["weight"].shape


def residuals(recording: Recording, model: nn.Module) -> None:
    """Pass: make a sum with a product, or with a norm, part of that product or norm."""
    _reassociate(recording)
    producers, users = recording.producers(), recording.users()
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not _aten.add.Tensor or call.arguments.get("alpha", 1) != 1:
            continue
        for one, other in (("other", "self"), ("self", "other")):
            product = producers.get(getattr(call.arguments[one], "index", -1))
            residual = call.arguments[other]
            if product is None or not _adds(recording, product) or len(users[product.out.index]) != 1:
                continue
            if product.arguments.get("residual") is not None or not isinstance(residual, Register):
                continue
            facts = recording.fact(call.out), recording.fact(product.out), recording.fact(residual)
            if len({(each.shape, each.dtype) for each in facts}) > 1:
                continue
            call.op, call.arguments = product.op, product.arguments | {"residual": residual}
            instead[id(product)] = []
            break
    recording.rewrite(instead, {})


def _adds(recording: Recording, call: Call) -> bool:
    """Whether an op that adds a residual takes a product or a norm."""
    if call.op is marks.linear:
        return takes_product(recording, call)
    if call.op in (*_EXPERTS, summed):
        return True
    if call.op is not marks.normed:
        return False
    return call.arguments["norm"].kind != NormKind.LAYER or not call.arguments.get("unit_offset")


def _reassociate(recording: Recording) -> None:
    """Let ``(a + b) + x`` of two products, or experts, a and b be ``b + (a + x)``, if x is there before them."""
    producers, users = recording.producers(), recording.users()
    order = {call.out.index: place for place, call in enumerate(recording.calls)}

    def product(register: Any) -> bool:
        call = producers.get(getattr(register, "index", -1))
        known = (marks.linear, summed, *_EXPERTS)
        return call is not None and call.op in known and len(users[register.index]) == 1

    for call in recording.calls:
        if call.op is not _aten.add.Tensor or call.arguments.get("alpha", 1) != 1:
            continue
        for one, other in (("self", "other"), ("other", "self")):
            inner, x = producers.get(getattr(call.arguments[one], "index", -1)), call.arguments[other]
            if inner is None or inner.op is not _aten.add.Tensor or len(users[inner.out.index]) != 1:
                continue
            a, b = inner.arguments["self"], inner.arguments["other"]
            if not (product(a) and product(b) and isinstance(x, Register)) or inner.arguments.get("alpha", 1) != 1:
                continue
            if order.get(x.index, -1) > order[inner.out.index] or recording.fact(x).shape != recording.fact(a).shape:
                continue
            inner.arguments = {"self": x, "other": a}
            call.arguments = {"self": inner.out, "other": b}
            break


def norms_in_front(recording: Recording, model: nn.Module) -> None:
    """Pass: let products apply the norm that they read, where kernels have it."""
    producers = recording.producers()
    for call in recording.calls:
        if call.op not in (marks.linear, marks.gated, marks.projected_attention, marks.routed_experts):
            continue
        normed = producers.get(getattr(call.arguments["x"], "index", -1))
        if normed is None or normed.op is not marks.normed:
            continue
        if any(normed.arguments.get(name) is not None for name in ("residual", "factor")):
            continue
        norm = normed.arguments["norm"]
        if normed.arguments.get("unit_offset"):
            if norm.kind != NormKind.RMS:
                continue
            norm = replace(norm, kind=NormKind.RMS_OFFSET)
        if norm.kind.is_rms and norm.weight is None:
            continue
        if call.op is marks.linear and not takes_product(recording, call):
            continue
        given = (call.arguments.get(name) for name in ("weight", "gate_weight", "gate_up_weight"))
        weight = next((each for each in given if each is not None), None)
        if isinstance(norm.weight, Register) or isinstance(norm.bias, Register):
            continue
        if getattr(normed.arguments["x"], "index", -1) in recording.mutated:  # x may be overwritten by then
            continue
        if weight is not None and norm.weight is not None and norm.weight.dtype != weight.dtype:
            continue
        call.arguments = call.arguments | {"x": normed.arguments["x"], "norm": norm}
