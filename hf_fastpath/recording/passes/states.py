"""Passes: what a step does with a state, if a kernel does it: short convolutions, gated delta nets, state spaces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ... import ops
from ...decode.calls.named_calls import Call
from ...ops.short_convolution import ACTIVATIONS
from .. import marks
from ..probing import MISFITS, agree, evaluate, seeded
from ..recorded_step import Recording, is_effect
from .attention import structure_of
from .regions import Borders, Region

_aten = torch.ops.aten

#: regions with more calls are left alone
_MOST_CALLS = 160
#: what a reference or the calls of a region may raise on shapes that do not go together
_MISFITS = (*MISFITS, IndexError)
#: op and sizes of a sequence's part of a region -> which of the ways to call the op was right when one was last tried:
#: models have many such regions, and are recorded for several numbers of sequences
_RIGHT: dict[tuple, int] = {}


@dataclass(frozen=True)
class _Given:
    """An argument of an op: an input or a parameter of a region, or its state, seen in a shape.

    Attributes:
        kind: "input", "parameter" or "state".
        place: index of the input or parameter in the region.
        shape: the shape in which the op takes the argument.
    """

    kind: str
    place: int
    shape: tuple[int, ...]


#: name of an op's argument -> what the argument is, or a constant
_Roles = dict[str, Any]


def short_convolutions(recording: Recording, model: nn.Module) -> None:
    """Pass: replace a convolution over the last few tokens by ``ops.short_convolution``."""
    _replace(recording, marks.short_convolution, ops.short_convolution, _convolution_roles, (3,), -1)


def gated_delta_steps(recording: Recording, model: nn.Module) -> None:
    """Pass: replace a token's step of a gated delta net by ``ops.gated_delta_step``."""
    _replace(recording, marks.gated_delta_step, ops.gated_delta_step, _delta_roles, (4,), -2)


def selective_state_steps(recording: Recording, model: nn.Module) -> None:
    """Pass: replace a token's step of a state space by ``ops.selective_state_step``."""
    _replace(recording, marks.selective_state_step, ops.selective_state_step, _space_roles, (3, 4), -1)


