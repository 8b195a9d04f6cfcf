"""What generate() returns besides tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from models import GREEDY, build, counting, over_architectures, pair, prompt, require_native
from parity import LogitRule, RoundingCache, assert_same_tokens, both, float64_copy, walk

import hf_fastpath


@over_architectures
def test_scores_and_logits_within_rule(architecture, device):
    """Four seeds of prompts with 4 rows x 16 steps each compare ours and stock with float64."""
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
    for steps in zip(
        *(zip(*states, strict=True) for states in (found[name], expected[name], exact[name])), strict=True
    ):
        step_errors = [((a - c).abs().max(), (b - c).abs().max(), c.abs().max()) for a, b, c in zip(*steps)]
        error, stock_error, scale = (max(values) for values in zip(*step_errors))  # of one layer over all steps
        assert error <= 2 * stock_error + torch.finfo(torch.float32).eps * scale
    with counting(ours) as counts:  # the hooks that transformers leaves behind stop nothing afterwards
        again = ours.generate(prompt(device, 2), **GREEDY)
    assert counts.fast == 40
    assert_same_tokens(again, expected.sequences, stock)
