"""Constants are made once, and views of weights are weights; what changes something stays."""

from __future__ import annotations

import torch
from recordings import WIDTH, assert_same, calls_of, linear, logits, names, parameter, recorded
from torch import nn

from hf_fastpath.recording.passes import views

_aten = torch.ops.aten
functional = nn.functional


def test_constants_are_made_once():
    def step(m, x, *_):
        return m.out(x * (torch.arange(WIDTH).float() / WIDTH + 1).square()) + torch.arange(3).sum()

    recording, model = recorded(step, out=linear())
    assert_same(recording, model, [views.constants])
    assert names(recording) == ["mul", "linear", "add"]


def test_constants_are_beside_what_reads_them():
    """A graph cannot copy them from the host's memory to the GPU, for which "meta" stands here."""

    def step(m, x, positions, cache):
        return torch.index_put(x * m.scale, [torch.tensor([0])] * 2, torch.tensor(0.5)).sin()

    recording, model = recorded(step, scale=parameter(WIDTH))
    assert_same(recording, model, [views.constants])
    product, written = calls_of(recording, _aten.mul.Tensor) + calls_of(recording, _aten.index_put.default)
    for call in (product, written):
        recording.facts[call.out.index] = recording.fact(call.out).to("meta")
    views.constants(recording, model)
    assert written.arguments["indices"][-1].is_meta and written.arguments["values"].is_meta
    assert product.arguments["other"] is model.body.scale, "the model's own tensors stay where they are"


def test_numbers_in_tensors_are_computed_once():
    def step(m, x, positions, cache):
        return x * (torch.tensor(3.0) + 1).sqrt() + m.bias.sum() + torch.stack([m.bias])

    recording, model = recorded(step, bias=parameter(WIDTH))
    before = len(recording.calls)
    assert_same(recording, model, [views.constants])
    assert len(recording.calls) == before - 2
    assert {"sum", "stack"} <= set(names(recording)), "what reads the model's own tensors stays, also in a list"


def test_constants_are_as_exact_as_the_models_own():
    recording, model = recorded(lambda m, x, *_: x * torch.arange(1, 1 + WIDTH).float().rsqrt())
    views.constants(recording, model)
    (factor,) = (each for each in recording.calls[-1].arguments.values() if isinstance(each, torch.Tensor))
    assert factor.dtype == torch.float32
    assert torch.equal(factor, torch.arange(1, 1 + WIDTH).float().rsqrt())


def test_what_is_made_of_weights_is_no_constant():
    recording, model = recorded(lambda m, x, *_: m.out(x * (1 + m.factor).exp()), out=linear(), factor=parameter(WIDTH))
    before = names(recording)
    assert_same(recording, model, [views.constants])
    assert names(recording) == before
    with torch.no_grad():
        model.body.factor.add_(1)
    changed = logits(recording)
    fresh, _ = recorded(model.body.function, out=model.body.out, factor=model.body.factor)
    fresh.calls[0].arguments["weight"] = model.embed.weight
    torch.testing.assert_close(changed, logits(fresh), rtol=1e-12, atol=0)


def test_memory_that_is_written_is_no_constant():
    def step(m, x, *_):
        rows = torch.zeros_like(x)
        rows[..., 3:5] = 1.5
        return m.out(x * rows)

    recording, model = recorded(step, out=linear())
    assert recording.mutated
    assert_same(recording, model, [views.constants, views.constant_views, views.no_change])
    assert "copy_" in names(recording) or "fill_" in names(recording)


def test_views_of_weights_are_weights():
    def step(m, x, *_):
        first, second = m.both.t()[:, :WIDTH], m.both.unsqueeze(0)[0, WIDTH:]
        return functional.linear(x @ first, second, m.bias.view(2, -1)[1])

    recording, model = recorded(step, both=parameter(2 * WIDTH, WIDTH), bias=parameter(2 * WIDTH))
    assert_same(recording, model, [views.constant_views])
    assert names(recording) == ["matmul", "linear"]
    product, behind = recording.calls[1:]
    start = model.body.both.data_ptr()
    assert product.arguments["b"].data_ptr() == start
    assert behind.arguments["weight"].data_ptr() == start + 4 * WIDTH * WIDTH
    assert behind.arguments["bias"].data_ptr() == model.body.bias.data_ptr() + 4 * WIDTH


def test_views_of_views_are_one_view():
    def step(m, x, *_):
        return m.out(x.view(-1, 2).view(4, 4).reshape(2, 8).view(1, 1, WIDTH)).view(1, 4, 4).view(1, 1, WIDTH)

    recording, model = recorded(step, out=linear())
    assert_same(recording, model, [views.no_change])
    assert names(recording) == ["linear"]


def test_what_changes_nothing_is_left_out():
    def step(m, x, *_):
        x = x.float().expand(1, 1, WIDTH)[..., :WIDTH].clone().to(torch.float32, copy=True)
        return m.out(torch.cat((x * 1.0,), dim=-1).contiguous())

    recording, model = recorded(step, out=linear())
    assert len(names(recording)) > 4
    assert_same(recording, model, [views.no_change])
    assert names(recording) == ["linear"]


def test_what_changes_something_stays():
    def step(m, x, *_):
        return m.out((x.double() * 3).to(torch.float16).float().flip(-1)[..., :8].repeat(1, 1, 2))

    recording, model = recorded(step, out=linear())
    before = names(recording)
    assert_same(recording, model, [views.no_change])
    assert names(recording) == before
