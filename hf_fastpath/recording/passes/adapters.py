"""Pass: LoRA beside a product."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...decode.calls.named_calls import Call, Register
from ...decode.model.weight import AdaptedWeight, Adapter
from ...registry import FLOAT_DTYPES, PLAIN_TENSORS
from .. import marks
from ..recorded_step import Recording
from ..stand_ins import StandIns
from .products import is_bare

_aten = torch.ops.aten
#: adapters of one weight
_MOST = 16


def adapters(recording: Recording, model: nn.Module) -> None:
    """Pass: make one product of ``x @ weight.T + scale * ((x @ down.T) @ up.T)`` and the casts in it: that with an
    adapted weight.

    A matrix without data stands for that weight, see :mod:`..stand_ins`.
    """
    found = _Search(recording)
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        whole = found.whole(call)
        if whole is not None:
            product, weight = whole
            matrix = product.arguments["weight"]
            stand_in = torch.empty(matrix.shape, dtype=matrix.dtype, device="meta")
            recording.stand_ins.append((stand_in, weight))
            instead[id(call)] = [Call(marks.linear, product.arguments | {"weight": stand_in}, call.out)]
    recording.rewrite(instead, {})


class _Search:
    """What a list computes, asked from its sums backwards."""

    def __init__(self, recording: Recording):
        self._recording, self.stand_ins = recording, StandIns(recording)
        self._producers, self._users = recording.producers(), recording.users()

    def whole(self, call: Call) -> tuple[Call, AdaptedWeight] | None:
        """Return the base product of what a call makes, and the weight that makes all of it; None if it is no such sum,
        or another call goes on with the sum."""
        last = self._lone(call.arguments["self"], _aten.add.Tensor) if _is_cast(call) else call
        if last is None or last.op is not _aten.add.Tensor:
            return None
        users = self._users.get(call.out.index, [])
        if last is call and len(users) == 1 and users[0] is not None and self._goes_on(users[0], call.out):
            return None
        x: Register | None = None
        behind: list[Adapter] = []
        product: Call | None = last
        while product is not None and product.op is _aten.add.Tensor:
            part = self._part(product)
            if part is None or (x is not None and part[2].index != x.index):
                return None
            before, adapter, x = part
            behind.insert(0, adapter)
            product = self._lone(before, marks.linear) or self._lone(before, _aten.add.Tensor)
        if product is None or x is None or not self._fits(product, x, behind, call):
            return None
        weight = self.stand_ins.weight(product.arguments["weight"], bool(product.arguments.get("transposed")))
        if isinstance(weight, AdaptedWeight):  # another run of the pass has found the first ones
            behind, weight = [*weight.adapters, *behind], weight.base
        return (product, AdaptedWeight(weight, tuple(behind))) if len(behind) <= _MOST else None

    def _lone(self, register: Any, op: Any) -> Call | None:
        """Return the call of an op that makes a register which one call alone reads; else None."""
        call = self._producers.get(getattr(register, "index", -1))
        return call if call is not None and call.op is op and len(self._users[register.index]) == 1 else None

    def _goes_on(self, user: Call, out: Register) -> bool:
        """Whether a call that reads a sum is the sum with another adapter, or the cast behind all sums."""
        if _is_cast(user):
            return self._recording.fact(out).dtype == torch.float32
        part = self._part(user) if user.op is _aten.add.Tensor else None
        return part is not None and part[0].index == out.index

    def _part(self, call: Call) -> tuple[Register, Adapter, Register] | None:
        """Return what a sum adds an adapter's product to, the adapter, and the adapter's input before a cast."""
        for one, other in (("self", "other"), ("other", "self")):
            before, found = call.arguments[one], self._adapter(call.arguments[other])
            if found is not None and isinstance(before, Register) and call.arguments.get("alpha", 1) == 1:
                return before, *found
        return None

    def _adapter(self, register: Any) -> tuple[Adapter, Register] | None:
        scaled, scale = self._lone(register, _aten.mul.Tensor), 1.0
        if scaled is not None:
            register, scale = scaled.arguments["self"], scaled.arguments["other"]
        up = self._lone(register, marks.linear)
        down = None if up is None else self._lone(up.arguments["x"], marks.linear)
        if up is None or down is None or type(scale) not in (int, float) or not is_bare(up) or not is_bare(down):
            return None
        of_down, of_up = (each.arguments["weight"] for each in (down, up))
        if not all(_plain(each) and each not in self.stand_ins for each in (of_down, of_up)):
            return None
        cast = self._producers.get(getattr(down.arguments["x"], "index", -1))
        x = cast.arguments["self"] if cast is not None and _is_cast(cast) else down.arguments["x"]
        return (Adapter(of_down, of_up, float(scale)), x) if isinstance(x, Register) else None

    def _fits(self, product: Call, x: Register, behind: list[Adapter], call: Call) -> bool:
        """Whether adapters are of the product's input, and all is of types that ops take."""
        fact, matrix = self._recording.fact, product.arguments["weight"]
        if getattr(product.arguments["x"], "index", -1) != x.index or not isinstance(matrix, torch.Tensor):
            return False
        if matrix not in self.stand_ins and not _plain(matrix):
            return False
        if (bias := product.arguments.get("bias")) is not None:
            if not isinstance(bias, torch.Tensor) or bias.dtype != matrix.dtype:
                return False
        out = matrix.shape[1 if product.arguments.get("transposed") else 0]
        if fact(call.out).shape != fact(product.out).shape or any(len(each.up) != out for each in behind):
            return False  # one number for all features, perhaps
        outer = {each.dtype for each in (matrix, fact(x), fact(product.out), fact(call.out))}
        inner = {each.dtype for adapter in behind for each in (adapter.down, adapter.up)}
        return len(outer) == len(inner) == 1 and outer <= set(FLOAT_DTYPES) and inner <= outer | {torch.float32}


def _is_cast(call: Call) -> bool:
    return call.op is _aten._to_copy.default and not set(call.arguments) - {"self", "dtype"}


def _plain(weight: Any) -> bool:
    return (
        type(weight) in PLAIN_TENSORS and weight.dim() == 2 and weight.stride(-1) == 1 and weight.dtype in FLOAT_DTYPES
    )
