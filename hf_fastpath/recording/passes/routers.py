"""Passes: what a router computes, and whom it chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from ...choices import Scoring
from ...decode.calls.named_calls import Call, Register
from ...ops.choose_experts import MAX_EXPERTS, MAX_GROUPS
from ...ops.choose_experts import reference as choose_experts
from ...ops.fused_experts import MAX_TOP_K
from ...registry import FLOAT_DTYPES, PLAIN_TENSORS
from .. import marks
from ..probing import MISFITS, agree, evaluate
from ..recorded_step import Recording, between_marks, read_by
from .attention import structure_of
from .products import is_bare

_aten = torch.ops.aten

#: rows of logits that are compared with each bias
_ROWS = 24
#: standard deviations of biases, and their means; of logits, 1 and 0
_BIASES = ((0.03, 0.0), (0.25, 0.0), (2.0, 0.0), (2.0, -9.0))
#: calls that may read nothing
_CONSTANTS = (_aten.full.default, _aten.zeros.default)
#: what the op takes if it is not told otherwise
_DEFAULTS: dict[str, Any] = dict(
    scoring=Scoring.SOFTMAX, num_groups=1, top_groups=1, group_tops=2, factor=1.0, sum_eps=0.0
)


def router_logits(recording: Recording, model: nn.Module) -> None:
    """Pass: replace a product in float32, of rows that are cast for it, by ``ops.router_logits``: of a matrix that is
    cast as well, or that is in float32 and no larger than a router's."""
    producers = recording.producers()

    def before_cast(value: Any) -> Any:
        call = producers.get(getattr(value, "index", -1))
        if call is None or call.op is not _aten._to_copy.default or call.arguments.get("dtype") != torch.float32:
            return None
        return call.arguments["self"]

    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not marks.linear or call.arguments.get("norm") is not None or not is_bare(call):
            continue
        x, weight = before_cast(call.arguments["x"]), call.arguments["weight"]
        if not isinstance(x, Register) or x.index in recording.mutated:
            continue
        dtype = expected = recording.fact(x).dtype
        if isinstance(weight, torch.Tensor) and len(weight) <= MAX_EXPERTS:
            expected = torch.float32
        else:
            weight = before_cast(weight)
        if type(weight) not in PLAIN_TENSORS or weight.dim() != 2 or weight.is_meta:  # "meta": a quantized one
            continue
        if weight.stride(-1) == 1 and weight.dtype == expected and dtype in FLOAT_DTYPES:
            instead[id(call)] = [Call(marks.router_logits, {"x": x, "weight": weight}, call.out)]
    recording.rewrite(instead, {})


def routers(recording: Recording, model: nn.Module) -> None:
    """Pass: let ``ops.choose_experts`` choose experts whose ids and weights are what the op gives of logits."""
    known: dict[Any, dict[str, Any] | None] = {}
    instead: dict[int, list[Call]] = {}
    for call in recording.calls:
        if call.op is not marks.experts:
            continue
        ids, weights = call.arguments["ids"], call.arguments["weights"]
        count = call.arguments.get("first_expert", 0) + len(call.arguments["gate_up_weight"])
        front = _front(recording, (ids, weights), count, "first_expert" in call.arguments)
        if front is None:
            continue
        places = {each.out.index: place for place, each in enumerate(front.calls)}
        key = structure_of(recording, [front.logits], [], front.calls), places.get(ids.index), places.get(weights.index)
        if key not in known:
            known[key] = _described(recording, front, ids, weights)
        if (described := known[key]) is None:
            continue
        others = {name: value for name, value in call.arguments.items() if name not in ("ids", "weights")}
        routed = dict(
            logits=front.logits,
            top_k=recording.fact(ids).shape[-1],
            rounded=recording.fact(weights).dtype == recording.fact(front.logits).dtype,
        )
        if front.bias is not None:
            routed["correction_bias"] = front.bias.detach().view(-1)
        instead[id(call)] = [Call(marks.routed_experts, others | routed | described, call.out)]
    recording.rewrite(instead, {})


@dataclass(frozen=True)
class _Front:
    """What ids and weights of experts are made of.

    Attributes:
        logits: the router's product.
        calls: those behind it.
        bias: the one tensor with a number for each expert that the calls hold, or None.
    """

    logits: Register
    calls: list[Call]
    bias: torch.Tensor | None


def _front(recording: Recording, wanted: tuple[Any, Any], num_experts: int, has_others: bool) -> _Front | None:
    """Return the front of ``wanted``, ids and weights; None if they are made of more.

    Args:
        num_experts: experts that there are at least, and exactly unless ``has_others``.
    """
    if not all(isinstance(each, Register) for each in wanted):
        return None
    found = between_marks(recording.calls, wanted, lambda tensor: _is_bias(tensor, num_experts, has_others))
    if found is None or len(found[0]) != 1:
        return None
    (logits,), calls = found
    if not all(read_by(call) or call.op in _CONSTANTS for call in calls):
        return None
    if {logits.index, *(call.out.index for call in calls)} & recording.mutated:
        return None
    fact, ids = recording.fact(logits), recording.fact(wanted[0])
    count = fact.shape[-1]
    fits = count >= num_experts if has_others else count == num_experts
    fits = fits and count <= MAX_EXPERTS and fact.dtype in FLOAT_DTYPES and ids.shape[-1] <= MAX_TOP_K
    biases = {id(each): each for call in calls for each in call.arguments.values() if _is_vector(each)}
    if not fits or fact.numel() != count * len(ids) or len(biases) > 1:
        return None
    bias = next(iter(biases.values()), None)
    return _Front(logits, calls, bias) if bias is None or bias.numel() == count else None


