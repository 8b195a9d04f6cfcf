"""Passes: products that read the same row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ...decode.calls.named_calls import Call, Register
from ...decode.ranks.rank_calls import gathered
from ...ops.gather_ranks import MAX_PARTS
from ...ops.joined_gemv import MAX_WEIGHTS
from ...ops.peers import ELEMENTS
from .. import marks
from ..lowering import takes_product
from ..recorded_step import Recording
from .products import is_bare

_aten = torch.ops.aten

#: bytes that kernels read at a time, and that slices of more than one number start at a multiple of
_ALIGNED = 16


def joined_products(recording: Recording, model: nn.Module) -> None:
    """Pass: make one call of products of the same row with several weights.

    Slices of one row are contiguous. Those of several rows are not, and what reads them would have to copy them.
    """
    if recording.batch * recording.query_len > 1:
        return
    users = recording.users()
    alike: dict[tuple, list[Call]] = {}
    for call in recording.calls:
        if call.op is marks.linear and _joins(recording, call):
            norm, x = call.arguments.get("norm"), call.arguments["x"]
            of_norm = norm and norm.key
            most = MAX_PARTS if _are_gathers(users[call.out.index]) else MAX_WEIGHTS
            alike.setdefault((most, x.index, call.arguments["weight"].dtype, of_norm), []).append(call)
    instead: dict[int, list[Call]] = {}
    for (most, *_), calls in alike.items():
        for together in _groups(calls, most):
            instead |= {id(each): [] for each in together} | {id(together[0]): _joined(recording, together)}
    recording.rewrite(instead, {})


def joined_gathers(recording: Recording, model: nn.Module) -> None:
    """Pass: let ranks gather at once what one product of several weights gives."""
    users = recording.users()
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not marks.joined_linear:
            continue
        slices = users[call.out.index]
        gathers = [each for part in slices if (each := _even_gather(users, part)) is not None]
        if len(gathers) == len(slices):
            instead |= {id(each): [] for each in (*slices, *gathers)}
            instead[id(call)] = [call, *_gathered(recording, call.out, gathers)]
    recording.rewrite(instead, {})


def _even_gather(users: dict[int, list[Any]], part: Call | None) -> Call | None:
    """Return the call by which ranks gather a slice of as many features on each of them, if nothing else reads it."""
    readers = users.get(part.out.index, []) if part is not None and part.op is _aten.slice.Tensor else []
    if len(readers) != 1 or readers[0] is None or readers[0].op is not gathered:
        return None
    shard = readers[0].arguments["shard"]
    is_even = shard.total == shard.ranks.size * shard.features and shard.features % ELEMENTS == 0
    return readers[0] if is_even else None


def _gathered(recording: Recording, joined: Register, gathers: list[Call]) -> Iterator[Call]:
    """Yield one gather, and slices of it in place of what ``gathers`` gave."""
    shards = [each.arguments["shard"] for each in gathers]
    features, total = (sum(getattr(each, name) for each in shards) for name in ("features", "total"))
    ends = [0, *accumulate(each.features for each in shards[:-1])][-2:]
    shard = replace(shards[0], first=shards[0].ranks.rank * features, features=features, total=total)
    made = recording.register(recording.fact(gathers[0].out).new_empty(*recording.fact(joined).shape[:-1], total))
    yield Call(gathered, {"x": joined, "shard": shard} | dict(zip(("first_end", "second_end"), ends)), made)
    end = 0
    for each in gathers:
        start, end = end, end + each.arguments["shard"].total
        yield Call(_aten.slice.Tensor, {"self": made, "dim": -1, "start": start, "end": end}, each.out)


def _are_gathers(readers: list[Any]) -> bool:
    return all(each is not None and each.op is gathered for each in readers)


def _groups(calls: list[Call], most: int) -> Iterator[list[Call]]:
    """Yield products that become one, two to ``most`` each."""
    while calls:
        group: list[Call] = []
        end, rest = 0, []  # bytes
        for call in calls:
            weight = call.arguments["weight"]
            fits = end % _ALIGNED == 0 or len(weight) == 1
            if fits and len(group) < most:
                group.append(call)
                end += len(weight) * weight.element_size()
            else:
                rest.append(call)
        if len(group) > 1:
            yield group
        calls = rest


def _joins(recording: Recording, call: Call) -> bool:
    """Whether the op takes a product beside others."""
    given, x = call.arguments, call.arguments["x"]
    if not isinstance(x, Register) or x.index in recording.mutated or not takes_product(recording, call):
        return False
    return is_bare(call) and not given["weight"].is_meta  # which stands for a quantized one


def _joined(recording: Recording, calls: list[Call]) -> list[Call]:
    """Return one product, and slices of it in place of what the others gave."""
    weights, shape = [call.arguments["weight"] for call in calls], recording.fact(calls[0].out).shape
    like = recording.fact(calls[0].out).new_empty(*shape[:-1], sum(map(len, weights)))
    given = {name: calls[0].arguments[name] for name in ("x", "norm") if name in calls[0].arguments}
    made = [Call(marks.joined_linear, given | {"weights": weights}, recording.register(like))]
    end = 0
    for call, weight in zip(calls, weights):
        start, end = end, end + len(weight)
        part = {"self": made[0].out, "dim": -1, "start": start, "end": end}
        made.append(Call(_aten.slice.Tensor, part, call.out))
    return made
