"""Passes over the calls of a step, in their order.

A pass takes a list of calls and gives another one that computes the same. It makes new registers with ``register``,
and looks at the :class:`.named_calls.Step` to see whether it is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from .. import ops
from .many_rows import few_to_many, replace_attention
from .named_calls import Call, Register, Step
from .one_call import one_call

Pass = Callable[[list[Call], Callable[[], Register], Step], list[Call]]

#: argument of a product that is the matrix it reads
_MATRIX = {
    ops.gemv.overload: "weight",
    ops.gemv_swiglu.overload: "gate_weight",
    ops.qkv_rope_append.overload: "q_weight",
    ops.packed_gemv_swiglu.overload: "quants",
}
#: product -> those behind it whose matrix it brings into the L2 cache
_PREFETCHES = {
    ops.gemv.overload: (ops.gemv.overload, ops.gemv_swiglu.overload, ops.qkv_rope_append.overload),
    ops.gemv_swiglu.overload: (ops.gemv.overload, ops.gemv_swiglu.overload, ops.qkv_rope_append.overload),
    ops.packed_gemv.overload: (ops.packed_gemv_swiglu.overload,),
}


def prefetch_next_weight(calls: list[Call], register: Callable[[], Register], step: Step) -> list[Call]:
    """Give every product in front of another one the next weight, for its L2 prefetch."""
    if step.programmatic_launch:
        for call, following in pairwise(calls):
            if following.op in _PREFETCHES.get(call.op, ()):
                call.arguments["next_weight"] = following.arguments[_MATRIX[following.op]]
    return calls


#: what a step goes through: a new op that stands for several calls is one more line
PASSES: tuple[Pass, ...] = (one_call, replace_attention, few_to_many, prefetch_next_weight)


def passed(calls: list[Call], register: Callable[[], Register], step: Step) -> list[Call]:
    """``calls`` behind all passes."""
    for each in PASSES:
        calls = each(calls, register, step)
    return calls
