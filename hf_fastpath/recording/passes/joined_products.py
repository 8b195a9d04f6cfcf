"""Pass: products that read the same row."""

from __future__ import annotations

import torch
from torch import nn

from ...choices import Activation
from ...decode.named_calls import Call, Register
from ...ops.joined_gemv import MAX_WEIGHTS
from .. import marks
from ..lowering import takes_product
from ..recording import Recording

_aten = torch.ops.aten

#: bytes between the starts of slices, which kernels read so many at a time
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
        for first in range(0, len(calls) - 1, MAX_WEIGHTS):
            together = calls[first : first + MAX_WEIGHTS]
            instead |= {id(each): [] for each in together} | {id(together[0]): _joined(recording, together)}
    recording.rewrite(instead, {})


def _joins(recording: Recording, call: Call) -> bool:
    """Whether a product is one of a matrix alone, with features that others can lie behind."""
    given, x, weight = call.arguments, call.arguments["x"], call.arguments["weight"]
    if not isinstance(x, Register) or x.index in recording.mutated or not takes_product(recording, call):
        return False
    if any(given.get(name) is not None for name in ("bias", "residual")) or given.get("transposed"):
        return False
    is_linear = given.get("activation", Activation.NONE) == Activation.NONE
    return is_linear and len(weight) * weight.element_size() % _ALIGNED == 0


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
