"""A value that is written by a mask is a choice; values of their own for each place stay."""

from __future__ import annotations

import pytest
import torch
from recordings import WIDTH, assert_same, calls_of, names, parameter, recorded

from hf_fastpath.recording.passes import masked_writes

_aten = torch.ops.aten


@pytest.mark.parametrize("width", (WIDTH, 1, 0))
def test_a_value_in_masked_places_is_a_choice(width):
    """A graph cannot hold PyTorch's search for the places."""

    def step(m, x, positions, cache):
        value = m.shift[:width] if width else m.shift[0]
        return torch.index_put(x.sin(), [positions.remainder(2) == 1], value)

    recording, model = recorded(step, shift=parameter(WIDTH))
    assert "index_put" in names(recording)
    assert_same(recording, model, [masked_writes.masked_writes])
    assert "index_put" not in names(recording) and "where" in names(recording)


def test_values_of_their_own_for_each_place_stay():
    def step(m, x, positions, cache):
        places = torch.zeros_like(positions, dtype=torch.bool)
        return torch.index_put(x.sin(), [places], m.shift[None, :])

    recording, model = recorded(step, shift=parameter(WIDTH))
    before = names(recording)
    masked_writes.masked_writes(recording, model)
    assert names(recording) == before


def test_a_number_in_the_hosts_memory_is_copied_once():
    """A graph cannot copy it to the GPU, for which "meta" stands here."""

    def step(m, x, positions, cache):
        return torch.index_put(x.sin(), [positions == positions], torch.tensor(0.5))

    recording, model = recorded(step)
    (call,) = calls_of(recording, _aten.index_put.default)
    for on_a_gpu in (call.arguments["self"], *call.arguments["indices"]):
        recording.facts[on_a_gpu.index] = recording.fact(on_a_gpu).to("meta")
    masked_writes.masked_writes(recording, model)
    (chosen,) = calls_of(recording, _aten.where.self)
    assert chosen.arguments["self"].is_meta and "index_put" not in names(recording)
