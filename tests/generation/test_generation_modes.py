"""Beams, assisted decoding, and calls that transformers' own loop runs, give stock's tokens."""

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
from hf_fastpath.compat import CACHE


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
    assert counts.fast and not counts.reasons
    assert_same_tokens(found, expected)


def test_beam_scores_and_indices(device):
    stock, ours = pair("mistral", device)
    options = dict(num_beams=3, max_new_tokens=20, do_sample=False, length_penalty=0.5, early_stopping=True)
    options |= dict(return_dict_in_generate=True, output_scores=True, eos_token_id=list(range(40, 60)))
    found, expected = both(stock, ours, **left_padded(device, 2), **options)
    assert_same_tokens(found.sequences, expected.sequences)
    assert torch.equal(found.beam_indices, expected.beam_indices)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)
    assert len(found.scores) == len(expected.scores)


def test_modes_that_transformers_moved_out_give_its_own_error(device):
    stock, ours = pair("llama", device)
    for options in (dict(num_beams=4, num_beam_groups=2, diversity_penalty=0.5), dict(penalty_alpha=0.6, top_k=4)):
        messages = []
        for model in (ours, stock):
            with pytest.raises(ValueError, match="trust_remote_code") as caught:
                model.generate(prompt(device), **options, **GREEDY)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


def test_users_own_decode_loop(device):
    """custom_generate= gets our cache, and its forwards the fused layers."""

    def greedy(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        while True:
            inputs = model.prepare_inputs_for_generation(
                input_ids,
                next_sequence_length=input_ids.shape[1] - model_kwargs[CACHE].get_seq_length(),
                **model_kwargs,
            )
            outputs = model(**inputs, return_dict=True)
            model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
            input_ids = torch.cat((input_ids, outputs.logits[:, -1:].argmax(-1)), dim=1)
            if stopping_criteria(input_ids, None).all():
                return input_ids

    stock, ours = pair("llama", device)
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=prompt(device, 2), custom_generate=greedy, **GREEDY)
    assert not counts.reasons
    assert_same_tokens(found, expected, stock)
    assert_same_tokens(expected, stock.generate(prompt(device, 2), **GREEDY), stock)


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


@pytest.mark.each_value
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


QUANTIZED = dict(backend="quanto", nbits=4, q_group_size=16, residual_length=8)
STOCK_CACHES = {
    "static": dict(cache_implementation="static", disable_compile=True),
    "offloaded": dict(cache_implementation="offloaded"),
    "quantized": dict(cache_implementation="quantized", cache_config=QUANTIZED),
}


@pytest.mark.parametrize("patched", ("main", "assistant", "both"))
def test_assisted_sampling(patched, device):
    """Drafts are accepted and rejected by chance, with the same random numbers. The models have no windows: stock of
    transformers 5.17 fails once a window is full."""
    require_native(device)
    stock, ours = pair("llama", device)
    assistant = build("llama", num_hidden_layers=1).to(device)
    results = []
    for model in (stock, stock if patched == "assistant" else ours):
        if results and patched != "main":
            hf_fastpath.patch(assistant, quiet=True)
        torch.manual_seed(3)
        options = dict(max_new_tokens=20, do_sample=True, temperature=0.7)
        results.append(model.generate(prompt(device), assistant_model=assistant, **options))
    assert_same_tokens(results[1], results[0])


@pytest.mark.parametrize("name", STOCK_CACHES)
def test_cache_implementation_falls_back(name, device):
    """If the user asks for a kind of cache, that kind is used."""
    if name == "quantized":
        pytest.importorskip("optimum.quanto", reason="optimum-quanto quantizes the cache")
    if name == "offloaded" and device.type == "cpu":
        pytest.skip("transformers offloads from a GPU")
    stock, ours = pair("llama", device)
    ids = prompt(device, 2)
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=ids, **STOCK_CACHES[name], **GREEDY)
    assert counts.reasons["other_cache"] and not counts.fast
    if name == "offloaded":  # in transformers 5.17 stock's own copies race (compat.order_offloading)
        expected = stock.generate(ids, **GREEDY)
    assert_same_tokens(found, expected)


def test_dynamic_cache_by_name_is_fast(device):
    """generate() makes the same cache without a name."""
    stock, ours = pair("mistral", device)
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=prompt(device, 2), cache_implementation="dynamic", **GREEDY)
    assert counts.fast == 40 and not counts.reasons
    assert_same_tokens(found, expected, stock)


@over_architectures
def test_no_cache_falls_back(architecture, device):
    stock, ours = pair(architecture, device)
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=prompt(device, 2), use_cache=False, **GREEDY)
    assert counts.reasons["no_cache"] and not counts.fast
    assert_same_tokens(found, expected, stock)


@over_architectures
def test_prompt_of_embeddings(architecture, device):
    stock, ours = pair(architecture, device)
    ids = prompt(device, 2)
    embeds = stock.get_input_embeddings()(ids).detach()
    with counting(ours) as counts:
        found, expected = both(stock, ours, inputs_embeds=embeds, **GREEDY)
    assert counts.fast == found.numel() and not counts.reasons
    assert_same_tokens(torch.cat((ids, found), 1), torch.cat((ids, expected), 1), stock)


def test_drafts_behind_embeddings_fall_back(device):
    stock, ours = pair("llama", device)
    embeds = stock.get_input_embeddings()(prompt(device, 1)).detach()
    with counting(ours) as counts:
        found, expected = both(stock, ours, inputs_embeds=embeds, prompt_lookup_num_tokens=2, **GREEDY)
    assert counts.reasons["generation_mode"] and not counts.fast
    assert_same_tokens(found, expected)


def test_token_type_ids_fall_back(device):
    stock, ours = pair("gpt2", device)
    types = torch.full((2, 11), 5, device=device)
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=prompt(device, 2), token_type_ids=types, **GREEDY)
    assert counts.reasons["unsupported_input"] and not counts.fast
    assert_same_tokens(found, expected)


def test_embeddings_with_input_ids(device):
    stock, ours = pair("llama", device)
    inputs = left_padded(device, 2)
    embeds = stock.get_input_embeddings()(inputs["input_ids"]).detach()
    with counting(ours) as counts:
        found, expected = both(stock, ours, inputs_embeds=embeds, **inputs, **GREEDY)
    assert counts.fast == 2 * 20 and not counts.reasons
    assert_same_tokens(found, expected, stock, inputs["attention_mask"])


def test_without_a_prompt(device):
    """generate() starts from the first token of the vocabulary."""
    stock, ours = pair("mistral", device)
    with counting(ours) as counts:
        found, expected = both(stock, ours, **GREEDY)
    assert counts.fast == 20 and found.shape == (1, 21)
    assert_same_tokens(found, expected, stock)
