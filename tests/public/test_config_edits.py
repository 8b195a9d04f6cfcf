"""Facts of shape that are edited in a model's config once it is made: the model's own code does not read them, nor may
ours."""

from __future__ import annotations

import copy

import encoder_decoder_types
import multimodal_types
import pytest
import torch
from causal_lm_types import small_model
from models import SHORT, build, counting, require_native
from parity import assert_same_tokens
from torch import nn
from transformers import PreTrainedModel

import hf_fastpath
from hf_fastpath.architecture import architectures
from hf_fastpath.compat import CACHE, is_multimodal

WHEN = ("before_patch", "after_patch", "after_generate")
#: family -> entries of its config, each with another value; families with a file, then recorded ones
EDITS = {
    "llama": dict(num_attention_heads=8, num_key_value_heads=2, head_dim=16, hidden_size=96, intermediate_size=7),
    "gpt2": dict(n_head=6, num_attention_heads=1, n_embd=60, n_inner=3, vocab_size=11),
    "gemma2": dict(num_attention_heads=4, head_dim=24, vocab_size=1000, num_key_value_heads=2),
    "falcon": dict(num_attention_heads=2, num_kv_heads=4, ffn_hidden_size=9),
    "opt": dict(num_attention_heads=4, ffn_dim=5, word_embed_proj_dim=3, max_position_embeddings=7),
    "mixtral": dict(num_attention_heads=6, num_local_experts=2, num_experts_per_tok=1, intermediate_size=8),
    "qwen3_moe": dict(num_attention_heads=2, num_experts=2, moe_intermediate_size=3, num_experts_per_tok=8),
    "glm4": dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8, hidden_size=16, vocab_size=11),
    "deepseek_v3": dict(
        num_attention_heads=2, head_dim=4, qk_rope_head_dim=16, kv_lora_rank=3, v_head_dim=5, n_routed_experts=2
    ),
    "llava": dict(num_attention_heads=8, head_dim=4, intermediate_size=5),
    "qwen2_vl": dict(num_attention_heads=2, num_key_value_heads=1, hidden_size=32),
    "t5": dict(d_model=32, d_kv=4, d_ff=8, num_heads=2, vocab_size=5000),
    "bart": dict(d_model=32, decoder_attention_heads=1, decoder_ffn_dim=7, hidden_size=16, encoder_attention_heads=1),
}
LISTED = {each.name for each in architectures()}


def made(family: str) -> tuple[PreTrainedModel, dict]:
    """Return a small model and the arguments of its ``generate()``."""
    if family in encoder_decoder_types.types():
        return encoder_decoder_types.small_model(family), encoder_decoder_types.text(1, 9)
    if family in multimodal_types.MEDIA:
        return multimodal_types.small_model(family), multimodal_types.prompt(family, (1,))
    model = build(family) if family in LISTED else small_model(family)
    ids = torch.tensor([[5, 90, 17, 44, 131, 62, 8, 120, 33, 71, 101, 27, 66, 140, 12, 55, 3, 99]])
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def edited(model: nn.Module, entries: dict) -> nn.Module:
    config = model.config.get_text_config(decoder=True) if is_multimodal(model) else model.config
    for name, value in entries.items():
        assert getattr(config, name) != value, f"{name} is {value} already, so the test shows nothing"
        setattr(config, name, value)
    return model


def patched(model: nn.Module, given: dict, when: str, edit) -> nn.Module:
    """Return a patched copy that was edited at some time."""
    ours = copy.deepcopy(model)
    if when != "before_patch":
        hf_fastpath.patch(ours, quiet=True)
    if when == "after_generate":
        ours.generate(**given, **SHORT)
    edit(ours)
    return hf_fastpath.patch(ours, quiet=True)


def cases() -> list:
    """Return each entry of each family, one at a time; the first of each at every time."""
    return [
        pytest.param(family, {name: value}, when, id=f"{family}-{name}-{when}")
        for family, entries in EDITS.items()
        for place, (name, value) in enumerate(entries.items())
        for when in WHEN
        if not place or when == WHEN[place % len(WHEN)]
    ]