def _replace(
    recording: Recording,
    mark: Any,
    op: Any,
    roles_of: Callable[[_Shapes], Iterator[_Roles]],
    dims: tuple[int, ...],
    summed: int,
) -> None:
    """Put ``mark`` in the place of the largest region around each state that computes what ``op`` does.

    Args:
        roles_of: yields what the inputs of a region may be to the op.
        dims: numbers of dimensions that the op's state may have.
        summed: the dimension of a state that its result does not have.
    """
    states = [each for found in recording.states for each in found if recording.fact(each).dim() in dims]
    if not states:
        return
    borders = Borders(recording)
    known: dict[tuple, _Roles | None] = {}
    found: list[tuple[Region, _Roles]] = []
    for state in states:
        shape = recording.fact(state).shape
        for region in borders.regions(state, math.prod(shape) // shape[summed]):
            if len(region.calls) > _MOST_CALLS:
                continue
            sources = [state, *region.inputs, region.result]
            strides = tuple(each.stride() for each in region.parameters)
            key = structure_of(recording, sources, [], region.calls), strides
            if key not in known:
                known[key] = _tried(recording, region, op, roles_of)
            if (tried := known[key]) is not None:
                found.append((region, tried))
                break
    instead: dict[int, list[Call]] = {}
    producers = recording.producers()
    for region, roles in found:
        instead |= {id(call): [] for call in region.calls if is_effect(call) or call.out.index in recording.mutated}
        instead[id(producers[region.result.index])] = _calls(recording, region, mark, roles)
        recording.mutated.discard(region.result.index)
    recording.rewrite(instead, {})


def _calls(recording: Recording, region: Region, mark: Any, roles: _Roles) -> list[Call]:
    """Return the calls that take the place of a region."""
    made: list[Call] = []
    arguments = dict(roles)
    for name, given in roles.items():
        if not isinstance(given, _Given):
            continue
        if given.kind == "parameter":
            arguments[name] = _held(region.parameters[given.place]).view(given.shape)
            continue
        register = region.state if given.kind == "state" else region.inputs[given.place]
        fact = recording.fact(register)
        if tuple(fact.shape) != given.shape:
            like = fact.new_empty(given.shape)
            made.append(recording.call(_aten.view.default, like, self=register, size=list(given.shape)))
            register = made[-1].out
        arguments[name] = register
    result = recording.fact(region.result)
    made.append(recording.call(mark, result.new_empty(roles[_LIKE[mark]].shape), **arguments))
    heads = {"self": made[-1].out, "size": list(result.shape)}
    return [*made, Call(_aten.view.default, heads, region.result)]


#: mark -> the argument whose shape the result has
_LIKE = {marks.short_convolution: "x", marks.gated_delta_step: "v", marks.selective_state_step: "x"}


def _held(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter without the dimensions along which a view repeats it."""
    for dim in reversed(range(parameter.dim())):
        if parameter.stride(dim) == 0:
            parameter = parameter.detach().select(dim, 0)
    return parameter


# ---- comparing ------------------------------------------------------------------------------------------------------


@dataclass
class _Shapes:
    """Sizes of what a region takes and gives.

    Attributes:
        batch: number of sequences.
        state: shape of the state.
        inputs, parameters: number of elements of each.
    """

    batch: int
    state: tuple[int, ...]
    inputs: list[int]
    parameters: list[int]


def _tried(
    recording: Recording, region: Region, op: Any, roles_of: Callable[[_Shapes], Iterator[_Roles]]
) -> _Roles | None:
    """Return how ``op`` computes what a region does, or None."""
    state, result = recording.fact(region.state), recording.fact(region.result)
    facts = [recording.fact(each) for each in region.inputs]
    if any(not each.is_floating_point() for each in facts) or result.dtype not in {each.dtype for each in facts}:
        return None
    shapes = _Shapes(
        recording.batch,
        tuple(state.shape),
        [each.numel() for each in facts],
        [_held(each).numel() for each in region.parameters],
    )
    possible = list(itertools.islice(roles_of(shapes), 1000))
    if not possible:
        return None
    inputs_of_one = (size // shapes.batch for size in shapes.inputs)
    kind = (op, *shapes.state[1:], *inputs_of_one, *shapes.parameters, len(possible))
    likely = _RIGHT.get(kind, 0)
    with seeded():
        before = torch.randn(state.shape, dtype=torch.float64)
        inputs = [torch.randn(each.shape, dtype=torch.float64) for each in facts]
        parameters = [torch.randn(_held(each).shape, dtype=torch.float64) for each in region.parameters]
    stand_in = {id(each): _spread(values, each) for each, values in zip(region.parameters, parameters)}
    after = before.clone()
    given = {each.index: torch.zeros(recording.fact(each).shape, dtype=torch.float64) for each in region.blanks}
    given |= {region.state.index: after} | {each.index: value for each, value in zip(region.inputs, inputs)}
    try:
        expected = evaluate(region.calls, given, stand_in)[region.result.index]
    except _MISFITS:
        return None
    values = {"input": inputs, "parameter": parameters}
    for number in (likely, *(each for each in range(len(possible)) if each != likely)):
        roles = possible[number]
        state_name = next(name for name, each in roles.items() if isinstance(each, _Given) and each.kind == "state")
        mine = before.clone()
        arguments = {
            name: values[each.kind][each.place].reshape(each.shape)
            if isinstance(each, _Given) and name != state_name
            else each
            for name, each in roles.items()
        }
        arguments[state_name] = mine.view(roles[state_name].shape)
        try:
            made = op.reference(**arguments).reshape(expected.shape)
        except _MISFITS:
            continue
        if "scale" in roles:
            roles = roles | {"scale": _ratio(expected, made)}
            made = made * roles["scale"]
        if agree(expected, made) and agree(after, mine) and _takes(op, recording, region, roles):
            _RIGHT[kind] = number
            return roles
    return None


def _ratio(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the factor with which ``other`` is nearest to ``one``."""
    ratio = float((one * other).sum() / (other * other).sum().clamp_min(1e-300))
    return ratio if math.isfinite(ratio) else 1.0


def _spread(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return ``values``, which are shaped as what :func:`_held` gives, in the shape of the parameter."""
    for dim in range(parameter.dim()):
        if parameter.stride(dim) == 0:
            values = values.unsqueeze(dim)
    return values.expand(parameter.shape)


def _takes(op: Any, recording: Recording, region: Region, roles: _Roles) -> bool:
    """Whether the kernel takes tensors of these dtypes, shapes and strides."""
    facts = {"input": [recording.fact(each) for each in region.inputs], "state": [recording.fact(region.state)]}
    facts["parameter"] = [_held(each) for each in region.parameters]
    arguments = {
        name: facts[each.kind][each.place].reshape(each.shape) if isinstance(each, _Given) else each
        for name, each in roles.items()
    }
    return facts["state"][0].is_contiguous() and not op.why_not(**arguments)


# ---- roles ----------------------------------------------------------------------------------------------------------


def _assigned(count: int, *wanted: Callable[[int], bool]) -> Iterator[tuple[int, ...]]:
    """Yield all ways to give ``count`` things to as many roles, each of which takes the numbers that it wants."""
    if count == len(wanted):
        for order in itertools.permutations(range(count)):
            if all(takes(place) for takes, place in zip(wanted, order)):
                yield order


def _parameters(shapes: _Shapes, *sizes: int) -> Iterator[list[int | None]]:
    """Yield all ways to give every parameter a role: a parameter's place, or None, for each role; the first has one."""
    count = len(shapes.parameters)
    for roles in itertools.combinations(range(len(sizes)), count):
        if not roles or roles[0] != 0:
            continue
        wanted = [lambda place, size=sizes[role]: shapes.parameters[place] == size for role in roles]
        for order in _assigned(count, *wanted):
            found: list[int | None] = [None] * len(sizes)
            for role, place in zip(roles, order):
                found[role] = place
            yield found


def _parameter(place: int | None, *shape: int) -> _Given | None:
    return None if place is None else _Given("parameter", place, shape)


def _convolution_roles(shapes: _Shapes) -> Iterator[_Roles]:
    batch, channels, width = shapes.state
    row = batch, channels
    if not 1 <= len(shapes.inputs) <= 3 or {*shapes.inputs} != {batch * channels}:
        return
    gates = [(), ("input_gate",), ("output_gate",), ("input_gate", "output_gate")]
    for weight, bias in _parameters(shapes, channels * width, channels):
        for names in (("x", *each) for each in gates if len(each) + 1 == len(shapes.inputs)):
            for order in itertools.permutations(range(len(names))):
                roles: _Roles = {name: _Given("input", place, row) for name, place in zip(names, order)}
                roles |= dict(conv_state=_Given("state", 0, shapes.state), bias=_parameter(bias, channels))
                roles["weight"] = _parameter(weight, channels, width)
                yield from (roles | {"activation": each} for each in ACTIVATIONS)


def _delta_roles(shapes: _Shapes) -> Iterator[_Roles]:
    batch, heads, k_dim, v_dim = shapes.state
    sizes = [size // batch for size in shapes.inputs]
    key = lambda place: sizes[place] % k_dim == 0 and heads % max(1, sizes[place] // k_dim) == 0  # noqa: E731
    decay = lambda place: sizes[place] in (heads, heads * k_dim)  # noqa: E731
    value, beta = (lambda place, size=size: sizes[place] == size for size in (heads * v_dim, heads))
    for q, k, v, a, b in _assigned(len(sizes), key, key, value, decay, beta):
        if sizes[q] != sizes[k]:
            continue
        of_gate = (heads,) if sizes[a] == heads else (heads, k_dim)
        of_key = batch, sizes[q] // k_dim, k_dim
        roles: _Roles = dict(q=_Given("input", q, of_key), k=_Given("input", k, of_key))
        roles |= dict(v=_Given("input", v, (batch, heads, v_dim)), a=_Given("input", a, (batch, *of_gate)))
        roles |= dict(b=_Given("input", b, (batch, heads)), state=_Given("state", 0, shapes.state))
        for a_log, dt_bias in _parameters(shapes, heads, math.prod(of_gate)):
            if dt_bias is None:
                continue
            roles |= dict(a_log=_parameter(a_log, heads), dt_bias=_parameter(dt_bias, *of_gate))
            for l2_norm, beta_scale in ((True, 1.0), (False, 1.0), (True, 2.0), (False, 2.0)):
                yield roles | dict(scale=1.0, l2_norm=l2_norm, beta_scale=beta_scale)


def _space_roles(shapes: _Shapes) -> Iterator[_Roles]:
    batch, *heads_of, head_dim, state_size = shapes.state
    heads = math.prod(heads_of)
    sizes = [size // batch for size in shapes.inputs]
    row = batch, heads, head_dim
    group = lambda place: sizes[place] % state_size == 0 and heads % max(1, sizes[place] // state_size) == 0  # noqa: E731
    whole = lambda place: sizes[place] == heads * head_dim  # noqa: E731
    for of_step, of_rates in (((heads,), (heads,)), ((heads, head_dim), (heads, head_dim, state_size))):
        of_one = math.prod(of_step)
        step = lambda place, size=of_one: sizes[place] == size  # noqa: E731
        for names, wanted in (("x dt b c", ()), ("x dt b c z", (whole,))):
            for order in _assigned(len(sizes), whole, step, group, group, *wanted):
                places = dict(zip(names.split(), order))
                groups = sizes[places["b"]] // state_size
                if sizes[places["c"]] != groups * state_size:
                    continue
                shape = dict(x=row, z=row, dt=(batch, *of_step), b=(batch, groups, state_size))
                shape["c"] = shape["b"]
                roles: _Roles = {name: _Given("input", place, shape[name]) for name, place in places.items()}
                roles["state"] = _Given("state", 0, (*row, state_size))
                for a_log, d, dt_bias in _parameters(shapes, math.prod(of_rates), of_one, of_one):
                    yield roles | dict(
                        a_log=_parameter(a_log, *of_rates),
                        d=_parameter(d, *of_step),
                        dt_bias=_parameter(dt_bias, *of_step),
                    )
