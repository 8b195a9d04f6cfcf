"""Memory that one write fills is what is written; memory that holds more stays."""

from __future__ import annotations

import pytest
import torch
from recordings import assert_same, names, recorded

from hf_fastpath.recording.passes import filled_memory


def test_memory_that_one_write_fills_is_what_is_written():
    """A loop over tokens writes each of them; a step has one."""

    def step(m, x, positions, cache):
        memory = torch.zeros_like(x.unflatten(-1, (2, -1)))
        for place in range(x.shape[1]):
            memory[:, place] = x[:, place].sin().unflatten(-1, (2, -1))
        return memory.flatten(2) * 2

    recording, model = recorded(step)
    assert "copy_" in names(recording)
    assert_same(recording, model, [filled_memory.filled_memory])
    assert not {"full_like", "zeros_like", "copy_"} & set(names(recording))


@pytest.mark.parametrize("kind", ("a part", "read before", "written twice", "another type"))
def test_memory_that_holds_more_stays(kind):
    def step(m, x, positions, cache):
        memory = torch.ones(*x.shape[:2], 1, x.shape[-1], dtype=torch.float64 if kind == "another type" else x.dtype)
        before = memory * 3 if kind == "read before" else 0
        if kind == "a part":
            memory[:, 0, :, 1:] = x[:, :, 1:].sin()
        else:
            memory[:, 0] = x.sin()
        if kind == "written twice":
            memory[:, 0, :, :2] = x[:, :, :2].cos()
        return (memory + before)[:, :, 0].to(x.dtype)

    recording, model = recorded(step)
    before = names(recording)
    assert_same(recording, model, [filled_memory.filled_memory])
    assert names(recording) == before
