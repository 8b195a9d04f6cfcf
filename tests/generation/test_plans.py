"""The calls of a decode plan: one op after the other; on a GPU one call for all layers of one sequence, if they are
alike."""

from __future__ import annotations

import copy
import weakref
from operator import attrgetter

import pytest
import torch
from models import CPU, GPT2_SMALL, build, fresh, over_architectures, prompt, require_native, without_one_call
from parity import LogitRule, RoundingCache, assert_same_tokens, float64_copy, forced_logits, walk
from torch import nn

import hf_fastpath
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.calls.named_calls import Step
from hf_fastpath.decode.plans import angles
from hf_fastpath.decode.plans.angles import AngleTables
from hf_fastpath.decode.plans.decode_plan import DecodePlan
from hf_fastpath.decode.run.passes import prefetch_next_weight


def plans(model: nn.Module) -> list[DecodePlan]:
    return list(vars(model)["_hf_fastpath"].plans)


def calls(plan: DecodePlan) -> list[str]:
    """Return the names of the plan's own ops, in order."""
    names = (name.partition(".")[0] for name in plan.program.op_names())
    return [name for name in names if name not in ("step_inputs", "getitem", "select", "greedy_token")]


@over_architectures
@pytest.mark.parametrize("batch", (1, 3))
def test_a_token_takes_one_call(architecture, batch, device):
    """The tokens cross the window and make the cache grow; then a longer prompt follows over another cache."""
    stock, ours = fresh(architecture, device)
    for length in (5, 70):
        ids = prompt(device, batch, length)
        options = dict(max_new_tokens=60, do_sample=False)
        assert_same_tokens(ours.generate(ids, **options), stock.generate(ids, **options), stock)
    (plan,) = plans(ours)
    (run,) = plan.program.native_runs  # a call of the native library
    assert (run.begin, run.end) == (0, len(plan.program)) and "decode_layers" not in calls(plan)


@pytest.mark.parametrize("batch", (1, 3))
def test_layers_of_gpt2_take_one_op_on_a_gpu(cuda, batch):
    """The op has kernels for GPT-2's own sizes, and for one sequence."""
    stock, ours = fresh("gpt2", cuda, **GPT2_SMALL)
    for length in (5, 70):
        ids = prompt(cuda, batch, length)
        options = dict(max_new_tokens=60, do_sample=False)
        assert_same_tokens(ours.generate(ids, **options), stock.generate(ids, **options), stock)
    (plan,) = plans(ours)
    assert (calls(plan) == ["decode_layers", "gemv"]) == (batch == 1)


def test_a_cache_of_another_type_takes_one_op_after_the_other(cuda):
    require_native(cuda)
    ours = hf_fastpath.patch(build("gpt2", **GPT2_SMALL).to(cuda), kv_dtype=torch.float16, quiet=True)
    ours.generate(prompt(cuda), max_new_tokens=3, do_sample=False)
    (plan,) = plans(ours)
    assert "decode_layers" not in calls(plan)


@over_architectures
def test_several_sequences_take_one_op_after_the_other(architecture, device):
    _, ours = fresh(architecture, device)
    ours.generate(prompt(device, 2), max_new_tokens=3, do_sample=False)
    (plan,) = plans(ours)
    assert calls(plan)[:2] == ["qkv_rope_append", "decode_attention"] and "decode_layers" not in calls(plan)


@pytest.mark.parametrize("weights", (None, "int4_g32"))
def test_products_are_told_the_next_matrix(device, monkeypatch, weights):
    """A product in front of another product is given the matrix which that one reads; no result changes."""
    require_native(device)
    without_one_call(monkeypatch)
    ours = hf_fastpath.patch(build("mistral").to(device), quiet=True, weights=weights)
    ours.generate(prompt(device, 2), max_new_tokens=3, do_sample=False)
    (plan,) = plans(ours)
    calls = plan.program.calls
    if device.type == "cpu":
        prefetch_next_weight(plan.program, Step(rows=2, programmatic_launch=True))
    layers = ours.model.layers
    expected = []
    if weights:
        expected = [layer.mlp.gate_proj.quants for layer in layers]
    else:
        for layer, following in zip(layers, [*(layer.self_attn.q_proj for layer in layers[1:]), ours.lm_head]):
            expected += [layer.mlp.gate_proj.weight, layer.mlp.down_proj.weight, following.weight]
    found = [call.arguments["next_weight"] for call in calls if "next_weight" in call.arguments]
    assert [tensor.data_ptr() for tensor in found] == [tensor.data_ptr() for tensor in expected]


def _other_scaling(model: nn.Module) -> None:
    model.model.layers[1].self_attn.scaling *= 1.5


def _other_eps(model: nn.Module) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-2


def _other_scaling_of_gpt2(model: nn.Module) -> None:
    model.transformer.h[1].attn.scaling *= 1.5


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


