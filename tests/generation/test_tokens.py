"""generate() on a patched model gives stock's tokens, float32, whatever it is asked for."""

from __future__ import annotations

import copy

import pytest
import torch
from models import (
    ARCHITECTURES,
    WINDOW,
    build,
    counting,
    heldout_tokens,
    left_padded,
    pair,
    prompt,
    require_native,
    tokenizer,
    trained,
)
from parity import LogitRule, RoundingCache, assert_same_tokens, float64_copy, walk
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hf_fastpath
from hf_fastpath import FastpathCache

over_architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)
GREEDY = dict(max_new_tokens=20, do_sample=False)


def rng_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def both(stock, ours, seed: int = 7, **kwargs):
    """The same generate() call on both from the same seed; the random number generators must end alike."""
    results, states = [], []
    for model in (ours, stock):
        torch.manual_seed(seed)
        results.append(model.generate(**kwargs))
        states.append(rng_state(model.device))
    assert torch.equal(*states), "the random number generators ended in different states"
    return results


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


def test_boolean_mask_tokens_equal(device):
    stock, ours = pair("llama", device)
    inputs = left_padded(device)
    inputs["attention_mask"] = inputs["attention_mask"].bool()
    found, expected = both(stock, ours, **inputs, **GREEDY)
    assert_same_tokens(found, expected)


def test_users_position_ids_tokens_equal(device):
    stock, ours = pair("mistral", device)
    ids = prompt(device, 2)
    where = torch.arange(5, 16, device=device).expand(2, -1)
    found, expected = both(stock, ours, input_ids=ids, position_ids=where, **GREEDY)
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


# ---- ends --------------------------------------------------------------------------------------------------


def chosen_token(stock, ids: torch.Tensor, step: int, row: int = 0) -> int:
    """The token that stock generates greedily at ``step``."""
    return int(stock.generate(ids, max_new_tokens=step + 1, do_sample=False)[row, ids.shape[1] + step])


@over_architectures
def test_eos_stops_and_pads(architecture, device):
    """A row that ends early is padded; the call ends with the last row."""
    stock, ours = pair(architecture, device)
    ids = prompt(device, 3)
    ends = [chosen_token(stock, ids, 4, row=0), chosen_token(stock, ids, 9, row=1)]
    options = dict(max_new_tokens=30, do_sample=False, eos_token_id=ends, pad_token_id=0)
    found, expected = both(stock, ours, input_ids=ids, **options)
    assert (expected[0, 11 + 5 :] == 0).all()
    assert_same_tokens(found, expected, stock)


@pytest.mark.parametrize("step", (0, 1, 7, 8, 9, 19))
def test_eos_at_any_step(step, device):
    """The first token, the last, and around the number of tokens the host may be ahead."""
    stock, ours = pair("mistral", device)
    ids = prompt(device, 1)
    options = dict(max_new_tokens=20, do_sample=False, eos_token_id=chosen_token(stock, ids, step))
    found, expected = both(stock, ours, input_ids=ids, **options, return_dict_in_generate=True)
    assert_same_tokens(found.sequences, expected.sequences, stock)
    lengths = [r.past_key_values.get_seq_length() for r in (found, expected)]
    assert lengths[0] == lengths[1], "the returned cache must not hold tokens past the end"


def test_one_new_token(device):
    stock, ours = pair("gpt2", device)
    found, expected = both(stock, ours, input_ids=prompt(device, 2), max_new_tokens=1, do_sample=False)
    assert_same_tokens(found, expected)


def test_stop_strings(device):
    stock, ours = trained(device)
    inputs = tokenizer()("import os\n\n\ndef", return_tensors="pt").to(device)
    options = dict(max_new_tokens=60, do_sample=False, stop_strings=["\n\n"], tokenizer=tokenizer())
    found, expected = both(stock, ours, **inputs, **options)
    assert expected.shape[1] < inputs["input_ids"].shape[1] + 60, "the text never reached the stop string"
    assert_same_tokens(found, expected)


def test_max_time_stops(device):
    """The clock ends generation after few tokens, which are stock's."""
    stock, ours = pair("llama", device)
    ids = prompt(device, 1)
    found = ours.generate(ids, max_new_tokens=1500, max_time=0.05, do_sample=False)
    assert 11 < found.shape[1] < 1511
    expected = stock.generate(ids, max_length=found.shape[1], do_sample=False)
    assert_same_tokens(found, expected, stock)


class StopAtLength(StoppingCriteria):
    """A user's criterion; it also looks at ``scores`` and keeps what it saw."""

    def __init__(self, length: int):
        self.length, self.seen = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((tuple(input_ids.shape), None if scores is None else len(scores)))
        input_ids.view(-1)  # contiguous, as stock's are
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length, device=input_ids.device)


