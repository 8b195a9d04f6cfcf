"""Pass: an expert that every row goes through beside those that a router chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ...choices import Activation
from ...decode.calls.named_calls import Call
from ...ops.fused_experts import MAX_TOP_K
from ...ops.fused_swiglu import GATES
from ...registry import PLAIN_TENSORS
from .. import marks
from ..recorded_step import Recording, read_by
from .products import only_reader


def shared_experts(recording: Recording, model: nn.Module) -> None:
    """Pass: let the experts' kernels run a shared expert of the same row, if their outputs are added.

    Several rows read a shared expert's weights once, but those of chosen experts for each, and stay apart.
    """
    if recording.batch * recording.query_len > 1:
        return
    only = only_reader(recording)
    instead: dict[int, list[Call]] = {}
    for last, others, down, routed in _sums(recording, only):
        shut = only(down.arguments["x"], marks.sigmoid_gated)
        inside = only(down.arguments["x"] if shut is None else shut.arguments["x"], marks.gated)
        if inside is None or not _fit(recording, routed, inside, down):
            continue
        made = {
            "residual": others.arguments.get("residual"),
            "shared_gate_weight": inside.arguments["gate_weight"],
            "shared_up_weight": inside.arguments["up_weight"],
            "shared_down_weight": down.arguments["weight"],
            "shared_logits": None if shut is None else shut.arguments["gate"],
        }
        replaced = [call for call in (routed, inside, shut, down) if call is not None]
        read = {register.index for call in replaced for register in read_by(call)}
        if read & recording.mutated:  # what is read may be overwritten by then
            continue
        instead |= {id(call): [] for call in replaced}
        instead[id(last)] = [Call(marks.routed_experts, routed.arguments | made, last.out)]
    recording.rewrite(instead, {})


def _sums(recording: Recording, only: Callable[[Any, Any], Call | None]) -> Iterator[tuple[Call, Call, Call, Call]]:
    """Yield of every sum of a product and of routed experts: the call that adds, the call that is added, the product
    and the experts."""
    for call in recording.calls:
        residual = call.arguments.get("residual")
        if call.op is marks.linear and (routed := only(residual, marks.routed_experts)) is not None:
            yield call, routed, call, routed
        elif call.op is marks.routed_experts and (down := only(residual, marks.linear)) is not None:
            yield call, down, down, call


def _fit(recording: Recording, routed: Call, inside: Call, down: Call) -> bool:
    """Whether the experts' kernels take a shared expert with these products."""
    given, of_gates = routed.arguments, inside.arguments
    weights = of_gates["gate_weight"], of_gates["up_weight"], down.arguments["weight"]
    if any(type(each) not in PLAIN_TENSORS or each.is_meta or each.stride(-1) != 1 for each in weights):
        return False
    stack, x = given["down_weight"], given["x"]
    if stack.is_meta:  # which stands for quantized ones
        return False
    if given.get("transposed") or {each.dtype for each in weights} != {stack.dtype, recording.fact(x).dtype}:
        return False
    if down.arguments.get("transposed") or down.arguments.get("norm") is not None:
        return False
    if down.arguments.get("bias") is not None or down.arguments.get("activation", Activation.NONE) != Activation.NONE:
        return False
    norms = {norm and norm.key for norm in (given.get("norm"), of_gates.get("norm"))}
    if x.index != of_gates["x"].index or len(norms) > 1:
        return False
    if given["activation"] != of_gates["activation"] or given["activation"] not in GATES:
        return False
    places, rest = divmod(len(weights[0]), stack.shape[-1])
    return rest == 0 and places + given["top_k"] <= MAX_TOP_K