@pytest.mark.parametrize("change", (None, _linear_for_conv1d, _other_scaling_of_gpt2))
def test_same_change_in_every_layer_keeps_one_call(cuda, change):
    """GPT-2's layers are one call if all have another factor, and are not if one of them differs."""
    stock, _ = fresh("gpt2", cuda, **GPT2_SMALL)
    for layer in stock.transformer.h:
        layer.attn.scaling *= 1.5
    if change is not None:
        change(stock)
    ours, ids = hf_fastpath.patch(copy.deepcopy(stock), quiet=True), prompt(cuda)
    options = dict(max_new_tokens=8, do_sample=False)
    assert_same_tokens(ours.generate(ids, **options), stock.generate(ids, **options), stock)
    assert ("decode_layers" in calls(plans(ours)[0])) == (change is None)


ONES = dict(embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0)


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    (
        ("granite", {}, {"qkv_rope_append": 2, "rms_norm": 0, "scaled_sum": 4, "mul": 1, "div": 1}),
        ("granite", ONES, {"qkv_rope_append": 2, "gemv": 5, "scaled_sum": 0, "mul": 0, "div": 0}),
        ("granite", ONES | dict(embedding_multiplier=2.0), {"qkv_rope_append": 2, "scaled_sum": 0, "mul": 1}),
        ("smollm3", {}, {"qkv_rope_append": 2, "decode_attention": 2}),
        ("smollm3", dict(no_rope_layers=[0, 0]), {"qkv_rope_append": 2, "gemv": 5}),
        ("olmo2", {}, {"qkv_rope_append": 2, "rms_norm": 4, "gemv": 5, "scaled_sum": 0}),
        ("phi", {}, {"qkv_rope_append": 2, "decode_attention": 2, "gemv": 7, "scaled_sum": 0}),
        ("cohere", {}, {"qkv_rope_append": 2, "decode_attention": 2, "gemv_swiglu": 2}),
        ("gpt_neox", {}, {"ungrouped": 2, "rope_append": 2, "gemv": 9}),
        ("gemma", {}, {"qkv_rope_append": 2, "rms_norm": 0, "scaled": 1}),
        ("gemma2", {}, {"decode_attention": 2, "soft_capped": 1}),
        ("gpt_oss", {}, {"qkv_rope_append": 2, "decode_attention": 2, "gemv": 5, "routed_experts": 2}),
    ),
)
def test_layers_of_other_kinds_take_what_they_need(architecture, changes, expected):
    """Steps that the kernels fuse stay fused, and an op that does nothing is left out."""
    _, ours = fresh(architecture, **changes)
    ours.generate(prompt(CPU), max_new_tokens=3, do_sample=False)
    names = calls(plans(ours)[0])
    assert {name: names.count(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("architecture", "module", "name"),
    (
        ("granite", "model", "embedding_multiplier"),
        ("granite", "model.layers.1", "residual_multiplier"),
        ("granite", "config", "logits_scaling"),
        ("cohere", "", "logit_scale"),
        ("gemma2", "model.layers.0.self_attn", "attn_logit_softcapping"),
        ("gemma2", "config", "final_logit_softcapping"),
        ("gpt_oss", "model.layers.1.mlp.experts", "limit"),
        ("gpt_oss", "model.layers.0.mlp.experts", "alpha"),
    ),
)
def test_changed_factor_makes_a_new_plan(architecture, module, name):
    stock, ours = fresh(architecture)
    text = prompt(CPU, 8, 40)
    before = forced_logits(ours, text, 9)
    for model in (stock, ours):
        holder = attrgetter(module)(model) if module else model
        setattr(holder, name, 0.4 * getattr(holder, name))
    after = forced_logits(ours, text, 9)
    assert not torch.allclose(after, before)
    ref = float64_copy(stock)
    expected = walk(ref, text, [9] + [1] * 31, RoundingCache(ref.config, torch.float32))[:, 8:]
    rule = LogitRule()
    rule.add(after, forced_logits(stock, text, 9), expected)
    rule.check(f"{architecture} {name}")


@pytest.mark.parametrize("batch", (1, 2))
def test_plan_lets_go_of_the_cache(batch, device):
    """After a call, neither registers nor the arguments of recorded calls keep the KV memory."""
    _, ours = fresh("llama", device)
    out = ours.generate(prompt(device, batch), max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    buffer = weakref.ref(out[CACHE].layers[0].k_buffer)
    assert plans(ours) and buffer() is not None
    del out
    assert buffer() is None


@pytest.mark.parametrize("architecture", ("llama", "gemma3_text", "gpt_oss"))
def test_angles_in_pieces(architecture, device, monkeypatch):
    """The first table has the tokens that generate() expects, larger tables follow, and each is made piece by piece."""
    monkeypatch.setattr(angles, "_ANGLE_ROWS", {device.type: 40})
    monkeypatch.setattr(angles, "_ANGLE_PIECE", 16)
    made, allocate = [], AngleTables._allocate
    monkeypatch.setattr(AngleTables, "_allocate", lambda *given: (made.append(given[1]), allocate(*given))[1])
    stock, ours = fresh(architecture, device)
    ids, rows = prompt(device, 1, 20), []
    for new_tokens in (10, 30, 60, 150):
        options = dict(max_new_tokens=new_tokens, do_sample=False)
        assert_same_tokens(ours.generate(ids, **options), stock.generate(ids, **options), stock)
        rows.append(made.copy())
        made.clear()
    # first the 20 + 10 tokens, the tokens that drafts may need and one more; then twice as many, and again
    assert rows == [[47], [94], [], [188]]
