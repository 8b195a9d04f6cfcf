"""Passes over a recorded list, each of which recognizes one thing; in their order.

A pass takes a :class:`..recorded_step.Recording` and changes its calls; what it does not recognize it leaves alone.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from ...decode.calls.pass_table import PassTable, declare
from ..recorded_step import Recording
from ..stand_ins import StandIns
from .fused import FUSED
from .lengths import check_lengths, follow_count
from .recognized import RECOGNIZED

#: all passes over a recording in their order; a new one is one more row
PASSES = declare(PassTable("recordings", (*RECOGNIZED, *FUSED), Recording.drop_unread))


def passed(recording: Recording, model: nn.Module, without: Collection[str] = ()) -> Recording:
    """``recording`` behind all passes.

    Args:
        model: whose tensors the calls hold.
        without: names of passes that are left out.

    Raises:
        StandInRead: a call reads a stand-in, which it cannot.
        Unrecordable: a call depends on how long the text was when it was recorded.
    """
    title = f"recording-of-{type(model).__name__}-{recording.batch}-sequences-{recording.query_len}-tokens"
    PASSES.apply(recording, model, title, without)
    recording.forget_read()
    if recording.count is not None:
        follow_count(recording)
    check_lengths(recording)
    stand_ins = StandIns(recording)
    for call in recording.calls:
        stand_ins.check(call)
    return recording
