"""Convolutions over tokens and matrices of each head are products of heads; other convolutions stay."""

from __future__ import annotations

import pytest
import torch
from recordings import WIDTH, assert_same, calls_of, names, parameter, recorded
from torch import nn

from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import products_of_heads, views


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize(("groups", "count"), ((WIDTH, 3), (4, 1), (1, 2)))
def test_convolutions_over_tokens(groups, count, bias):
    def step(m, x, *_):
        tokens = torch.cat([scale * x.transpose(1, 2) for scale in range(1, m.conv.kernel_size[0] + count)], dim=-1)
        return m.conv(tokens).sum(-1)[:, None]

    conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=groups, bias=bias)
    recording, model = recorded(step, 2, 1, conv=conv)
    assert_same(recording, model, [products_of_heads.convolutions])
    (call,) = calls_of(recording, marks.head_products)
    assert call.arguments["weight"].data_ptr() == model.body.conv.weight.data_ptr()
    assert "convolution" not in names(recording)


@pytest.mark.parametrize("options", (dict(stride=2), dict(padding=1), dict(dilation=2)), ids=str)
def test_other_convolutions_stay(options):
    def step(m, x, *_):
        return m.conv(torch.cat([scale * x.transpose(1, 2) for scale in range(1, 8)], dim=-1)).sum(-1)[:, None]

    recording, model = recorded(step, 2, 1, conv=nn.Conv1d(WIDTH, WIDTH, 3, groups=4, **options))
    assert_same(recording, model, [products_of_heads.convolutions])
    assert "convolution" in names(recording)


@pytest.mark.parametrize("batch", (1, 3))
def test_a_matrix_of_each_head(batch):
    """Zamba multiplies columns [heads, batch, inputs, 1] by matrices of its heads."""

    def step(m, x, *_):
        heads = x.view(batch, 4, 4, 1).transpose(0, 1)
        return (m.weight[:, None] @ heads).transpose(0, 1).reshape(batch, 1, -1)

    recording, model = recorded(step, batch, 1, weight=parameter(4, 6, 4))
    assert_same(recording, model, [views.constant_views, products_of_heads.products_of_heads])
    (call,) = calls_of(recording, marks.head_products)
    assert call.arguments["weight"].data_ptr() == model.body.weight.data_ptr()
    assert not calls_of(recording, marks.matmul)
