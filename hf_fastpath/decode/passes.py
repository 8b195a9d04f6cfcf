"""Passes over the calls of a step, in their order.

A pass takes a list of calls and gives another list that computes the same. A pass makes new registers with
``register``, and looks at the :class:`.named_calls.Step` to see whether it applies.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from .. import ops
from ..quantization import PackedWeight
from .named_calls import Call, Register, Step
from .one_call import one_call
from .rank_calls import through_peers

Pass = Callable[[list[Call], Callable[[], Register], Step], list[Call]]

#: product -> its argument that is the matrix, or the matrices, it reads
_MATRIX = {
    ops.gemv.overload: "weight",
    ops.gemv_swiglu.overload: "gate_weight",
    ops.joined_gemv.overload: "weights",
    ops.qkv_rope_append.overload: "q_weight",
    ops.packed_gemv_swiglu.overload: "packed",
}
_UNPACKED = (ops.gemv.overload, ops.gemv_swiglu.overload, ops.joined_gemv.overload, ops.qkv_rope_append.overload)
#: product -> the later products whose (first) matrix it prefetches into the L2 cache
_PREFETCHES = {
    ops.gemv.overload: _UNPACKED,
    ops.gemv_swiglu.overload: _UNPACKED,
    ops.packed_gemv.overload: (ops.packed_gemv_swiglu.overload,),
}
#: calls that leave memory idle, so that the product in front of them fetches for the product behind them
_BETWEEN = (ops.rms_norm.overload, ops.sum_ranks.overload)


def prefetch_next_weight(calls: list[Call], register: Callable[[], Register], step: Step) -> list[Call]:
    """Tell every product which matrix the next product reads, also with a norm or a sum over ranks between the two."""
    if step.programmatic_launch:
        for call, following in pairwise(call for call in calls if call.op not in _BETWEEN):
            if following.op in _PREFETCHES.get(call.op, ()):
                matrix = following.arguments[_MATRIX[following.op]]
                matrix = matrix[0] if isinstance(matrix, (list, tuple)) else matrix
                call.arguments["next_weight"] = matrix.quants if isinstance(matrix, PackedWeight) else matrix
    return calls


#: the passes of a step in order; a new op that replaces several calls is one more entry
PASSES: tuple[Pass, ...] = (one_call, through_peers, prefetch_next_weight)


def passed(calls: list[Call], register: Callable[[], Register], step: Step) -> list[Call]:
    """Apply all passes to ``calls``."""
    for each in PASSES:
        calls = each(calls, register, step)
    return calls
