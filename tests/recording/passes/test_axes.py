"""Positions of several axes that are alike are those of one axis; axes that differ stay."""

from __future__ import annotations

import pytest
import torch
from recordings import WIDTH, assert_same, calls_of, recorded

from hf_fastpath.recording.passes import axes, views

_aten = torch.ops.aten


def _interleaved(twice: bool = False):
    """Qwen3-VL's angles: of three axes, some of the second one's are written over those of the first."""

    def step(m, x, positions, cache):
        axes = positions[None].expand(3, *positions.shape)
        angles = (axes[..., None] * m.frequencies).cos()
        chosen, copied = angles[0], angles[1, ..., 1:7:3]
        chosen[..., 1:7:3] = copied * 2 if twice else copied
        return x * torch.cat((chosen, chosen), dim=-1)

    return step


def test_writes_from_one_axis_to_another_that_is_alike():
    recording, model = recorded(_interleaved(), frequencies=torch.rand(WIDTH // 2))
    assert calls_of(recording, _aten.copy_.default) and recording.mutated
    assert_same(recording, model, [axes.writes_of_like_axes])
    assert not calls_of(recording, _aten.copy_.default) and not recording.mutated


@pytest.mark.parametrize("is_alike", (True, False))
def test_axes_whose_angles_are_a_matrix_product(is_alike):
    """As in Qwen3.5 before transformers 5.24; the frequencies are a constant by then."""

    def step(m, x, positions, cache):
        frequencies = m.frequencies[None, None, :, None].expand(3, 1, -1, 1)
        if not is_alike:
            frequencies = frequencies * m.factors[:, None, None, None]
        product = frequencies @ positions[None].expand(3, *positions.shape)[:, :, None].float()
        angles = product.transpose(2, 3).cos()
        chosen = angles[0]
        chosen[..., 1:7:3] = angles[1, ..., 1:7:3]
        return x * torch.cat((chosen, chosen), dim=-1)

    inside = dict(frequencies=torch.rand(WIDTH // 2), factors=torch.tensor([1.0, 2.0, 3.0]))
    recording, model = recorded(step, **inside)
    assert_same(recording, model, [views.constant_views, axes.writes_of_like_axes])
    assert bool(calls_of(recording, _aten.copy_.default)) != is_alike


def test_a_transposed_axis_is_no_longer_the_first():
    def step(m, x, positions, cache):
        angles = positions[None].expand(2, *positions.shape)[..., None] * m.frequencies  # [2, 1, 1, 2]
        angles = angles.transpose(0, 3).cos()  # [2 that differ, 1, 1, 2 that are alike]
        chosen = angles[0]
        chosen[..., :1] = angles[1, ..., :1]
        return x * torch.cat([chosen] * (WIDTH // 2), dim=-1)

    recording, model = recorded(step, frequencies=torch.tensor([0.3, 0.7]))
    assert_same(recording, model, [axes.writes_of_like_axes])
    assert calls_of(recording, _aten.copy_.default)


def test_writes_of_other_numbers_stay():
    recording, model = recorded(_interleaved(twice=True), frequencies=torch.rand(WIDTH // 2))
    writes = len(calls_of(recording, _aten.copy_.default))
    assert_same(recording, model, [axes.writes_of_like_axes])
    assert writes and len(calls_of(recording, _aten.copy_.default)) == writes and recording.mutated


def test_writes_to_other_places_stay():
    def step(m, x, positions, cache):
        angles = (positions[None].expand(3, *positions.shape)[..., None] * m.frequencies).cos()
        chosen = angles[0]
        chosen[..., 1:7:3] = angles[1, ..., 0:6:3]
        return x * torch.cat((chosen, chosen), dim=-1)

    recording, model = recorded(step, frequencies=torch.rand(WIDTH // 2))
    assert_same(recording, model, [axes.writes_of_like_axes])
    assert calls_of(recording, _aten.copy_.default)


def test_writes_between_axes_that_differ_stay():
    """The second axis is ahead of the first."""

    def step(m, x, positions, cache):
        axes = torch.stack((positions, positions + 1))
        angles = (axes[..., None] * m.frequencies).cos()
        chosen = angles[0]
        chosen[..., 1:7:3] = angles[1, ..., 1:7:3]
        return x * torch.cat((chosen, chosen), dim=-1)

    recording, model = recorded(step, frequencies=torch.rand(WIDTH // 2))
    assert_same(recording, model, [axes.writes_of_like_axes])
    assert calls_of(recording, _aten.copy_.default)


def test_one_write_that_matters_keeps_all_of_that_memory():
    def step(m, x, positions, cache):
        angles = (positions[None].expand(3, *positions.shape)[..., None] * m.frequencies).cos()
        chosen = angles[0]
        chosen[..., :2] = x[..., :2]
        chosen[..., 1:7:3] = angles[1, ..., 1:7:3]
        return x * torch.cat((chosen, chosen), dim=-1)

    recording, model = recorded(step, frequencies=torch.rand(WIDTH // 2))
    writes = len(calls_of(recording, _aten.copy_.default))
    assert_same(recording, model, [axes.writes_of_like_axes])
    assert writes == len(calls_of(recording, _aten.copy_.default)) == 2
