"""Pass: products that read the same row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ...decode.named_calls import Call, Register
from ...ops.joined_gemv import MAX_WEIGHTS
from .. import marks
from ..lowering import takes_product
from ..recording import Recording
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
    alike: dict[tuple, list[Call]] = {}
    for call in recording.calls:
        if call.op is marks.linear and _joins(recording, call):
            norm, x = call.arguments.get("norm"), call.arguments["x"]
            of_norm = norm and (norm.kind, id(norm.weight), id(norm.bias), norm.eps)
            alike.setdefault((x.index, call.arguments["weight"].dtype, of_norm), []).append(call)
    instead: dict[int, list[Call]] = {}
    for calls in alike.values():
        for together in _groups(calls):
            instead |= {id(each): [] for each in together} | {id(together[0]): _joined(recording, together)}
    recording.rewrite(instead, {})


def _groups(calls: list[Call]) -> Iterator[list[Call]]:
    """Yield products that become one, two or more each."""
    while calls:
        group: list[Call] = []
        end, rest = 0, []  # bytes
        for call in calls:
            weight = call.arguments["weight"]
            fits = end % _ALIGNED == 0 or len(weight) == 1
            if fits and len(group) < MAX_WEIGHTS:
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
