"""Beams, assisted decoding, and calls that transformers' own loop runs: stock's tokens."""

from __future__ import annotations

import pytest
import torch
from models import (
    GREEDY,
    build,
    counting,
    heldout_tokens,
    left_padded,
    over_architectures,
    pair,
    prompt,
    require_native,
    trained,
)
from parity import assert_same_tokens, both

import hf_fastpath


@pytest.mark.parametrize("options", (dict(), dict(num_beams=1, num_return_sequences=3, do_sample=True)))
def test_num_return_sequences(options, device):
    stock, ours = pair("mistral", device)
    options = dict(do_sample=True, num_return_sequences=2, max_new_tokens=20) | options
    with counting(ours) as counts:
        found, expected = both(stock, ours, **left_padded(device, 2), **options)
    assert counts.fast == found.shape[0] * 20 == expected.shape[0] * 20
    assert_same_tokens(found, expected)


@over_architectures
@pytest.mark.parametrize("options", (dict(), dict(do_sample=True, top_k=10)), ids=("search", "sample"))
def test_beams(options, architecture, device):
    stock, ours = pair(architecture, device)
    options = dict(num_beams=3, num_return_sequences=2, max_new_tokens=20, do_sample=False) | options
    with counting(ours) as counts:
        found, expected = both(stock, ours, **left_padded(device, 2), **options)
    assert counts.reasons["generation_mode"] and not counts.fast
    assert_same_tokens(found, expected)


@pytest.mark.parametrize("sample", (False, True))
def test_prompt_lookup(sample, device):
    stock, ours = trained(device)
    ids = heldout_tokens(120).to(device)
    options = dict(prompt_lookup_num_tokens=5, max_new_tokens=60, do_sample=sample)
    found, expected = both(stock, ours, input_ids=ids, **options)
    assert_same_tokens(found, expected)


def test_prompt_lookup_across_the_window(device):
    """Rejected drafts are cropped from layers that have moved on."""
    stock, ours = trained(device)
    ids = heldout_tokens(300).to(device)
    found, expected = both(stock, ours, input_ids=ids, prompt_lookup_num_tokens=8, max_new_tokens=80, do_sample=False)
    assert_same_tokens(found, expected)


@pytest.mark.parametrize("patched", ("main", "assistant", "both"))
@over_architectures
def test_assisted_decoding(architecture, patched, device):
    """The assistant has other weights than the model, so that drafts are accepted and rejected."""
    require_native(device)
    stock, ours = pair(architecture, device)
    changes = {"n_layer": 1} if architecture == "gpt2" else {"num_hidden_layers": 1}
    assistant = build(architecture, **changes).to(device)
    expected = stock.generate(prompt(device), assistant_model=assistant, max_new_tokens=40, do_sample=False)
    plain = stock.generate(prompt(device), max_new_tokens=40, do_sample=False)
    assert_same_tokens(plain, expected, stock)
    if patched != "main":
        hf_fastpath.patch(assistant, quiet=True)
    main = stock if patched == "assistant" else ours
    found = main.generate(prompt(device), assistant_model=assistant, max_new_tokens=40, do_sample=False)
    assert_same_tokens(found, expected, stock)


def test_static_cache_falls_back(device):
    stock, ours = pair("llama", device)
    options = dict(cache_implementation="static", disable_compile=True, **GREEDY)
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=prompt(device, 2), **options)
    assert counts.reasons["other_cache"] and not counts.fast
    assert_same_tokens(found, expected)


@over_architectures
def test_no_cache_falls_back(architecture, device):
    stock, ours = pair(architecture, device)
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=prompt(device, 2), use_cache=False, **GREEDY)
    assert counts.reasons["no_cache"] and not counts.fast
    assert_same_tokens(found, expected, stock)


@over_architectures
def test_inputs_embeds_fall_back(architecture, device):
    stock, ours = pair(architecture, device)
    embeds = stock.get_input_embeddings()(prompt(device, 2)).detach()
    with counting(ours) as counts:
        found, expected = both(stock, ours, inputs_embeds=embeds, **GREEDY)
    assert counts.reasons["unsupported_input"] and not counts.fast
    assert_same_tokens(found, expected, stock)


def test_token_type_ids_fall_back(device):
    stock, ours = pair("gpt2", device)
    types = torch.full((2, 11), 5, device=device)
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=prompt(device, 2), token_type_ids=types, **GREEDY)
    assert counts.reasons["unsupported_input"] and not counts.fast
    assert_same_tokens(found, expected)
