"""Passes over the calls of a step, in their order.

A pass changes a :class:`..calls.pass_table.CallList` so that it computes the same, and looks at the
:class:`..calls.named_calls.Step` to see whether it applies.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from ... import ops
from ...quantization import PackedWeight
from ..calls.named_calls import Call, Register, Step
from ..calls.pass_table import CallList, Pass, PassTable, declare
from ..ranks.rank_calls import through_peers
from .native_calls import native_calls
from .one_call import one_call

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
_BETWEEN = (
    ops.rms_norm.overload,
    ops.fake_quantize.overload,
    ops.sum_ranks.overload,
    ops.lora_down.overload,
    ops.lora_up.overload,
)


def prefetch_next_weight(listing: CallList, step: Step) -> None:
    """Tell every product which matrix the next product reads, whatever small calls lie between them."""
    if step.programmatic_launch:
        for call, following in pairwise(call for call in listing.calls if call.op not in _BETWEEN):
            if following.op in _PREFETCHES.get(call.op, ()):
                matrix = following.arguments[_MATRIX[following.op]]
                matrix = matrix[0] if isinstance(matrix, (list, tuple)) else matrix
                call.arguments["next_weight"] = matrix.quants if isinstance(matrix, PackedWeight) else matrix


#: the passes of a step in order; a new op that replaces several calls is one more row
PASSES = declare(
    PassTable(
        "the calls of a step",
        (
            Pass(
                "one_call",
                one_call,
                "It finds layers that are alike, and makes one call of an op for all layers of them.",
            ),
            Pass(
                "through_peers",
                through_peers,
                "It finds what ranks put together, and sends that through the GPUs' memory instead of a collective.",
            ),
            Pass(
                "prefetch_next_weight",
                prefetch_next_weight,
                "It finds two products in a row, and lets the first prefetch what the second reads.",
                {
                    "one_call": "products that become part of an op are gone, and nothing is to be fetched for them",
                    "through_peers": "a sum over the GPUs' memory may lie between two products, a collective may not",
                },
            ),
            Pass(
                "native_calls",
                native_calls,
                "It finds calls that the native library can make, and lets it make those that follow one another.",
                {
                    "one_call": "the op for all layers is one of these calls",
                    "through_peers": "a collective is none, and the op in its place is",
                },
            ),
        ),
    )
)


def passed(calls: list[Call], register: Callable[[], Register], step: Step, title: str) -> CallList:
    """Apply all passes to ``calls``; files of the list are in a folder of this title."""
    listing = CallList(calls, register)
    PASSES.apply(listing, step, title)
    return listing
