"""Generation ends where stock ends it, also with a user's own criteria and processors."""

from __future__ import annotations

import pytest
import torch
from models import GREEDY, counting, over_architectures, pair, prompt, tokenizer, trained
from parity import assert_same_tokens, both
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_fastpath.compat import CACHE


def chosen_token(stock, ids: torch.Tensor, step: int, row: int = 0) -> int:
    """Return the token that stock generates greedily at ``step``."""
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
    """The end token is the first, the last, or around the number of tokens that the host may be ahead."""
    stock, ours = pair("mistral", device)
    ids = prompt(device, 1)
    options = dict(max_new_tokens=20, do_sample=False, eos_token_id=chosen_token(stock, ids, step))
    found, expected = both(stock, ours, input_ids=ids, **options, return_dict_in_generate=True)
    assert_same_tokens(found.sequences, expected.sequences, stock)
    lengths = [r[CACHE].get_seq_length() for r in (found, expected)]
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


@pytest.mark.parametrize("drafted", (1, 2, 3, 5))
def test_stop_strings_behind_drafts(drafted, device):
    """Stop strings end the text only where transformers looks: after a round, in some versions after a draft."""
    stock, ours = trained(device)
    inputs = tokenizer()("for i in range(3):\n    print(i)\nfor i in range(3):\n", return_tensors="pt").to(device)
    options = dict(max_new_tokens=60, do_sample=False, tokenizer=tokenizer(), prompt_lookup_num_tokens=drafted)
    for string in ("f", "(", "\n"):
        found, expected = both(stock, ours, **inputs, **options, stop_strings=[string])
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
    """A user's criterion, which also looks at ``scores`` and keeps what it saw."""

    def __init__(self, length: int):
        self.length, self.seen = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((tuple(input_ids.shape), None if scores is None else len(scores)))
        input_ids.view(-1)  # ids are contiguous, as stock's are
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
    """A user's processor, which changes scores in place and reads the ids."""

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
    """Ids that a user's object was given stay as they were."""
    _, ours = pair("gpt2", device)
    kept = []

    class Keep(LogitsProcessor):
        def __call__(self, input_ids, scores):
            kept.append((input_ids, input_ids.clone()))
            return scores

    ours.generate(prompt(device, 2), logits_processor=LogitsProcessorList([Keep()]), **GREEDY)
    assert len(kept) == 20 and all(torch.equal(*both_) for both_ in kept)
