"""patch(kv_dtype="int8" | "fp8"): tokens are those of stock over a cache with the same quants, however it is used."""

from __future__ import annotations

import copy

import pytest
import torch
from models import GREEDY, SHORT, WINDOW, build, heldout_tokens, prompt, trained
from parity import RoundingCache, forced_logits

import hf_fastpath
from hf_fastpath import FastpathCache
from hf_fastpath.compat import CACHE, eager_experts
from hf_fastpath.decode.loops.patched import paused
from hf_fastpath.ops.kv_cache import dequantized

NAMES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
over_names = pytest.mark.parametrize("name", NAMES)
#: separate and joined projections, norms of heads, soft caps, windows, sinks, heads of 40
FAMILIES = ("gpt2", "llama", "mistral", "phi3", "qwen3", "gemma2", "gpt_oss", "falcon", "cohere2")


def patched(stock, name, **options):
    return hf_fastpath.patch(copy.deepcopy(stock), kv_dtype=name, quiet=True, **options)


def quantizing(stock, name) -> RoundingCache:
    return RoundingCache(stock.config, NAMES[name])


def mean_errors(stock, ours, name, text, prompt_len, **given) -> tuple[float, float]:
    """Return the mean errors of logits against float64, of ours and of stock over the same quants."""
    exact = copy.deepcopy(stock).double()
    with eager_experts(exact):
        ref = forced_logits(exact, text, prompt_len, **{CACHE: quantizing(stock, name)}, **given)
    same = forced_logits(stock, text, prompt_len, **{CACHE: quantizing(stock, name)}, **given)
    found = forced_logits(ours, text, prompt_len, **given)
    return tuple((logits.double() - ref.double()).abs().mean().item() for logits in (found, same))


@pytest.mark.each_value
@over_names
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_near_as_stocks(family, name, device):
    """The text goes past the windows' edge in bfloat16, with and without left padding."""
    stock = build(family).to(device, torch.bfloat16)
    ours, errors = patched(stock, name), []
    for seed in range(3):
        torch.manual_seed(seed)
        text = torch.randint(3, 300, (2, WINDOW + 20), device=device)
        mask = torch.ones(2, WINDOW - 3, dtype=torch.long, device=device)
        if family != "gemma2":  # its float64 copy makes NaN of padding
            mask[0, : 4 * (seed % 2)] = 0
        errors.append(mean_errors(stock, ours, name, text, WINDOW - 3, attention_mask=mask))
    mine, stocks = map(sum, zip(*errors))
    assert mine <= 1.25 * stocks, f"mean error {mine / 3:.3e}, stock's {stocks / 3:.3e}"
    stats = hf_fastpath.report(ours).stats
    assert stats["fallback_tokens"] == 0 and stats["fast_tokens"] > 0


@over_names
def test_tokens_of_the_trained_model(name, device):
    """Tokens are those of stock over the same quants, for one sequence and several."""
    stock, _ = trained(device)
    ours = patched(stock, name)
    ids = heldout_tokens(60).to(device)
    for batch in (ids, ids.view(3, 20)):
        expected = stock.generate(batch, **{CACHE: quantizing(stock, name)}, **GREEDY)
        out = ours.generate(batch, return_dict_in_generate=True, **GREEDY)
        assert torch.equal(out.sequences, expected)
        layers = out[CACHE].layers
        assert {layer.k_buffer.dtype for layer in layers} == {NAMES[name]}
        assert {layer.v_scales.shape for layer in layers} == {layer.v_buffer.shape[:3] for layer in layers}


@over_names
def test_a_text_may_be_cut_anywhere(name, device):
    """One prompt, several, or single tokens give the same cache but for rounding, and the same tokens."""
    stock, _ = trained(device)
    ours, ids = patched(stock, name), heldout_tokens(48).to(device)
    whole = ours.generate(ids, return_dict_in_generate=True, **GREEDY)
    for cuts in ((20,), (1, 2, 3, 40), (47,)):
        cache = FastpathCache(ours.config, kv_dtype=NAMES[name])
        for end in (*cuts, 48):
            out = ours.generate(ids[:, :end], **{CACHE: cache}, max_new_tokens=1, do_sample=False)
            cache.crop(end - cache.get_seq_length()) if cache.get_seq_length() > end else None
        found = ours.generate(out, **{CACHE: cache}, max_new_tokens=19, do_sample=False)
        assert torch.equal(found, whole.sequences), cuts
    chunked = ours.generate(ids, prefill_chunk_size=7, **GREEDY)
    assert torch.equal(chunked, whole.sequences)


