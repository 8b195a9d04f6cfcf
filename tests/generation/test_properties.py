"""Drawn calls and caches: whatever batch, padding, window, chunks and turns, tokens are stock's."""

from __future__ import annotations

import pytest
import torch
from models import ARCHITECTURES, CPU, VOCAB, build, counting, pair
from parity import assert_same_tokens, walk
from transformers import DynamicCache

import hf_fastpath
from hf_fastpath import FastpathCache
from hf_fastpath.compat import CACHE

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis draws the examples")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

#: makes the examples the same in every run
repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=25)
architectures = st.sampled_from(ARCHITECTURES)
seeds = st.integers(0, 2**16)


def tokens(batch: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@st.composite
def prompts(draw) -> dict[str, torch.Tensor]:
    """Draw input_ids and attention_mask of 1 to 16 rows, each with left padding of its own."""
    batch, length = draw(st.integers(1, 16)), draw(st.integers(1, 50))
    ids = tokens(batch, length, draw(seeds))
    mask = torch.ones_like(ids)
    for row in range(batch):
        padding = draw(st.integers(0, length - 1))
        ids[row, :padding], mask[row, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@repeatable
@given(
    architecture=architectures,
    inputs=prompts(),
    new_tokens=st.integers(1, 24),
    chunk=st.none() | st.integers(1, 20),
    ends=st.sets(st.integers(3, VOCAB - 1), max_size=40),
)
def test_any_greedy_call(architecture, inputs, new_tokens, chunk, ends):
    stock, ours = pair(architecture, CPU)
    options = dict(max_new_tokens=new_tokens, do_sample=False, eos_token_id=sorted(ends) or None)
    options |= {} if chunk is None else {"prefill_chunk_size": chunk}
    with counting(ours) as counts:
        found = ours.generate(**inputs, **options)
    assert counts.fast and not counts.fallback  # a chunk of one token runs stock, and is counted
    assert_same_tokens(found, stock.generate(**inputs, **options), stock, inputs["attention_mask"])


@repeatable
@given(
    architecture=architectures,
    inputs=prompts(),
    seed=seeds,
    rows=st.integers(1, 3),
    temperature=st.floats(0.2, 2.0),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.1, 1.0),
)
def test_any_sampled_call(architecture, inputs, seed, rows, temperature, top_k, top_p):
    stock, ours = pair(architecture, CPU)
    rows = min(rows, 16 // len(inputs["input_ids"]))
    options = dict(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, num_return_sequences=rows)
    made = []
    for model in (ours, stock):
        torch.manual_seed(seed)
        made.append(model.generate(**inputs, max_new_tokens=8, **options))
        made.append(torch.get_rng_state())
    assert_same_tokens(made[0], made[2])
    assert torch.equal(made[1], made[3])


turns = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(0, 8), seeds), min_size=1, max_size=4)


@repeatable
@given(architecture=architectures, batch=st.integers(1, 4), turns=turns)
def test_any_conversation(architecture, batch, turns):
    """Each turn adds a prompt and an answer, and takes back the end of the answer; stock reads the whole text anew."""
    stock, ours = pair(architecture, CPU)
    cache, text = FastpathCache(ours.config), tokens(batch, 0, 0)
    for new, answer, taken_back, seed in turns:
        text = torch.cat((text, tokens(batch, new, seed)), dim=1)
        options = dict(max_new_tokens=answer, do_sample=False, attention_mask=torch.ones_like(text))
        with counting(ours) as counts:
            found = ours.generate(text, **{CACHE: cache}, **options)
        assert counts.fast == batch * answer and not counts.reasons
        assert_same_tokens(found, stock.generate(text, **options), stock)
        cache.crop(-min(taken_back, cache.get_seq_length() - 1))
        text = found[:, : cache.get_seq_length()]


@repeatable
@given(
    architecture=architectures,
    batch=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    padding=st.integers(0, 6),
    seed=seeds,
)
def test_any_chunks_by_hand(architecture, batch, lengths, padding, seed):
    """The user's own forwards of any length over a FastpathCache give stock's likeliest token at every position."""
    stock, ours = pair(architecture, CPU)
    text = tokens(batch, sum(lengths), seed)
    mask = torch.ones_like(text)
    mask[0, : min(padding, lengths[0] - 1)] = 0
    found = walk(ours, text, lengths, FastpathCache(ours.config), mask)
    expected = walk(stock, text, lengths, DynamicCache(config=stock.config), mask)
    seen = mask.bool()
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-4, atol=1e-4)


@repeatable
@given(window=st.integers(2, 30), length=st.integers(1, 40), new_tokens=st.integers(1, 30), batch=st.integers(1, 3))
def test_any_window(window, length, new_tokens, batch):
    stock = build("mistral", sliding_window=window, num_hidden_layers=1)
    ids = tokens(batch, length, window)
    options = dict(max_new_tokens=new_tokens, do_sample=False, attention_mask=torch.ones_like(ids))
    expected = stock.generate(ids, **options)
    with hf_fastpath.patched(stock, quiet=True) as ours, counting(ours) as counts:
        found = ours.generate(ids, **options)
    assert counts.fast == batch * new_tokens
    assert_same_tokens(found, expected, stock)
