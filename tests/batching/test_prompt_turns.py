"""Prompts are read in chunks beside the steps of others, and each side has its share."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from in_thread import LONG, Call
from models import build, prompt, require_native

import hf_fastpath
from hf_fastpath.batching import prompt_turns
from hf_fastpath.batching.slots import Slots
from hf_fastpath.decode.loops import prompt as prompts
from hf_fastpath.patching.state import state_of

GREEDY = dict(do_sample=False)


class Holds:
    """A streamer that ends its call by an error once it is told to."""

    def __init__(self):
        self.runs, self.over, self.count = threading.Event(), threading.Event(), 0

    def put(self, value):
        self.count += 1
        if self.count > 3:
            self.runs.set()
        if self.over.is_set():
            raise InterruptedError

    def end(self):
        pass


class Endless:
    """A call that goes on for the length of a ``with`` block; :attr:`tokens` are what it has got."""

    def __init__(self, model, ids):
        self.holds = Holds()
        self.call = Call(model.generate, ids, streamer=self.holds, max_new_tokens=8000, **GREEDY)

    def __enter__(self):
        assert self.holds.runs.wait(LONG)
        return self

    def __exit__(self, *_):
        self.holds.over.set()
        with pytest.raises(InterruptedError):
            self.call.result()


@pytest.fixture
def reads(monkeypatch):
    """Chunks have 8 tokens. Returns a function that has chunks of a model noted: sizes, and shared steps before."""
    monkeypatch.setattr(prompt_turns, "LEAST", {"cpu": 8, "cuda": 8})
    monkeypatch.setattr(prompt_turns, "MOST", 8)
    monkeypatch.setattr(prompt_turns, "SHORT", 0)
    monkeypatch.setattr(prompt_turns, "_MOST_STEPS", 10_000)
    found, read = [], prompts.read

    def watch(model):
        def noted(part, cache, given, programs):
            found.append((given.tokens.shape[1], state_of(model).sharing.prompts.steps))
            return read(part, cache, given, programs)

        monkeypatch.setattr(prompts, "read", noted)
        return found

    return watch


def sharing(architecture: str, device, **options):
    require_native(device)
    return hf_fastpath.patch(build(architecture).to(device), quiet=True, share_steps=True, **options)


@pytest.mark.parametrize("architecture", ("llama", "qwen3_moe"))
def test_rows_step_between_the_chunks(architecture, device, reads):
    """Beside a call that runs, a prompt is read in chunks with steps in between; tokens are those of the call alone."""
    model = sharing(architecture, device)
    long = prompt(device, 2, 75, seed=3)
    expected = model.generate(long, max_new_tokens=12, **GREEDY)
    found = reads(model)
    with Endless(model, prompt(device, 1, 9)):
        assert model.generate(long, max_new_tokens=3, **GREEDY).equal(expected[:, :78])
        found.clear()  # the first call may have come before any step was shared
        assert model.generate(long, max_new_tokens=12, **GREEDY).equal(expected)
    assert [size for size, _ in found] == [4] * 18 + [3], "two rows share a chunk of 8 tokens"
    steps = [number for _, number in found]
    assert all(before < after for before, after in zip(steps, steps[1:])), "rows step between any two chunks"
    found.clear()
    assert model.generate(long, max_new_tokens=12, **GREEDY).equal(expected) and [75] == [size for size, _ in found]


def test_what_is_not_read_in_chunks_is_read_at_once(device, reads):
    """Behind other tokens, nothing reads tokens whose window ends among them."""
    model = sharing("mistral", device)
    long = prompt(device, 1, 75, seed=3)
    expected = model.generate(long, max_new_tokens=12, **GREEDY)
    found = reads(model)
    with Endless(model, prompt(device, 1, 9)):
        assert model.generate(long, max_new_tokens=12, **GREEDY).equal(expected)
    assert (75, found[-1][1]) == found[-1]


def test_a_chunk_that_takes_all_cores_runs_beside_no_step(device, reads, monkeypatch):
    model = sharing("llama", device)
    running, step, read = [], Slots.step, prompts.read
    monkeypatch.setattr(prompt_turns, "_takes_all_cores", lambda device: True)

    def alone(function):
        def run(*given):
            running.append(function)
            time.sleep(0.001)  # the other one may begin meanwhile
            assert running == [function], "a step and a chunk at once"
            found = function(*given)
            running.remove(function)
            return found

        return run

    long = prompt(device, 1, 75, seed=3)
    expected = model.generate(long, max_new_tokens=5, **GREEDY)
    found = reads(model)
    with Endless(model, prompt(device, 1, 9)):
        model.generate(long, max_new_tokens=3, **GREEDY)
        monkeypatch.setattr(Slots, "step", alone(step))
        monkeypatch.setattr(prompts, "read", alone(read))
        calls = [Call(model.generate, long, max_new_tokens=5, **GREEDY) for _ in range(3)]
        assert all(call.result().equal(expected) for call in calls)
    assert not running and not state_of(model).sharing.prompts.blocks_steps and found


def test_a_prompt_is_cancelled_between_its_chunks(device, reads, monkeypatch):
    model = sharing("llama", device)
    found, read = reads(model), prompts.read
    with Endless(model, prompt(device, 1, 9)), hf_fastpath.batch(model, **GREEDY) as batch:
        batch.submit(prompt(device, 1, 9), max_new_tokens=2).result(LONG)
        before, made = len(found), []

        def cancels(*given):
            logits = read(*given)
            if len(found) == before + 3:
                made[0].cancel()
            return logits

        monkeypatch.setattr(prompts, "read", cancels)
        made.append(batch.submit(prompt(device, 1, 400), max_new_tokens=2))
        assert made[0].result(LONG).finish_reason == "cancelled"
    assert len(found) == before + 3


def test_the_share_of_rows_beside_prompts_that_wait(device):
    """Rows that stood still have as much time as a chunk has taken; less where more calls wait for their first token
    than rows go on, and where rows went on beside the chunk."""

    class Steps:
        lock, members, joining, calls = threading.RLock(), [], [], 0
        room = SimpleNamespace(num_waiting=0)

    class Rows:
        has_ended = False

        def __init__(self, count):
            self.starts = [0] * count

    steps = Steps()
    turns = prompt_turns.SharedTurns(steps)
    with steps.lock:
        for _ in range(50):
            turns.end_step(1.0)
    cases = (
        (1, 1, 0, 1.0),
        (4, 1, 0, 1.0),
        (1, 4, 0, 0.25),
        (3, 4, 0, 0.75),
        (0, 2, 0, 0.0),
        (4, 1, 20, 0.6),
        (4, 1, 60, 0),
    )
    for rows, waiting, beside, share in (*cases, (4, 1, 60, 0.0)):
        steps.members, turns.calls, steps.calls = [Rows(rows)] * bool(rows), waiting, waiting + rows
        before = time.perf_counter()
        turns._note_chunk(torch.device("cpu"), 16, 100.0, turns.steps - beside)
        assert 100 * share <= turns._not_before - before < 100 * share + 5
