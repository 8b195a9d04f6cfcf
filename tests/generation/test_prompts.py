"""Prompts that run op by op, and prompts that are left to the model's own code."""

from __future__ import annotations

import gc

import pytest
import torch
from models import SHORT, VOCAB, WINDOW, counting, fresh, heldout_tokens, left_padded, pair, prompt, trained
from parity import assert_same_tokens, both

from hf_fastpath import FastpathCache
from hf_fastpath.cache.buffers import RING_SLACK
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.loops import prompt as prompts
from hf_fastpath.decode.loops.prompt_program import PromptProgram
from hf_fastpath.decode.lower.attend import Attention
from hf_fastpath.decode.plans.draft_plan import DraftPlan


@pytest.fixture
def read_lengths(monkeypatch) -> list[int]:
    """Collect the lengths of the prompts that were read op by op."""
    lengths = []

    def noted(part, cache, prompt, programs):
        lengths.append(prompt.tokens.shape[1])
        return read(part, cache, prompt, programs)

    read = prompts.read
    monkeypatch.setattr(prompts, "read", noted)
    return lengths


@pytest.mark.each_value
@pytest.mark.parametrize("padded", (False, True), ids=("plain", "padded"))
@pytest.mark.parametrize("length", (1, 2, 17, 130))
@pytest.mark.parametrize(
    "architecture", ("gpt2", "llama", "gpt_neox", "mixtral", "olmo2", "olmoe", "opt", "phi3", "qwen3_moe")
)
def test_tokens_equal(architecture, length, padded, device, read_lengths):
    stock, ours = pair(architecture, device)
    inputs = {"input_ids": prompt(device, 3, length)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if padded:
        for row in range(3):
            inputs["attention_mask"][row, : row * length // 4] = 0
    with counting(ours) as counts:
        found, expected = both(stock, ours, **inputs, **SHORT)
    assert read_lengths == [length] and not counts.reasons
    assert_same_tokens(found, expected, stock, inputs["attention_mask"])


@pytest.mark.parametrize("padded", (False, True), ids=("plain", "padded"))
@pytest.mark.parametrize("architecture", ("gpt2", "llama", "falcon"))
def test_turns_of_a_conversation(architecture, padded, device, read_lengths):
    """Only new tokens are read, with and without padding in front of what the cache holds."""
    stock, ours = pair(architecture, device)
    inputs = left_padded(device, 2, 30) if padded else {"input_ids": prompt(device, 2, 30)}
    mask = inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    texts, caches = [inputs["input_ids"]] * 2, [None, FastpathCache(ours.config)]
    for turn, new in enumerate((0, 1, 40)):
        more = prompt(device, 2, new, seed=turn) if new else texts[0][:, :0]
        texts = [torch.cat((text, more), dim=1) for text in texts]
        mask = torch.nn.functional.pad(mask, (0, texts[0].shape[1] - mask.shape[1]), value=1)
        made = []
        for place, model in enumerate((stock, ours)):
            options = SHORT | dict(return_dict_in_generate=True, **{CACHE: caches[place]})
            made.append(model.generate(texts[place], attention_mask=mask, **options))
        texts, caches = [out.sequences for out in made], [out[CACHE] for out in made]
        assert_same_tokens(texts[1], texts[0], stock, mask)
    assert read_lengths == [30, 2, 41]  # the last token of a turn is new to the cache


@pytest.fixture
def read_by_plans(monkeypatch) -> list[int]:
    """Collect the numbers of tokens of the turns that plans read; they do so on a CPU as well."""
    lengths, read = [], DraftPlan.read
    monkeypatch.setattr(DraftPlan, "read", lambda self, tokens: lengths.append(len(tokens)) or read(self, tokens))
    monkeypatch.setattr(prompts, "_CAPTURES", {"cpu", "cuda"})
    return lengths


@pytest.mark.parametrize("padded", (False, True), ids=("plain", "padded"))
@pytest.mark.parametrize("architecture", ("gpt2", "llama", "mixtral", "olmo2", "gpt_neox"))
def test_short_turns_are_read_by_a_plan(architecture, padded, device, read_by_plans):
    """A plan reads the turn of one sequence; the tokens that follow are stock's."""
    stock, ours = pair(architecture, device)
    inputs = {name: tensor[1:] for name, tensor in left_padded(device, 2, 9).items()}
    text, mask = inputs["input_ids"], inputs["attention_mask"] if padded else torch.ones_like(inputs["input_ids"])
    assert not padded or not mask.all()
    caches = None, FastpathCache(ours.config)
    options = dict(max_new_tokens=2, do_sample=False, return_dict_in_generate=True, output_logits=True)
    for seed, new in enumerate((0, 2, 15, 0, 6)):
        text = torch.cat((text, prompt(device, 1, new, seed=seed) if new else text[:, :0]), dim=1)
        mask = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
        given = dict(attention_mask=mask, **options)
        expected, found = (
            model.generate(text, **{CACHE: cache}, **given) for model, cache in zip((stock, ours), caches)
        )
        assert_same_tokens(found.sequences, expected.sequences, stock, mask)
        for logits, wanted in zip(found.logits, expected.logits):
            torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)
        text, caches = found.sequences, (expected[CACHE], found[CACHE])
        assert caches[1].get_seq_length() == text.shape[1] - 1
    assert read_by_plans == [3, 16, 1, 7]


def test_what_the_plan_of_a_turn_has_answered_stays(device, read_by_plans, monkeypatch):
    """The plan is free at once, and another thread may read a turn by it before the first one looks at its logits."""
    ours, answers, read_turn = pair("llama", device)[1], [], prompts.read_turn

    def noted(*given):
        found = read_turn(*given)
        answers.append((found, None if found is None else found.clone()))
        return found

    monkeypatch.setattr(prompts, "read_turn", noted)
    for seed in range(3):
        cache, text = FastpathCache(ours.config), prompt(device, 1, 9, seed=seed)
        for new in (0, 3, 3):
            text = torch.cat((text, prompt(device, 1, new, seed=new) if new else text[:, :0]), dim=1)
            text = ours.generate(text, max_new_tokens=2, do_sample=False, **{CACHE: cache})
    assert read_by_plans == [4] * 6
    assert all(torch.equal(found, then) for found, then in answers if found is not None)


def test_other_turns_are_prompts(device, read_lengths, read_by_plans):
    """A turn may be too long, have two sequences or a gap in positions, or a filled-up plan would move a window on."""
    _, ours = pair("llama", device)
    _, windowed = fresh("mistral", device, sliding_window=64)

    def turn(model, rows: int, past: int, new: int, **inputs) -> None:
        cache = FastpathCache(model.config)
        for length in (past, past + new):
            ids = prompt(device, rows, length)
            model.generate(ids, **{CACHE: cache}, attention_mask=torch.ones_like(ids), max_new_tokens=1, **inputs)

    for model, rows, past, new in ((ours, 1, 9, 17), (ours, 2, 9, 3), (windowed, 1, 64 - 15, 3)):
        turn(model, rows, past, new, do_sample=False)
    positions = torch.tensor([[*range(9), 9, 11]], device=device)
    cache = FastpathCache(ours.config)
    for length in (9, 11):
        given = dict(attention_mask=torch.ones(1, length, dtype=torch.long, device=device), max_new_tokens=1)
        given |= dict(position_ids=positions[:, :length], **{CACHE: cache}, do_sample=False)
        ours.generate(prompt(device, 1, length), **given)
    assert read_by_plans == [] and read_lengths == [9, 17, 9, 3, 49, 3, 9, 2]
    turn(windowed, 1, 48, 3, do_sample=False)
    assert read_by_plans == [3]


def test_a_soft_cap_is_left_to_the_models_own_code_where_no_kernel_has_it(device, read_lengths):
    stock, ours = pair("gemma2", device)
    ids = prompt(device, 2, 9)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with counting(ours) as counts:
        found, expected = both(stock, ours, **inputs, **SHORT)
    assert not read_lengths and counts.fast == 2 * 12
    assert_same_tokens(found, expected, stock, inputs["attention_mask"])


@pytest.mark.parametrize("architecture", ("mistral", "gpt_oss", "gemma3_text", "cohere2", "olmo3"))
def test_windows_that_end_inside_of_a_prompt(architecture, device, read_lengths):
    """Up to the slots of a ring and beyond, padded, and in a turn behind; the tokens are stock's."""
    window = 24
    stock, ours = fresh(architecture, device, sliding_window=window)
    seen = []
    for length in (window, window + 1, window + RING_SLACK, window + RING_SLACK + 1, 4 * window + 5):
        for inputs in ({"input_ids": prompt(device, 2, length)}, left_padded(device, 2, length)):
            inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
            with counting(ours) as counts:
                found, expected = both(stock, ours, **inputs, **SHORT)
            assert_same_tokens(found, expected, stock, inputs["attention_mask"])
            assert not counts.reasons
            seen.append(length)
    assert read_lengths == seen


@pytest.mark.parametrize("kv", (None, torch.int8), ids=("plain", "int8"))
def test_a_cache_holds_the_newest_of_a_window(kv, device, read_lengths):
    """Ours holds what the model's own code puts there; a turn that follows sees it."""
    stock, ours = fresh("mistral", device, sliding_window=24)
    ids = prompt(device, 2, 101)
    held = []
    for model in (ours, stock):
        cache = FastpathCache(model.config, kv_dtype=kv)
        with torch.no_grad():
            if model is stock:
                model(ids, **{CACHE: cache})
            else:
                given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
                model.generate(ids, **{CACHE: cache}, **given)
        assert cache.get_seq_length() == 101
        held.append([each for layer in cache.layers for each in (layer.keys, layer.values)])
    assert read_lengths == [101]
    for found, wanted in zip(*held):
        assert found.shape[2] == 23
        bound = 1e-4 if kv is None else 2e-2 * float(wanted.abs().max())
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=bound)