@pytest.mark.every(6)
@pytest.mark.parametrize(("family", "entries", "when"), cases())
def test_shapes_are_those_of_modules(family, entries, when, device):
    require_native(device)
    stock, given = made(family)
    stock, given = stock.to(device), {name: each.to(device) for name, each in given.items()}
    ours = patched(stock, given, when, lambda model: edited(model, entries))
    with counting(ours) as counts:
        found = ours.generate(**given, **SHORT)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons, counts.reasons
    assert_same_tokens(found, edited(stock, entries).generate(**given, **SHORT), stock)


@pytest.mark.each_value
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("family", ("llama", "gpt2", "phi3", "glm4", "deepseek_v3"))
def test_layers_that_only_the_config_tells_of(family, when, device):
    """A cache that is made of the config has layers that the model does not have."""
    require_native(device)
    stock, given = made(family)
    stock, given = stock.to(device), {name: each.to(device) for name, each in given.items()}
    more = {"num_hidden_layers": stock.config.num_hidden_layers + 2}
    ours = patched(stock, given, when, lambda model: edited(model, more))
    expected = edited(stock, more).generate(**given, **SHORT)
    for cache in ({}, {CACHE: hf_fastpath.FastpathCache(ours.config)}):
        with counting(ours) as counts:
            found = ours.generate(**given, **cache, **SHORT)
        assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons, counts.reasons
        assert_same_tokens(found, expected, stock)


@pytest.mark.each_value
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("family", ("llama", "gemma2", "qwen3"))
def test_fewer_layers(family, when, device):
    """Here the model's own code does obey its config: it leaves layers out."""
    require_native(device)
    stock, given = made(family)
    stock, given = stock.to(device), {name: each.to(device) for name, each in given.items()}
    whole = stock.generate(**given, **SHORT)
    fewer = {"num_hidden_layers": 1}
    ours = patched(stock, given, when, lambda model: edited(model, fewer))
    with counting(ours) as counts:
        found = ours.generate(**given, **SHORT)
    expected = edited(stock, fewer).generate(**given, **SHORT)
    assert not torch.equal(expected, whole), "the layers change nothing, so the test shows nothing"
    assert_same_tokens(found, expected, stock)
    assert counts.fast == len(found) * SHORT["max_new_tokens"], counts.reasons


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("family", ("gemma3_text", "olmo3"))
def test_kinds_of_layers_are_the_configs(family, when, device):
    """Nor is this a fact of shape: masks and rotary angles of a layer follow the config's list at every call."""
    require_native(device)
    stock, given = made(family)
    stock, given = stock.to(device), {name: each.to(device) for name, each in given.items()}
    before = stock.generate(**given, **SHORT)
    other = {"layer_types": stock.config.layer_types[::-1]}
    ours = patched(stock, given, when, lambda model: edited(model, other))
    with counting(ours) as counts:
        found = ours.generate(**given, **SHORT)
    expected = edited(stock, other).generate(**given, **SHORT)
    assert not torch.equal(expected, before), "the kinds change nothing, so the test shows nothing"
    assert_same_tokens(found, expected, stock)
    # an attention keeps the window that it was made with
    is_fast = counts.fast == SHORT["max_new_tokens"]
    assert is_fast or (counts.reasons and set(counts.reasons) <= {"unsupported_config", "partial_patch"}), (
        counts.reasons
    )


def test_pruned_heads_run_stock_with_a_reason(device):
    """Projections whose features make no whole heads, or heads of different numbers."""
    require_native(device)
    stock, given = made("llama")
    stock, given = stock.to(device), {name: each.to(device) for name, each in given.items()}
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    attention = ours.model.layers[0].self_attn
    values = nn.Linear(attention.v_proj.in_features, attention.v_proj.out_features // 2, bias=False)
    attention.v_proj = values.to(device)
    report = hf_fastpath.report(ours)
    assert report.loop == "unsupported_config" and "projections of [" in str(report)
