"""Norms take on residual streams in float32 and learned factors."""

from __future__ import annotations

import pytest
import torch
from recordings import WIDTH, Decoder, assert_same, calls_of, linear, names, parameter, recorded
from torch import nn

from hf_fastpath.recording import marks
from hf_fastpath.recording.passes import modules, norms, products, views
from hf_fastpath.recording.skeleton import Skeleton
from hf_fastpath.recording.step import record


class _Stream(nn.Module):
    """Two layers that add to a residual stream in float32, as Mamba's do in 16 bits."""

    def __init__(self, reads_the_sum: bool = False):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2))
        self.products = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.reads_the_sum = reads_the_sum

    def forward(self, x, positions, cache):
        stream, more = x.float(), 0
        for norm, product in zip(self.norms, self.products):
            rounded = stream.to(x.dtype)
            more = more + rounded if self.reads_the_sum else more
            stream = stream + product(norm(rounded))
        return stream.to(x.dtype) + more


@pytest.mark.parametrize("reads_the_sum", (False, True))
def test_residual_streams_in_float32(reads_the_sum):
    model = Decoder(_Stream(reads_the_sum)).bfloat16()
    recording = record(Skeleton(model), 1, 1)
    recording.drop_unread()
    for each in (modules.activation_functions, products.unflattened, views.no_change, norms.float32_residuals):
        each(recording, model)
    made = calls_of(recording, marks.add_normed)
    assert len(made) == (0 if reads_the_sum else 1)
    for call in made:
        assert recording.fact(call.arguments["residual"]).dtype == torch.float32
        assert recording.fact(call.arguments["x"]).dtype == torch.bfloat16


@pytest.mark.parametrize(("of", "is_one"), [(1, True), (WIDTH, False)])
def test_a_learned_factor_behind_a_norm(of, is_one):
    def step(m, x, positions, cache):
        return (x + m.norm(m.up(x))) * m.factor

    recording, model = recorded(step, norm=nn.RMSNorm(WIDTH, eps=1e-6), up=linear(), factor=parameter(of))
    passes = [
        modules.activation_functions,
        products.unflattened,
        views.no_change,
        products.residuals,
        norms.norm_factors,
    ]
    assert_same(recording, model, passes)
    assert names(recording) == ["linear", "normed"] + ([] if is_one else ["mul"])
    (call,) = calls_of(recording, marks.normed)
    assert call.arguments["residual"] is not None and ("factor" in call.arguments) == is_one
