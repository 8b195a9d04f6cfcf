"""Kinds of modules whose own forward cannot be recorded as it is: a file for each, with what runs in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..recorder import Recorder
from .listed_experts import listed_experts
from .streams import attention_of_streams

#: of each kind, what runs in its place for the length of a ``with`` block; a new kind is one more row
KINDS = (listed_experts, attention_of_streams)


@contextmanager
def other_forwards(recorder: Recorder) -> Iterator[None]:
    """Let modules of all kinds run through the recorder, for the length of a ``with`` block."""
    with ExitStack() as blocks:
        for kind in KINDS:
            blocks.enter_context(kind(recorder))
        yield