def test_custom_stopping_criteria(device):
    stock, ours = pair("llama", device)
    ids, seen = prompt(device, 2), []
    results = []
    for model in (ours, stock):
        criterion = StopAtLength(19)
        options = dict(return_dict_in_generate=True, output_scores=True)
        with counting(ours) as counts:
            out = model.generate(ids, stopping_criteria=StoppingCriteriaList([criterion]), **GREEDY, **options)
        if model is ours:
            assert counts.reasons == {"custom_stopping_criteria": 1} and counts.fast == 16
        results.append(out.sequences)
        seen.append(criterion.seen)
    assert results[1].shape[1] == 19
    assert_same_tokens(*results)
    assert seen[0] == seen[1]


class Ban(LogitsProcessor):
    """A user's processor that changes scores in place and reads the ids."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        scores[torch.arange(len(scores)), input_ids.view(len(scores), -1)[:, -1]] = -float("inf")
        return scores


def test_custom_logits_processor(device):
    stock, ours = pair("mistral", device)
    ids = prompt(device, 2)
    results, seen = [], []
    for model in (ours, stock):
        ban = Ban()
        with counting(ours) as counts:
            results.append(model.generate(ids, logits_processor=LogitsProcessorList([ban]), **GREEDY))
        if model is ours:
            assert counts.reasons == {"custom_logits_processor": 1} and counts.fast == 40
        seen.append(ban.seen)
    assert_same_tokens(*results, stock)
    assert seen[0] == seen[1]


def test_processor_that_keeps_ids_is_not_overwritten(device):
    """Ids handed to a user's object stay as they were."""
    _, ours = pair("gpt2", device)
    kept = []

    class Keep(LogitsProcessor):
        def __call__(self, input_ids, scores):
            kept.append((input_ids, input_ids.clone()))
            return scores

    ours.generate(prompt(device, 2), logits_processor=LogitsProcessorList([Keep()]), **GREEDY)
    assert len(kept) == 20 and all(torch.equal(*both_) for both_ in kept)


# ---- what generate() returns -------------------------------------------------------------------------------


@over_architectures
def test_scores_and_logits_within_rule(architecture, device):
    """Four seeds of prompts, 4 rows x 16 steps each: ours against float64 beside stock."""
    stock, ours = pair(architecture, device)
    ref, rule = float64_copy(stock), LogitRule()
    options = dict(max_new_tokens=16, do_sample=False, temperature=None, repetition_penalty=1.2)
    options |= dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
    for seed in range(4):
        ids = prompt(device, 4, seed=seed)
        out = ours.generate(ids, **options)
        expected = stock.generate(ids, **options)
        assert_same_tokens(out.sequences, expected.sequences)
        assert len(out.scores) == len(out.logits) == 16
        assert out.scores[0].dtype == out.logits[0].dtype == torch.float32
        penalized = torch.stack(out.scores, 1) != torch.stack(out.logits, 1)
        assert torch.equal(penalized, torch.stack(expected.scores, 1) != torch.stack(expected.logits, 1))
        text = out.sequences[:, :-1]
        truth = walk(ref, text, [11] + [1] * 15, RoundingCache(ref.config, torch.float32))[:, 10:]
        rule.add(torch.stack(out.logits, 1), torch.stack(expected.logits, 1), truth)
    rule.check(f"{architecture} output_logits")


def test_returned_tensors_are_clones(device):
    """A later call does not write into what an earlier one returned."""
    _, ours = pair("llama", device)
    options = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, **GREEDY)
    first = ours.generate(prompt(device, 2), **options)
    kept = [t.clone() for t in (first.sequences, *first.scores, *first.logits)]
    ours.generate(prompt(device, 2, seed=4), **options)
    assert all(torch.equal(a, b) for a, b in zip(kept, (first.sequences, *first.scores, *first.logits)))
    pointers = {t.data_ptr() for t in first.logits}
    assert len(pointers) == len(first.logits)


def test_output_without_scores_has_none(device):
    stock, ours = pair("llama", device)
    found, expected = both(stock, ours, input_ids=prompt(device), **GREEDY, return_dict_in_generate=True)
    assert type(found) is type(expected) and set(found) == set(expected)
    assert found.scores is None and found.logits is None


