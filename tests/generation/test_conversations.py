"""Caches that a user passes, keeps and continues with."""

from __future__ import annotations

import copy

import pytest
import torch
from models import (
    ARCHITECTURES,
    GREEDY,
    counting,
    heldout_tokens,
    left_padded,
    over_architectures,
    pair,
    prompt,
    trained,
)
from parity import assert_same_tokens, both
from transformers import DynamicCache

import hf_fastpath
from hf_fastpath import FastpathCache
from hf_fastpath.compat import CACHE


@over_architectures
@pytest.mark.parametrize("chunk", (1, 4, 7, 40))
def test_prefill_chunk_size(chunk, architecture, device):
    stock, ours = pair(architecture, device)
    inputs = left_padded(device, 3, 21)
    with counting(ours) as counts:
        found, expected = both(stock, ours, **inputs, prefill_chunk_size=chunk, **GREEDY)
    assert counts.fast == 60
    assert_same_tokens(found, expected, stock, inputs["attention_mask"])


@over_architectures
@pytest.mark.parametrize("whole", (True, False), ids=("whole_ids", "new_ids"))
def test_conversation_continues(whole, architecture, device):
    """Three turns go over the returned cache, with padded rows, across Mistral's window."""
    stock, ours = pair(architecture, device)
    ends = []
    for model in (ours, stock):
        inputs = left_padded(device, 3, 9)
        ids, mask, cache = inputs["input_ids"], inputs["attention_mask"], None
        for turn in range(3):
            if cache is not None:
                new = prompt(device, 3, 5, seed=turn)
                ids = torch.cat((ids, new), dim=1)
                mask = torch.cat((mask, mask.new_ones(3, ids.shape[1] - mask.shape[1])), dim=1)
            given = ids if whole or cache is None else ids[:, cache.get_seq_length() :]
            options = {CACHE: cache} if cache is not None else {}
            with counting(ours) as counts:
                out = model.generate(
                    given,
                    attention_mask=mask,
                    return_dict_in_generate=True,
                    **options,
                    **(GREEDY | {"max_new_tokens": 9}),
                )
            if model is ours:
                assert counts.fast == 27 and not counts.fallback, counts.reasons
                assert isinstance(out[CACHE], FastpathCache)
            ids = torch.cat((ids, out.sequences[:, given.shape[1] :]), dim=1)
            cache = out[CACHE]
            assert cache.get_seq_length() == ids.shape[1] - 1
        ends.append(ids)
    assert_same_tokens(*ends, stock, left_padded(device, 3, 9)["attention_mask"])


def test_users_dynamic_cache_is_filled_in_place(device):
    """If the user passes a cache of another class, stock code fills it, and the reason says so."""
    stock, ours = pair("mistral", device)
    caches = [DynamicCache(config=model.config) for model in (ours, stock)]
    with counting(ours) as counts:
        found = ours.generate(prompt(device), **{CACHE: caches[0]}, **GREEDY)
    assert counts.reasons["other_cache"] and not counts.fast
    assert_same_tokens(found, stock.generate(prompt(device), **{CACHE: caches[1]}, **GREEDY), stock)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 30
    for a, b in zip(caches[0].layers, caches[1].layers):
        torch.testing.assert_close(a.keys, b.keys)


@pytest.mark.parametrize("with_config", (True, False))
@over_architectures
def test_users_fastpath_cache_is_fast(architecture, with_config, device):
    stock, ours = pair(architecture, device)
    cache = FastpathCache(ours.config) if with_config else FastpathCache()
    with counting(ours) as counts:
        found = ours.generate(prompt(device, 2, 25), **{CACHE: cache}, **GREEDY)
    assert counts.fast == 40 and cache.get_seq_length() == 44
    assert_same_tokens(found, stock.generate(prompt(device, 2, 25), **GREEDY), stock)


def test_fastpath_cache_on_a_stock_model(device):
    """An unpatched model takes our cache like any other."""
    for architecture in ARCHITECTURES:
        stock, _ = pair(architecture, device)
        cache = FastpathCache(stock.config)
        found = stock.generate(prompt(device, 2, 25), **{CACHE: cache}, **GREEDY)
        assert_same_tokens(found, stock.generate(prompt(device, 2, 25), **GREEDY), stock)


