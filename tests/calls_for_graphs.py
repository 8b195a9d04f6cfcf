"""Graphs of short prompts where there are none: their calls are made one by one."""

from __future__ import annotations

import pytest
import torch

from hf_fastpath.decode.loops import short_prompts
from hf_fastpath.decode.run import graph


class OneByOne:
    """Stands for a graph."""

    def __init__(self, run, device, pool):
        self.replay = run


def use_calls(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Let float32 prompts be read by graphs, too, whose tokens are like stock's, and let a CPU have graphs."""
    monkeypatch.setattr(short_prompts, "DTYPES", {torch.float32, *short_prompts.DTYPES})
    if device.type == "cpu":
        monkeypatch.setattr(short_prompts, "DEVICES", {"cpu"})
        monkeypatch.setattr(graph, "capture", OneByOne)
