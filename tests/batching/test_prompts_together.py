"""Short prompts of calls that wait for their turn are read together; on the CPU a graph's calls are made one by one."""

from __future__ import annotations

import time

import pytest
import torch
from calls_for_graphs import use_calls
from causal_lm_types import small_model
from in_thread import LONG, Call
from models import build, prompt, require_native

import hf_fastpath
from hf_fastpath.decode.loops import prompt_lists, short_prompts
from hf_fastpath.patching.state import state_of

GREEDY = dict(do_sample=False, max_new_tokens=9)


@pytest.fixture
def together(monkeypatch, device) -> list[list[int]]:
    """Return the numbers of tokens of prompts that were read at once."""
    require_native(device)
    use_calls(monkeypatch, device)  # whose tokens are those alone
    found, read = [], prompt_lists.read_together

    def noted(part, texts, programs):
        found.append([given.tokens.shape[1] for _, given in texts])
        return read(part, texts, programs)

    monkeypatch.setattr(prompt_lists, "read_together", noted)
    return found


def sharing(architecture, device, **options):
    return hf_fastpath.patch(build(architecture).to(device), quiet=True, share_steps=True, **options)


def at_once(model, made: list[dict]) -> list[Call]:
    """Make calls whose prompts all wait before one of them is read; beams do not wait."""
    turns, count = state_of(model).sharing.prompts, sum("num_beams" not in each for each in made)
    with turns._one:
        calls = [Call(model.generate, **each) for each in made]
        end = time.monotonic() + LONG
        while turns.calls < count:
            assert time.monotonic() < end, "a call does not come to its prompt"
            time.sleep(0.001)
    return calls


@pytest.mark.parametrize("architecture", ("llama", "gpt2", "mistral"))
def test_prompts_of_one_length_are_read_at_once(architecture, device, together):
    """Up to 512 tokens of them, filled up to 32; a window ends in some, and two sequences of a call stay together."""
    model = sharing(architecture, device)
    lengths = (5, 23, 11, 30, 7, 32, 2, 29)
    calls = [dict(GREEDY, input_ids=prompt(device, 1 + (length == 11), length, seed=length)) for length in lengths]
    alone = [model.generate(**each) for each in calls]
    for _ in range(3):
        together.clear()
        found = [call.result() for call in at_once(model, calls)]
        assert all(map(torch.equal, found, alone))
        assert sorted(map(len, together)) == [8] and sorted(together[0]) == sorted(lengths)


def test_no_more_than_a_graph_has(device, together):
    model = sharing("llama", device)
    calls = [dict(GREEDY, input_ids=prompt(device, 1, 100 + seed, seed=seed)) for seed in range(6)]
    alone = [model.generate(**each) for each in calls]
    found = [call.result() for call in at_once(model, calls)]
    assert all(map(torch.equal, found, alone))
    assert sorted(map(len, together)) == [2, 4]  # of 128 tokens each


def test_what_differs_is_read_apart(device, together):
    """Padding, beams, pieces, and what is too long; not prompts of other lengths."""
    model = sharing("llama", device)
    padded = torch.ones(1, 20, dtype=torch.long, device=device)
    padded[:, :3] = 0
    calls = [
        dict(GREEDY, input_ids=prompt(device, 1, 20, seed=1)),
        dict(GREEDY, input_ids=prompt(device, 1, 50, seed=2)),
        dict(GREEDY, input_ids=prompt(device, 1, 20, seed=3), attention_mask=padded),
        dict(GREEDY, input_ids=prompt(device, 1, 20, seed=4), num_beams=2),
        dict(GREEDY, input_ids=prompt(device, 1, 600, seed=5)),
        dict(GREEDY, input_ids=prompt(device, 1, 21, seed=6), prefill_chunk_size=8),
    ]
    alone = [model.generate(**each) for each in calls]
    found = [call.result() for call in at_once(model, calls)]
    assert all(map(torch.equal, found, alone))
    assert [*map(sorted, together)] == [[20, 50]]


def test_recorded_models_read_theirs_one_by_one(device, together):
    """A recording is of one number of sequences, and takes longer than the prompts."""
    model = hf_fastpath.patch(small_model("glm4").to(device), quiet=True, share_steps=True)
    calls = [dict(GREEDY, input_ids=prompt(device, 1, 20, seed=seed) % model.config.vocab_size) for seed in range(3)]
    alone = [model.generate(**each) for each in calls]
    found = [call.result() for call in at_once(model, calls)]
    assert all(map(torch.equal, found, alone)) and not together


@pytest.mark.parametrize("end", ("interrupted", "no memory", "single calls", "memory runs out"))
def test_what_one_call_could_not_read_its_owners_read(end, device, together, monkeypatch):
    """The call that reads fails, finds no memory for so many, or no graph; before or behind the first of its calls."""
    model = sharing("llama", device)
    calls = [dict(GREEDY, input_ids=prompt(device, 1, 20, seed=seed)) for seed in range(3)]
    alone = [model.generate(**each) for each in calls]
    reader_of, store = short_prompts.reader_of, short_prompts.ShortPrompts._store
    stored = []

    def of_several(part, given, *others):
        if len(given.tokens) > 1:
            if end == "interrupted":
                raise KeyboardInterrupt
            if end != "memory runs out":
                return None if end == "no memory" else short_prompts.SingleCalls()
        return reader_of(part, given, *others)

    def storing(reader, cache, count, row):
        store(reader, cache, count, row)
        stored.append(row)
        if row and end == "memory runs out":
            raise torch.OutOfMemoryError

    monkeypatch.setattr(short_prompts, "reader_of", of_several)
    monkeypatch.setattr(short_prompts.ShortPrompts, "_store", storing)
    found, broken = [], 0
    for call, expected in zip(at_once(model, calls), alone):
        try:
            found.append(torch.equal(call.result(), expected))
        except KeyboardInterrupt:
            broken += 1
    assert all(found) and [*map(len, together)] == [3, 2]
    assert broken == (2 if end == "interrupted" else 0), "the last one has nobody beside it"
    assert (1 in stored) == (end == "memory runs out")
    assert not state_of(model).sharing.prompts._waiting


def test_weights_that_change_meanwhile(device, together):
    """Calls that have the model as it was before and those that have it as it is are not read together."""
    model = sharing("llama", device)
    calls = [dict(GREEDY, input_ids=prompt(device, 1, 20, seed=seed)) for seed in range(4)]
    model.generate(**calls[0])
    weight = model.model.layers[0].mlp.up_proj
    for call in at_once(model, calls[:2]):
        call.result()
    weight.weight = torch.nn.Parameter(weight.weight.flip(0))
    expected = [model.generate(**each) for each in calls]
    together.clear()
    found = [call.result() for call in at_once(model, calls)]
    assert all(map(torch.equal, found, expected)) and list(map(len, together)) == [4]