@pytest.mark.parametrize("padded", (False, True), ids=("plain", "padded"))
@pytest.mark.parametrize("architecture", ("gpt2", "llama", "phi3"))
def test_chunks(architecture, padded, device, read_lengths):
    stock, ours = pair(architecture, device)
    inputs = left_padded(device, 3, 41) if padded else {"input_ids": prompt(device, 3, 41)}
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    with counting(ours) as counts:
        found, expected = both(stock, ours, **inputs, **SHORT, prefill_chunk_size=12)
    assert read_lengths == [12, 12, 12, 5] and not counts.reasons
    assert_same_tokens(found, expected, stock, inputs["attention_mask"])


def test_prompt_up_to_the_window(device, read_lengths):
    stock, ours = pair("mistral", device)
    ids = prompt(device, 2, WINDOW)
    found, expected = both(stock, ours, input_ids=ids, attention_mask=torch.ones_like(ids), **SHORT)
    assert read_lengths == [WINDOW]
    assert_same_tokens(found, expected, stock)


@pytest.mark.parametrize("mask", (True, False), ids=("mask", "no_mask"))
def test_trained_model(mask, device, read_lengths):
    stock, ours = trained(device)
    ids = heldout_tokens(200).to(device)
    given = {"attention_mask": torch.ones_like(ids)} if mask else {"attention_mask": None}
    found, expected = both(stock, ours, input_ids=ids, pad_token_id=0, **given, **SHORT)
    assert read_lengths == [200]
    assert torch.equal(found, expected)


