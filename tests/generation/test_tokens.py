"""Greedy search and sampling on a patched model give stock's tokens, float32."""

from __future__ import annotations

import pytest
import torch
from models import (
    ARCHITECTURES,
    GREEDY,
    WINDOW,
    counting,
    heldout_tokens,
    left_padded,
    over_architectures,
    pair,
    prompt,
    tokenizer,
    trained,
)
from parity import assert_same_tokens, both

# ---- greedy ------------------------------------------------------------------------------------------------


def test_trained_model_greedy_tokens_equal(device):
    """320 tokens on the trained model, past its window of 256, no ties allowed."""
    stock, ours = trained(device)
    ids = heldout_tokens(60).to(device)
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=ids, max_new_tokens=320, do_sample=False, eos_token_id=None)
    assert counts.fast == 320 and not counts.fallback
    assert_same_tokens(found, expected)


def test_trained_model_padded_batch_tokens_equal(device):
    stock, ours = trained(device)
    texts = ["import os\n\n\ndef", "class Config:\n    def __init__(self, path, default=None", "for"]
    encoder = tokenizer()
    encoder.padding_side = "left"
    inputs = encoder(texts, return_tensors="pt", padding=True).to(device)
    assert (inputs["attention_mask"] == 0).any()
    found, expected = both(stock, ours, **inputs, max_new_tokens=64, do_sample=False)
    assert_same_tokens(found, expected)


@pytest.mark.parametrize("length", (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW))
@pytest.mark.parametrize("prompt_len", (1, WINDOW - 2))
@pytest.mark.parametrize("batch", (1, 3))
def test_window_edge_tokens_equal(batch, prompt_len, length, device):
    """Generation that ends one before, at, one past and a whole window past the window's edge."""
    stock, ours = pair("mistral", device)
    ids = prompt(device, batch, prompt_len)
    found, expected = both(stock, ours, input_ids=ids, max_length=length, do_sample=False)
    assert found.shape[1] == length
    assert_same_tokens(found, expected, stock)


@pytest.mark.parametrize("prompt_len", (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 5))
def test_prompt_at_window_edge_tokens_equal(prompt_len, device):
    stock, ours = pair("mistral", device)
    inputs = left_padded(device, 3, prompt_len)
    found, expected = both(stock, ours, **inputs, **GREEDY)
    assert_same_tokens(found, expected, stock, inputs["attention_mask"])


@over_architectures
def test_outgrows_first_allocation(architecture, device):
    """Hundreds of tokens: the KV buffers grow several times, and tokens stay equal."""
    stock, ours = pair(architecture, device)
    ids = prompt(device, 2, 5)
    found, expected = both(stock, ours, input_ids=ids, max_new_tokens=300, do_sample=False)
    assert_same_tokens(found, expected, stock)


@over_architectures
def test_batch_of_17_falls_back(architecture, device):
    stock, ours = pair(architecture, device)
    ids = prompt(device, 17, 6)
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=ids, **GREEDY)
    assert counts.reasons["batch_size"] and counts.fallback == 17 * 20 and not counts.fast
    assert_same_tokens(found, expected, stock)


def test_several_threads_tokens_equal():
    """With more threads the CPU kernels split their rows, and nothing else changes."""
    stock, ours = trained(torch.device("cpu"))
    ids = heldout_tokens(40)
    torch.set_num_threads(2)
    found, expected = both(stock, ours, input_ids=ids, max_new_tokens=40, do_sample=False)
    assert_same_tokens(found, expected)


def test_mask_with_holes_falls_back(device):
    stock, ours = pair("llama", device)
    ids, mask = prompt(device, 2), torch.ones(2, 11, dtype=torch.long, device=device)
    mask[0, 4] = mask[1, 10] = 0
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=ids, attention_mask=mask, **GREEDY)
    assert counts.reasons["attention_mask"] and not counts.fast
    assert_same_tokens(found, expected)


@over_architectures
def test_right_padding_falls_back(architecture, device):
    """As stock computes it, tokens after the padding included."""
    stock, ours = pair(architecture, device)
    inputs = {name: given.flip(1) for name, given in left_padded(device).items()}
    with counting(ours) as counts:
        found, expected = both(stock, ours, **inputs, **GREEDY)
    assert counts.reasons["attention_mask"] and not counts.fast
    assert_same_tokens(found, expected, stock, inputs["attention_mask"])


@pytest.mark.parametrize("dtype", (torch.bool, torch.int32, torch.float32), ids=str)
def test_mask_of_any_type_tokens_equal(dtype, device):
    stock, ours = pair("llama", device)
    inputs = left_padded(device)
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    with counting(ours) as counts:
        found, expected = both(stock, ours, **inputs, **GREEDY)
    assert counts.fast == 60
    assert_same_tokens(found, expected)


@over_architectures
@pytest.mark.parametrize("rows", (1, 2))
@pytest.mark.parametrize("first", (0, 5, 900))
def test_users_position_ids_tokens_equal(first, rows, architecture, device):
    stock, ours = pair(architecture, device)
    where = torch.arange(first, first + 11, device=device).expand(rows, -1)
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=prompt(device, 2), position_ids=where, **GREEDY)
    assert counts.fast == 40
    assert_same_tokens(found, expected, stock)


def test_users_position_ids_that_jump_tokens_equal(device):
    """Packed and shifted positions, other ones in each row."""
    stock, ours = pair("llama", device)
    where = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7], [7, 9, 11, 20, 21, 22, 23, 24, 50, 51, 52]], device=device)
    found, expected = both(stock, ours, input_ids=prompt(device, 2), position_ids=where, **GREEDY)
    assert_same_tokens(found, expected, stock)


# ---- sampling ----------------------------------------------------------------------------------------------


SAMPLING = {
    "plain": dict(),
    "temperature": dict(temperature=0.7),
    "top_k": dict(top_k=7),
    "top_p": dict(top_p=0.8, top_k=0),
    "min_p_typical": dict(min_p=0.02, typical_p=0.9),
    "repetition_penalty": dict(repetition_penalty=1.3, no_repeat_ngram_size=3),
    "all": dict(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.2, min_new_tokens=5),
}


@pytest.mark.parametrize("options", SAMPLING.values(), ids=SAMPLING)
def test_sampling_tokens_equal(options, device):
    """Same seed, same tokens, and the generator ends in the same state."""
    for architecture in ARCHITECTURES:
        stock, ours = pair(architecture, device)
        ids = prompt(device, 2)
        with counting(ours) as counts:
            found, expected = both(stock, ours, input_ids=ids, do_sample=True, max_new_tokens=24, **options)
        assert counts.fast == 48 and not counts.fallback
        assert_same_tokens(found, expected)


def test_sampling_on_the_trained_model_tokens_equal(device):
    stock, ours = trained(device)
    ids = heldout_tokens(30).to(device)
    options = dict(do_sample=True, top_p=0.95, temperature=0.9, max_new_tokens=100, num_return_sequences=4)
    found, expected = both(stock, ours, input_ids=ids, **options)
    assert found.shape[0] == 4
    assert_same_tokens(found, expected)


def test_sampling_that_ends_early_leaves_the_generator_as_stock_does(device):
    """Rows end at different steps; steps run past the end must leave no trace in the generator."""
    stock, ours = pair("llama", device)
    for seed in range(4):
        options = dict(do_sample=True, top_k=20, max_new_tokens=60, eos_token_id=list(range(100, 200)), seed=seed)
        found, expected = both(stock, ours, input_ids=prompt(device, 3, seed=seed), **options)
        assert found.shape[1] < 11 + 60
        assert_same_tokens(found, expected)