@pytest.mark.parametrize("wanted", ("output_attentions", "output_hidden_states"))
def test_requested_outputs_fall_back(wanted, device):
    """Stock's loop runs, and gives stock's attentions and hidden states."""
    stock = build("mistral", attn_implementation="eager").to(device)
    require_native(device)
    ours = hf_fastpath.patch(build("mistral", attn_implementation="eager").to(device), quiet=True)
    options = {wanted: True, "return_dict_in_generate": True, **GREEDY}
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=prompt(device, 2), **options)
    assert counts.reasons["attention_outputs"] and not counts.fast
    assert_same_tokens(found.sequences, expected.sequences, stock)
    name = wanted.removeprefix("output_")
    assert len(found[name]) == len(expected[name]) == 20
    exact = copy.deepcopy(stock).double().generate(prompt(device, 2), **options)
    assert torch.equal(exact.sequences, expected.sequences)
    for ours_step, stock_step, exact_step in zip(found[name], expected[name], exact[name]):
        assert len(ours_step) == len(stock_step)
        for a, b, truth in zip(ours_step, stock_step, exact_step):
            allowed = 2 * (b - truth).abs().max() + torch.finfo(b.dtype).eps * truth.abs().max()
            assert (a - truth).abs().max() <= allowed
    with counting(ours) as counts:  # and the hooks that transformers leaves behind stop nothing afterwards
        again = ours.generate(prompt(device, 2), **GREEDY)
    assert counts.fast == 40
    assert_same_tokens(again, expected.sequences, stock)


# ---- other ways to generate --------------------------------------------------------------------------------


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


# ---- caches and conversations ------------------------------------------------------------------------------


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
    """Three turns over the returned cache, padded rows, across Mistral's window."""
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
            options = dict(past_key_values=cache) if cache is not None else {}
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
                assert isinstance(out.past_key_values, FastpathCache)
            ids = torch.cat((ids, out.sequences[:, given.shape[1] :]), dim=1)
            cache = out.past_key_values
            assert cache.get_seq_length() == ids.shape[1] - 1
        ends.append(ids)
    assert_same_tokens(*ends, stock, left_padded(device, 3, 9)["attention_mask"])


def test_users_dynamic_cache_is_filled_in_place(device):
    """A cache of another class the user passes is stock's to fill, and the reason says so."""
    stock, ours = pair("mistral", device)
    caches = [DynamicCache(config=model.config) for model in (ours, stock)]
    with counting(ours) as counts:
        found = ours.generate(prompt(device), past_key_values=caches[0], **GREEDY)
    assert counts.reasons["other_cache"] and not counts.fast
    assert_same_tokens(found, stock.generate(prompt(device), past_key_values=caches[1], **GREEDY), stock)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 30
    for a, b in zip(caches[0].layers, caches[1].layers):
        torch.testing.assert_close(a.keys, b.keys)


@pytest.mark.parametrize("with_config", (True, False))
@over_architectures
def test_users_fastpath_cache_is_fast(architecture, with_config, device):
    stock, ours = pair(architecture, device)
    cache = FastpathCache(ours.config) if with_config else FastpathCache()
    with counting(ours) as counts:
        found = ours.generate(prompt(device, 2, 25), past_key_values=cache, **GREEDY)
    assert counts.fast == 40 and cache.get_seq_length() == 44
    assert_same_tokens(found, stock.generate(prompt(device, 2, 25), **GREEDY), stock)


def test_fastpath_cache_on_a_stock_model(device):
    """An unpatched model takes our cache like any other."""
    for architecture in ARCHITECTURES:
        stock, _ = pair(architecture, device)
        cache = FastpathCache(stock.config)
        found = stock.generate(prompt(device, 2, 25), past_key_values=cache, **GREEDY)
        assert_same_tokens(found, stock.generate(prompt(device, 2, 25), **GREEDY), stock)


@over_architectures
def test_prefix_reuse_with_deepcopied_cache(architecture, device):
    """One prefix, run once, continued in two ways from copies; the original stays as it was."""
    stock, ours = pair(architecture, device)
    prefix = prompt(device, 1, 20)
    cache = FastpathCache(ours.config)
    with torch.no_grad():
        ours(prefix, past_key_values=cache, use_cache=True)
    for seed in (1, 2):
        ids = torch.cat((prefix, prompt(device, 1, 4, seed=seed)), dim=1)
        with counting(ours) as counts:
            found = ours.generate(ids, past_key_values=copy.deepcopy(cache), **GREEDY)
        assert counts.fast == 20
        assert_same_tokens(found, stock.generate(ids, **GREEDY), stock)
    assert cache.get_seq_length() == 20


