"""Passes over a recorded list, each of which recognizes one thing; in their order.

A pass takes a :class:`..recording.Recording` and changes its calls; what it does not recognize it leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..recording import Recording

Pass = Callable[[Recording, nn.Module], None]

PASSES: tuple[Pass, ...] = ()


def passed(recording: Recording, model: nn.Module) -> Recording:
    """``recording`` behind all passes.

    Args:
        model: whose tensors the calls hold.
    """
    recording.drop_unread()
    for each in PASSES:
        each(recording, model)
        recording.drop_unread()
    return recording
