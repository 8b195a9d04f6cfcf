"""What a decode plan consists of: one call for all layers where they are alike, one op after the other elsewhere."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from models import CPU, build, fresh, over_architectures, prompt, require_native
from parity import assert_same_tokens
from torch import nn

import hf_fastpath
from hf_fastpath.decode import plan as plan_module
from hf_fastpath.decode.plan import DecodePlan
from hf_fastpath.verification import decode_logits


def plans(model: nn.Module) -> list[DecodePlan]:
    return vars(model)["_hf_fastpath"].plans


def calls(plan: DecodePlan) -> list[str]:
    """Names of the plan's own ops, in order."""
    names = (name.partition(".")[0] for name in plan.program.op_names())
    return [name for name in names if name not in ("embedding", "add", "select", "greedy_token")]


@over_architectures
def test_one_sequence_takes_one_call_a_token(architecture):
    """As many tokens as cross the window and make the cache grow; then a longer prompt over another cache."""
    stock, ours = fresh(architecture)
    for length in (5, 70):
        ids = prompt(CPU, 1, length)
        options = dict(max_new_tokens=60, do_sample=False)
        assert_same_tokens(ours.generate(ids, **options), stock.generate(ids, **options), stock)
    (plan,) = plans(ours)
    assert calls(plan) == ["decode_layers"]


@over_architectures
def test_several_sequences_take_one_op_after_the_other(architecture, device):
    _, ours = fresh(architecture, device)
    ours.generate(prompt(device, 2), max_new_tokens=3, do_sample=False)
    (plan,) = plans(ours)
    assert calls(plan)[:2] == ["qkv_rope_append", "decode_attention"] and "decode_layers" not in calls(plan)


@over_architectures
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_one_call_is_the_same_step(architecture, dtype, monkeypatch):
    """The same bits on the CPU, where the call consists of those very ops."""
    _, ours = fresh(architecture)
    ours, text = ours.to(dtype), prompt(CPU, 1, 40)
    whole = decode_logits(ours, text, 9, fast=True)
    plans(ours).clear()
    monkeypatch.setattr(plan_module, "one_call", lambda device, batch: False)
    assert torch.equal(decode_logits(ours, text, 9, fast=True), whole)
    assert "decode_layers" not in calls(plans(ours)[0])


def _other_scaling(model: nn.Module) -> None:
    model.model.layers[1].self_attn.scaling *= 1.5


def _other_eps(model: nn.Module) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-2


def _linear_for_conv1d(model: nn.Module) -> None:
    mlp = model.transformer.h[1].mlp
    conv1d, mlp.c_fc = mlp.c_fc, nn.Linear(*mlp.c_fc.weight.shape).to(mlp.c_fc.weight.device)
    with torch.no_grad():
        mlp.c_fc.weight.copy_(conv1d.weight.t())
        mlp.c_fc.bias.copy_(conv1d.bias)


def _gate_bias(model: nn.Module) -> None:
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.bias = nn.Parameter(
        torch.full((mlp.gate_proj.out_features,), 0.5, device=mlp.gate_proj.weight.device)
    )


def _bias_in_one_layer(model: nn.Module) -> None:
    out = model.model.layers[1].self_attn.o_proj
    out.bias = nn.Parameter(torch.ones(out.out_features, device=out.weight.device))


@pytest.mark.parametrize(
    ("architecture", "change"),
    (
        ("llama", _other_scaling),
        ("mistral", _other_eps),
        ("gpt2", _linear_for_conv1d),
        ("llama", _gate_bias),
        ("mistral", _bias_in_one_layer),
    ),
)
def test_layers_that_differ_take_one_op_after_the_other(architecture, change, device):
    require_native(device)
    stock = build(architecture).to(device)
    change(stock)
    ours, ids = hf_fastpath.patch(copy.deepcopy(stock), quiet=True), prompt(device)
    options = dict(max_new_tokens=8, do_sample=False)
    assert_same_tokens(ours.generate(ids, **options), stock.generate(ids, **options), stock)
    (plan,) = plans(ours)
    assert "decode_layers" not in calls(plan)


def test_same_change_in_every_layer_keeps_one_call():
    stock, _ = fresh("llama")
    for layer in stock.model.layers:
        layer.self_attn.scaling *= 1.5
    ours, ids = hf_fastpath.patch(copy.deepcopy(stock), quiet=True), prompt(CPU)
    options = dict(max_new_tokens=8, do_sample=False)
    assert_same_tokens(ours.generate(ids, **options), stock.generate(ids, **options), stock)
    assert calls(plans(ours)[0]) == ["decode_layers"]


@pytest.mark.parametrize("batch", (1, 2))
def test_plan_lets_go_of_the_cache(batch, device):
    """Neither registers nor the arguments of recorded calls keep the KV memory after a call."""
    _, ours = fresh("llama", device)
    out = ours.generate(prompt(device, batch), max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    buffer = weakref.ref(out.past_key_values.layers[0].k_buffer)
    assert plans(ours) and buffer() is not None
    del out
    assert buffer() is None
