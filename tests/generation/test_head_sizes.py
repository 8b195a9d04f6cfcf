"""Models as small as those of other people's tests, and with larger heads than kernels are made for: stock's tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from models import build, counting, left_padded, prompt, require_native
from parity import RoundingCache, assert_same_tokens

import hf_fastpath
from hf_fastpath.compat import CACHE

#: architecture -> config entries; comments give the size of its heads and how much of them rotates
MODELS = {
    "llama": dict(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4, intermediate_size=64),
    "gpt2": dict(n_embd=32, n_head=4, n_inner=37),  # 8
    "mistral": dict(hidden_size=24, num_attention_heads=4, num_key_value_heads=1, head_dim=6),  # in a window
    "gpt_neox": dict(hidden_size=40, num_attention_heads=4, rope_parameters={"partial_rotary_factor": 0.6}),  # 6 of 10
    "gemma": dict(hidden_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=512),
    "qwen3": dict(hidden_size=20, num_attention_heads=2, num_key_value_heads=1, head_dim=100),  # with norms
}
SETTINGS = dict(do_sample=False, max_new_tokens=24)


def tokens(model, inputs, **options):
    with counting(model) as counts:
        found = model.generate(**inputs, **SETTINGS, **options)
    return found, counts


@pytest.mark.parametrize("architecture", MODELS)
def test_tokens_are_stocks(architecture, device):
    require_native(device)
    stock = build(architecture, **MODELS[architecture]).to(device)
    alone, batch = {"input_ids": prompt(device, 1, 11)}, left_padded(device)
    for options in ({}, {"page_size": 16}, {"kv_dtype": "int8"}):
        ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True, **options)
        assert not hf_fastpath.report(ours).declined
        for inputs in (alone, batch):
            rounded = {CACHE: RoundingCache(stock.config, torch.int8)} if "kv_dtype" in options else {}
            expected = stock.generate(**inputs, **SETTINGS, **rounded)
            found, counts = tokens(ours, inputs)
            assert counts.fast and set(counts.reasons) <= {"window_not_paged"}, counts.reasons
            assert_same_tokens(found, expected, stock, inputs.get("attention_mask"))


def test_quantized_weights_of_small_heads(device):
    """The products of such heads append head by head as well."""
    require_native(device)
    stock = build("llama", hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=6).to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True, weights="int8")
    inputs = {"input_ids": prompt(device, 1, 11)}
    found, counts = tokens(ours, inputs)
    assert counts.fast and not counts.reasons
    logits = ours(found).logits[0, 10:-1]  # the products for many rows compute these
    margins = logits.topk(2).values
    same = logits.argmax(-1) == found[0, 11:]
    assert (same | (margins[:, 0] - margins[:, 1] < 1e-4)).all()