def _is_vector(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1


def _is_bias(tensor: torch.Tensor, num_experts: int, has_others: bool) -> bool:
    """Whether the op may take a tensor that a model holds for the bias of so many experts, or more."""
    fits = tensor.numel() >= num_experts if has_others else tensor.numel() == num_experts
    return fits and type(tensor) in PLAIN_TENSORS and tensor.dtype in FLOAT_DTYPES and tensor.is_contiguous()


def _described(recording: Recording, front: _Front, ids: Register, weights: Register) -> dict[str, Any] | None:
    """Return the arguments with which ``ops.choose_experts`` gives these ids and weights, but for the bias itself; None
    if there are none."""
    count, top_k = recording.fact(front.logits).shape[-1], recording.fact(ids).shape[-1]
    try:
        drawn = list(_drawn(recording, front, ids, weights))
    except MISFITS:
        return None
    for choice in _choices(front.calls, count):
        if top_k > count // choice["num_groups"] * choice["top_groups"]:
            continue
        shares = [found for each in drawn if (found := each.shares(choice)) is not None]
        if len(shares) < len(drawn):
            continue
        for behind in _weighings(front.calls):
            if all(each.agrees(of_each, **behind) for each, of_each in zip(drawn, shares)):
                return {name: each for name, each in (choice | behind).items() if each != _DEFAULTS.get(name)}
    return None


@dataclass(frozen=True)
class _Rows:
    """What recorded calls give of random logits, in float64.

    Attributes:
        logits: [rows, experts].
        bias: [experts], or None.
        ids, weights: [rows, top_k], in the order of ids.
    """

    logits: torch.Tensor
    bias: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor

    def shares(self, choice: dict[str, Any]) -> torch.Tensor | None:
        """Return the chosen experts' scores as ``ops.choose_experts`` gives them; None if it chooses others."""
        chosen = torch.empty_like(self.ids)
        shares = choose_experts(self.logits, chosen, False, correction_bias=self.bias, **choice)
        order = chosen.sort(-1)
        return shares.gather(-1, order.indices) if torch.equal(order.values, self.ids) else None

    def agrees(self, shares: torch.Tensor, normalized: bool, factor: float, sum_eps: float) -> bool:
        """Whether the weights are so made of scores."""
        divisor = shares.sum(-1, keepdim=True) + sum_eps if normalized else 1.0
        return agree(self.weights, shares / divisor * factor)


def _drawn(recording: Recording, front: _Front, ids: Register, weights: Register) -> Iterator[_Rows]:
    """Yield what the calls give, with biases beside which scores matter more and less, and that leave none above 0."""
    fact, generator = recording.fact(front.logits), torch.Generator().manual_seed(0)

    def randn(shape: Any) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    for deviation, mean in _BIASES:
        constants, bias, rows = {}, None, []
        if front.bias is not None:
            constants[id(front.bias)] = changed = mean + deviation * randn(front.bias.shape)
            bias = changed.flatten()
        for _ in range(-(-_ROWS // len(recording.fact(ids)))):
            logits = randn(fact.shape)
            values = evaluate(front.calls, {front.logits.index: logits}, constants)
            chosen = values[ids.index].long().sort(-1)
            rows.append((logits.flatten(0, -2), chosen.values, values[weights.index].gather(-1, chosen.indices)))
        logits, *found = (torch.cat(each) for each in zip(*rows))
        yield _Rows(logits, bias, *found)


def _choices(calls: list[Call], count: int) -> Iterator[dict[str, Any]]:
    """Yield ways to choose of so many logits that calls may be of."""
    numbers = {call.arguments["k"] for call in calls if call.op is _aten.topk.default}
    sizes = [tuple(call.arguments.get("size", ())) for call in calls]
    groups = {
        size[-2] for size in sizes if len(size) > 1 and 1 < size[-2] <= MAX_GROUPS and size[-2] * size[-1] == count
    }
    for scoring in Scoring:
        yield dict(scoring=scoring, num_groups=1, top_groups=1, group_tops=2)
        for num_groups, top_groups, group_tops in product(groups, numbers, (1, 2)):
            if top_groups < num_groups and group_tops * num_groups <= count:
                yield dict(scoring=scoring, num_groups=num_groups, top_groups=top_groups, group_tops=group_tops)


def _weighings(calls: list[Call]) -> Iterator[dict[str, Any]]:
    """Yield ways to make weights of scores that calls may be of."""

    def numbers(*ops: Any) -> list[float]:
        given = (call.arguments.get("other") for call in calls if call.op in ops)
        return [float(each) for each in given if isinstance(each, (int, float))]

    factors = [*numbers(_aten.mul.Tensor, _aten.mul.Scalar), 1.0]
    epsilons = [*(each for each in numbers(_aten.add.Tensor, _aten.add.Scalar) if each >= 0), 0.0]
    for normalized, factor, sum_eps in product((True, False), factors, epsilons):
        if normalized or sum_eps == 0.0:
            yield dict(normalized=normalized, factor=factor, sum_eps=sum_eps)