@over_names
def test_other_loops(name, device):
    """The loops of beams, prompt lookup and an assistant crop and reorder the cache; prefixes are copied."""
    stock, _ = trained(device)
    ours, ids = patched(stock, name), heldout_tokens(40).to(device)
    plain = ours.generate(ids, **GREEDY)
    for options in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": copy.deepcopy(stock)}):
        assert torch.equal(ours.generate(ids, **options, **GREEDY), plain), options
    beams = dict(num_beams=3, **SHORT)
    expected = stock.generate(ids, **{CACHE: quantizing(stock, name)}, **beams)
    assert torch.equal(ours.generate(ids, **beams), expected)
    prefix = ours.generate(ids[:, :30], max_new_tokens=1, do_sample=False, return_dict_in_generate=True)[CACHE]
    for _ in range(2):
        assert torch.equal(ours.generate(ids, **{CACHE: copy.deepcopy(prefix)}, **GREEDY), plain)


@over_names
def test_stock_code_reads_what_the_kernels_wrote(name, device):
    """A conversation whose patch is paused in the middle goes on over the same cache."""
    stock, _ = trained(device)
    ours, ids = patched(stock, name), heldout_tokens(40).to(device)
    whole = ours.generate(ids, max_new_tokens=20, do_sample=False)
    first = ours.generate(ids, max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(first.sequences, whole[:, :50])
    with paused(ours):
        second = ours.generate(first.sequences, **{CACHE: first[CACHE]}, max_new_tokens=10, do_sample=False)
    assert torch.equal(second, whole)


@over_names
def test_left_padded_batches(name, device):
    stock, _ = trained(device)
    ours = patched(stock, name)
    ids = heldout_tokens(60).view(3, 20).to(device)
    mask = torch.ones_like(ids)
    mask[1, :5], mask[2, :12] = 0, 0
    given = dict(attention_mask=mask, **GREEDY)
    expected = stock.generate(ids, **{CACHE: quantizing(stock, name)}, **given)
    assert torch.equal(ours.generate(ids, **given), expected)


@over_names
def test_bytes_a_position(name, device):
    """Each value takes one byte, and each head two more."""
    ours = patched(build("llama").to(device), name)
    out = ours.generate(prompt(device), return_dict_in_generate=True, **SHORT)
    for layer in out[CACHE].layers:
        heads = layer.batch_size * layer.k_buffer.shape[1] * layer.capacity
        assert sum(buffer.nbytes for buffer in layer.buffers) == 2 * heads * (layer.k_buffer.shape[3] + 2)


def test_keys_can_be_assigned(device):
    cache = FastpathCache(kv_dtype=torch.int8)
    states = torch.randn(1, 2, 9, 32, device=device)
    cache.update(states, states, 0)
    layer = cache.layers[0]
    layer.keys, layer.values = layer.keys[:, :, :4], layer.values[:, :, :4]
    assert cache.get_seq_length() == 4
    found = cache.update(states[:, :, :1], states[:, :, :1], 0)[0]
    assert found.shape[2] == 5 and (found[:, :, :4] - states[:, :, :4]).abs().max() < 0.05
    held = dequantized(layer.k_buffer[:, :, :5], layer.k_scales[:, :, :5], torch.float32)
    assert torch.equal(held, found)


def test_verify_holds_stock_over_the_same_quants_beside_it(device):
    stock, _ = trained(device)
    for name in NAMES:
        found = hf_fastpath.verify(patched(stock, name), heldout_tokens(40).to(device), max_new_tokens=8)
        assert found.ok, str(found)
        assert found.mean_floor > 1e-4  # float32's own noise is far below that of quants