@over_architectures
def test_prefix_reuse_with_deepcopied_cache(architecture, device):
    """One prefix is run once and continued in two ways from copies; the original stays as it was."""
    stock, ours = pair(architecture, device)
    prefix = prompt(device, 1, 20)
    cache = FastpathCache(ours.config)
    with torch.no_grad():
        ours(prefix, **{CACHE: cache}, use_cache=True)
    for seed in (1, 2):
        ids = torch.cat((prefix, prompt(device, 1, 4, seed=seed)), dim=1)
        with counting(ours) as counts:
            found = ours.generate(ids, **{CACHE: copy.deepcopy(cache)}, **GREEDY)
        assert counts.fast == 20
        assert_same_tokens(found, stock.generate(ids, **GREEDY), stock)
    assert cache.get_seq_length() == 20


@over_architectures
def test_cropped_cache_continues(architecture, device):
    """The user takes back the end of a turn and goes on differently, as if the text had been so from the start."""
    stock, ours = pair(architecture, device)
    out = ours.generate(prompt(device, 2), return_dict_in_generate=True, **GREEDY)
    cache, kept = out[CACHE], 22
    cache.crop(kept - cache.get_seq_length())
    ids = torch.cat((out.sequences[:, :kept], prompt(device, 2, 4, seed=3)), dim=1)
    with counting(ours) as counts:
        found = ours.generate(ids, **{CACHE: cache}, **GREEDY)
    assert counts.fast == 40
    assert_same_tokens(found, stock.generate(ids, **GREEDY), stock)


@over_architectures
def test_one_prefix_for_several_rows(architecture, device):
    """A cached prefix of one row is repeated for a batch."""
    stock, ours = pair(architecture, device)
    prefix, cache = prompt(device, 1, 20), FastpathCache(ours.config)
    with torch.no_grad():
        ours(prefix, **{CACHE: cache}, use_cache=True)
    cache.batch_repeat_interleave(3)
    ids = torch.cat((prefix.expand(3, -1), prompt(device, 3, 4)), dim=1)
    with counting(ours) as counts:
        found = ours.generate(ids, **{CACHE: cache}, **GREEDY)
    assert counts.fast == 60
    assert_same_tokens(found, stock.generate(ids, **GREEDY), stock)


def test_cache_of_another_batch_size_gives_a_clear_error_or_stocks(device):
    """Continuing a conversation of 2 rows with 3 gives an error, never other tokens."""
    _, ours = pair("llama", device)
    out = ours.generate(prompt(device, 2), return_dict_in_generate=True, **GREEDY)
    ids = torch.cat((out.sequences, prompt(device, 2, 3)), dim=1)
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        ours.generate(torch.cat((ids, ids[:1])), **{CACHE: out[CACHE]}, **GREEDY)
    found = ours.generate(prompt(device, 2), **GREEDY)  # the model is not stuck
    assert torch.equal(found, out.sequences)


def test_float16_kv_cache(device):
    """With kv_dtype=float16 every buffer is float16, and the tokens of the trained model stay the same."""
    stock, _ = trained(device)
    ids = heldout_tokens(50).to(device)
    with hf_fastpath.patched(copy.deepcopy(stock), kv_dtype=torch.float16, quiet=True) as ours:
        out = ours.generate(ids, return_dict_in_generate=True, **GREEDY)
        assert hf_fastpath.report(ours).stats["fast_tokens"] == 20
    assert {layer.k_buffer.dtype for layer in out[CACHE].layers} == {torch.float16}
    assert_same_tokens(out.sequences, stock.generate(ids, **GREEDY))


def test_inference_mode_then_no_grad(device):
    """Buffers that were made in one mode are used in the other, both ways round; so are caches."""
    stock, _ = pair("mistral", device)
    expected = stock.generate(prompt(device, 2), **GREEDY)
    for first, second in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
        with first():
            out = ours.generate(prompt(device, 2), return_dict_in_generate=True, **GREEDY)
        with second():
            assert_same_tokens(ours.generate(prompt(device, 2), **GREEDY), expected, stock)
            longer = torch.cat((out.sequences.clone(), prompt(device, 2, 3)), dim=1)
            found = ours.generate(longer, **{CACHE: out[CACHE]}, **GREEDY)
        assert_same_tokens(out.sequences, expected, stock)
        assert_same_tokens(found, stock.generate(longer.clone(), **GREEDY), stock)
