"""Greedy search and sampling on a patched model give stock's tokens in float32."""

from __future__ import annotations

import pytest
import torch
from models import (
    ARCHITECTURES,
    GREEDY,
    WINDOW,
    counting,
    fresh,
    heldout_tokens,
    left_padded,
    over_architectures,
    pair,
    prompt,
    tokenizer,
    trained,
)
from parity import assert_same_tokens, both
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_fastpath import compat
from hf_fastpath.decode.plans.decode_plan import MAX_EOS_TOKENS, DecodePlan

# ---- greedy ------------------------------------------------------------------------------------------------


def test_trained_model_greedy_tokens_equal(device):
    """The trained model makes 320 tokens, past its window of 256, and no ties are allowed."""
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
    """Generation ends one before, at, one past and a whole window past the window's edge."""
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
    """With hundreds of tokens the KV buffers grow several times, and tokens stay equal."""
    stock, ours = pair(architecture, device)
    ids = prompt(device, 2, 5)
    found, expected = both(stock, ours, input_ids=ids, max_new_tokens=300, do_sample=False)
    assert_same_tokens(found, expected, stock)


@over_architectures
@pytest.mark.parametrize("batch", (17, 64))
def test_large_batches_tokens_equal(batch, architecture, device):
    """PyTorch's products serve more sequences than the ops for few rows take; on a GPU mixtures in float32 do not."""
    stock, ours = pair(architecture, device)
    inputs = left_padded(device, batch, 25)
    with counting(ours) as counts:
        found, expected = both(stock, ours, **inputs, **GREEDY)
    takes = device.type == "cpu" or architecture not in ("gpt_oss", "mixtral", "olmoe", "qwen3_moe")
    assert counts.fast == takes * batch * 20 and counts.reasons == ({} if takes else {"batch_size": 1})
    assert_same_tokens(found, expected, stock, inputs["attention_mask"])


def test_batch_of_65_falls_back(device):
    stock, ours = pair("llama", device)
    inputs = left_padded(device, 65)
    with counting(ours) as counts:
        found, expected = both(stock, ours, **inputs, **GREEDY)
    assert counts.reasons["batch_size"] and not counts.fast
    assert_same_tokens(found, expected, stock, inputs["attention_mask"])


@pytest.mark.parametrize("batch", (3, 20))
def test_padding_is_not_read(batch, device, monkeypatch):
    """Once the prompt is read, the padded slots of a row may hold numbers or NaN: every step has the same bits."""
    _, ours = pair("llama", device)
    inputs, begin, fillings = left_padded(device, batch, 40), DecodePlan.begin, [None, float("nan"), float("inf")]

    def poisoned(self, cache, positions, starts, *others):
        filling = fillings.pop()
        for layer in cache.layers if filling is not None else ():
            for row, start in enumerate(starts.tolist()):
                for buffer in layer.buffers:
                    buffer[row, :, :start] = filling
        begin(self, cache, positions, starts, *others)

    monkeypatch.setattr(DecodePlan, "begin", poisoned)
    found = []
    while fillings:
        options = dict(max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True)
        found.append(torch.stack(ours.generate(**inputs, **options).logits))
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_several_threads_tokens_equal():
    """With more threads the CPU kernels split their rows, and no result changes."""
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
    """Tokens after the padding are computed as stock computes them."""
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
    """Positions are packed and shifted, and differ from row to row."""
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
    """The same seed gives the same tokens, and the generator ends in the same state."""
    for architecture in ARCHITECTURES:
        stock, ours = pair(architecture, device)
        ids = prompt(device, 2)
        with counting(ours) as counts:
            found, expected = both(stock, ours, input_ids=ids, do_sample=True, max_new_tokens=24, **options)
        assert counts.fast == 48 and not counts.fallback
        assert_same_tokens(found, expected)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options",
    (
        dict(top_k=0),
        dict(top_k=1000, top_p=0.6),
        dict(temperature=0.3, top_k=0, min_p=0.05),
        dict(temperature=3.0, top_k=40, top_p=0.9, min_p=0.02),
        dict(top_p=0.0),
    ),
    ids=str,
)
@pytest.mark.parametrize("batch", (1, 5, 16, 40))
def test_sampling_in_the_plan_tokens_equal(batch, options, device):
    """The warpers are those that a plan knows; rows are padded, and end at different steps."""
    stock, ours = pair("llama", device)
    inputs = left_padded(device, batch)
    options |= dict(do_sample=True, max_new_tokens=40, eos_token_id=list(range(100, 106)), pad_token_id=1)
    found, expected = both(stock, ours, **inputs, **options)
    assert_same_tokens(found, expected)
    assert any(plan.sampled and plan.batch == batch for plan in vars(ours)["_hf_fastpath"].plans)


@pytest.mark.parametrize(
    "options",
    (
        dict(repetition_penalty=1.3),
        dict(typical_p=0.9),
        dict(renormalize_logits=True),
        dict(top_k=5, return_dict_in_generate=True, output_scores=True),
    ),
    ids=str,
)
def test_other_sampling_is_left_to_the_processors(options, device):
    stock, ours = fresh("llama", device)
    found, expected = both(stock, ours, input_ids=prompt(device, 2), do_sample=True, max_new_tokens=10, **options)
    assert_same_tokens(*(out if torch.is_tensor(out) else out.sequences for out in (found, expected)))
    (plan,) = vars(ours)["_hf_fastpath"].plans
    assert not plan.sampled


@pytest.mark.parametrize(
    ("processors", "settings"),
    (
        ([], [1.0, 0.0, 1.0, 0.0]),
        ([TopKLogitsWarper(7)], [1.0, 7.0, 1.0, 0.0]),
        ([TemperatureLogitsWarper(0.5), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)], [0.5, 0.0, 0.8, 0.1]),
        ([TopKLogitsWarper(7), TemperatureLogitsWarper(0.5)], None),
        ([TopKLogitsWarper(7), TopKLogitsWarper(3)], None),
        ([TopKLogitsWarper(7, filter_value=-1e9)], None),
        ([TopPLogitsWarper(0.9, min_tokens_to_keep=2)], None),
        ([TypicalLogitsWarper(0.9)], None),
        ([TemperatureLogitsWarper(1e-40)], None),
        ([TemperatureLogitsWarper(torch.inf)], None),
        ([type("Mine", (TopKLogitsWarper,), {})(7)], None),
    ),
)
def test_settings_of_warpers(processors, settings):
    assert compat.sampling_settings(processors) == settings


def test_sampling_with_a_users_warper_tokens_equal(device):
    """The warper comes after or before those of generate(), in the order that transformers makes of them."""
    stock, ours = pair("llama", device)
    for given in (TemperatureLogitsWarper(2.0), TopKLogitsWarper(3), MinPLogitsWarper(0.3)):
        options = dict(do_sample=True, max_new_tokens=20, top_k=30, logits_processor=LogitsProcessorList([given]))
        assert_same_tokens(*both(stock, ours, input_ids=prompt(device, 2), **options))


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
    for ends in (100, MAX_EOS_TOKENS):  # with few end tokens, the plan chooses
        for seed in range(4):
            options = dict(do_sample=True, top_k=20, max_new_tokens=200, eos_token_id=list(range(100, 100 + ends)))
            found, expected = both(stock, ours, seed, input_ids=prompt(device, 3, seed=seed), **options)
            assert found.shape[1] < 11 + 200
            assert_same_tokens(found, expected)