def test_cache_in_another_type(device, read_lengths):
    """A float32 model has a float16 cache: attention sees the rounded keys and values, as it will in later steps."""
    stock, ours = pair("llama", device)
    ids = prompt(device, 2, 40)
    caches = [FastpathCache(ours.config, kv_dtype=torch.float16) for _ in range(2)]
    with torch.no_grad():
        expected = ours(ids, **{CACHE: caches[0]}).logits[:, -1]  # the prompt is read outside of generate()
    options = dict(max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True)
    found = ours.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE: caches[1]}, **options).logits[0]
    assert read_lengths == [40]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(*(cache.layers for cache in caches)):
        torch.testing.assert_close(one.keys, other.keys, rtol=2e-3, atol=2e-3)


def test_tokens_out_of_the_vocabulary_leave_the_cache(read_lengths):
    _, ours = pair("llama", torch.device("cpu"))
    ids = prompt(torch.device("cpu"), 1, 20)
    ids[0, 3] = VOCAB
    cache = FastpathCache(ours.config)
    with pytest.raises(Exception, match="outside of its table"):
        ours.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE: cache}, **SHORT)
    assert read_lengths == [20] and cache.get_seq_length() == 0


def test_nothing_is_left_in_memory(device):
    """There is no cycle of references: the memory of a prompt is free when generate() returns."""
    _, ours = pair("llama", device)
    ids = prompt(device, 1, 50)
    ours.generate(ids, attention_mask=torch.ones_like(ids), **SHORT)
    gc.collect()
    gc.disable()
    try:
        ours.generate(ids, attention_mask=torch.ones_like(ids), **SHORT)
        assert not any(type(each) is Attention for each in gc.get_objects())
        programs = vars(ours)["_hf_fastpath"].plans.snapshot.prompt_programs.values()
        programs = [each for each in programs if isinstance(each, PromptProgram)]
        assert programs and not any(value is not None for each in programs for value in each.program.values)
    finally:
        gc.enable()