def test_cache_of_another_batch_size_gives_a_clear_error_or_stocks(device):
    """A conversation of 2 rows cannot be continued with 3: an error, never other tokens."""
    _, ours = pair("llama", device)
    out = ours.generate(prompt(device, 2), return_dict_in_generate=True, **GREEDY)
    ids = torch.cat((out.sequences, prompt(device, 2, 3)), dim=1)
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        ours.generate(torch.cat((ids, ids[:1])), past_key_values=out.past_key_values, **GREEDY)
    found = ours.generate(prompt(device, 2), **GREEDY)  # and the model is not stuck
    assert torch.equal(found, out.sequences)


def test_float16_kv_cache(device):
    """kv_dtype=float16: every buffer is float16, and the tokens of the trained model stay the same."""
    stock, _ = trained(device)
    ids = heldout_tokens(50).to(device)
    with hf_fastpath.patched(copy.deepcopy(stock), kv_dtype=torch.float16, quiet=True) as ours:
        out = ours.generate(ids, return_dict_in_generate=True, **GREEDY)
        assert hf_fastpath.report(ours).stats["fast_tokens"] == 20
    assert {layer.k_buffer.dtype for layer in out.past_key_values.layers} == {torch.float16}
    assert_same_tokens(out.sequences, stock.generate(ids, **GREEDY))


def test_inference_mode_then_no_grad(device):
    """Buffers made in one mode are used in the other, both ways round; caches too."""
    stock, _ = pair("mistral", device)
    expected = stock.generate(prompt(device, 2), **GREEDY)
    for first, second in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
        with first():
            out = ours.generate(prompt(device, 2), return_dict_in_generate=True, **GREEDY)
        with second():
            assert_same_tokens(ours.generate(prompt(device, 2), **GREEDY), expected, stock)
            longer = torch.cat((out.sequences.clone(), prompt(device, 2, 3)), dim=1)
            found = ours.generate(longer, past_key_values=out.past_key_values, **GREEDY)
        assert_same_tokens(out.sequences, expected, stock)
        assert_same_tokens(found, stock.generate(longer.clone(), **GREEDY), stock)


# ---- perplexity --------------------------------------------------------------------------------------------


def nll(logits: torch.Tensor, text: torch.Tensor) -> float:
    """Mean negative log likelihood of ``text`` [1, n] under logits [1, n - 1 or n, vocab_size]."""
    return torch.nn.functional.cross_entropy(logits[0, : text.shape[1] - 1].double(), text[0, 1:]).item()


def perplexity(logits: torch.Tensor, text: torch.Tensor) -> float:
    return float(torch.tensor(nll(logits, text), dtype=torch.float64).exp())


@pytest.fixture(scope="module")
def stock_perplexity():
    """Stock's perplexity on 4,000 tokens in one pass, by device; and token by token, see below."""
    found: dict[torch.device, float] = {}

    def of(device: torch.device) -> float:
        if device not in found:
            text = heldout_tokens(4000).to(device)
            with torch.no_grad():
                found[device] = perplexity(trained(device)[0](text, use_cache=False).logits, text)
        return found[device]

    return of


def decoded_perplexity(model, device: torch.device, count: int, fast: bool) -> float:
    from hf_fastpath.verification import decode_logits

    text = heldout_tokens(count).to(device)
    return perplexity(torch.cat((_first(model, text), decode_logits(model, text, 1, fast)), dim=1), text)


@torch.no_grad()
def _first(model, text: torch.Tensor) -> torch.Tensor:
    return model(text[:, :1], use_cache=False).logits


def test_stock_perplexity_token_by_token_equals_one_pass(device):
    """What makes one pass a reference for the next test: 400 tokens, past the window, both ways."""
    stock, _ = trained(device)
    text = heldout_tokens(400).to(device)
    with torch.no_grad():
        one_pass = perplexity(stock(text, use_cache=False).logits, text)
    assert abs(decoded_perplexity(stock, device, 400, fast=False) - one_pass) < 0.001


def test_perplexity_of_the_trained_model(device, stock_perplexity):
    """4,000 tokens of held-out text, decoded token by token through the cache."""
    _, ours = trained(device)
    reference = stock_perplexity(device)
    assert reference < 60, "the trained model should know its language"
    assert abs(decoded_perplexity(ours, device, 4000, fast=True) - reference) < 0.001


def test_perplexity_with_float16_kv_cache(device, stock_perplexity):
    """Within 0.1 % of the float32 KV cache."""
    with hf_fastpath.patched(copy.deepcopy(trained(device)[0]), kv_dtype="float16", quiet=True) as ours:
        found = decoded_perplexity(ours, device, 4000, fast=True)
    reference = stock_perplexity(device)
    assert abs(found - reference) < 0.001 * reference
