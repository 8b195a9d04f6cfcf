"""Several threads use one model: every call has stock's tokens, also while patch(), unpatch() and fork are called."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from in_thread import LONG, Call
from models import CPU, build, counting, fresh, prompt, require_native
from parity import assert_same_tokens
from transformers import LogitsProcessorList, StoppingCriteriaList

import hf_fastpath
from hf_fastpath.decode.plans.plan_cache import MAX_CALLS, MAX_DRAFT_PLANS, MAX_PLANS
from hf_fastpath.patching import api
from hf_fastpath.patching.state import state_of

OPTIONS = dict(max_new_tokens=12, do_sample=False)


class Gate:
    """A stopping criterion that says when its call is under way, and then waits until it may go on."""

    def __init__(self, at: int = 3):
        self.reached, self.opened, self.at, self.turns = threading.Event(), threading.Event(), at, 0

    def __call__(self, ids, scores, **kwargs):
        self.turns += 1
        if self.turns == self.at:
            self.reached.set()
            assert self.opened.wait(LONG), "nobody opened the gate"
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def options(self) -> dict:
        return dict(stopping_criteria=StoppingCriteriaList([self]))

    def wait(self) -> None:
        assert self.reached.wait(LONG), "the call never came here"


WAYS = {
    "greedy": {},
    "prompt lookup": dict(prompt_lookup_num_tokens=3),
    "beams": dict(num_beams=2),
    "scores": dict(output_scores=True, return_dict_in_generate=True),
}


def sequences(found):
    return found if isinstance(found, torch.Tensor) else found.sequences


@pytest.mark.each_value
@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
def test_a_second_call_does_not_wait(first, second, device):
    """One thread's call stands still in the middle while another's begins and ends, with the same kind of plan."""
    stock, ours = fresh("llama", device)
    ids, other = prompt(device), prompt(device, seed=1)
    gate = Gate()
    standing = Call(ours.generate, ids, **OPTIONS, **WAYS[first], **gate.options())
    gate.wait()
    found = Call(ours.generate, other, **OPTIONS, **WAYS[second]).result()
    gate.opened.set()
    expected = [stock.generate(each, **OPTIONS, **way) for each, way in ((ids, WAYS[first]), (other, WAYS[second]))]
    assert_same_tokens(sequences(standing.result()), sequences(expected[0]), stock)
    assert_same_tokens(sequences(found), sequences(expected[1]), stock)


@pytest.mark.parametrize("callback", ("criterion", "processor", "streamer"))
def test_a_callback_that_waits_for_another_threads_call(callback, device):
    stock, ours = fresh("llama", device)
    inner = []

    def ask(*_, **__):
        if len(inner) < 2:
            inner.append(Call(ours.generate, prompt(device, seed=1), **OPTIONS).result())

    class Streamer:
        put, end = staticmethod(ask), staticmethod(lambda: None)

    options = {
        "criterion": lambda: dict(
            stopping_criteria=StoppingCriteriaList(
                [lambda ids, s, **_: (ask(), torch.zeros(len(ids), dtype=torch.bool, device=ids.device))[1]]
            )
        ),
        "processor": lambda: dict(logits_processor=LogitsProcessorList([lambda ids, s: (ask(), s)[1]])),
        "streamer": lambda: dict(streamer=Streamer()),
    }[callback]()
    found = Call(ours.generate, prompt(device), **OPTIONS, **options).result()
    assert_same_tokens(found, stock.generate(prompt(device), **OPTIONS), stock)
    for each in inner:
        assert_same_tokens(each, stock.generate(prompt(device, seed=1), **OPTIONS), stock)
    assert len(inner) == 2


def test_more_calls_than_there_are_places(device):
    """A call too many runs transformers' loop over patched modules and says so; then there are places again."""
    stock, ours = fresh("llama", device)
    gates = [Gate() for _ in range(MAX_CALLS)]
    standing = [Call(ours.generate, prompt(device, seed=n), **OPTIONS, **g.options()) for n, g in enumerate(gates)]
    for gate in gates:
        gate.wait()
    for way in ("greedy", "prompt lookup"):
        with counting(ours) as counts:
            found = Call(ours.generate, prompt(device, seed=9), **OPTIONS, **WAYS[way]).result()
        assert counts.reasons == {"busy": 1} and not counts.fast
        assert_same_tokens(found, stock.generate(prompt(device, seed=9), **OPTIONS), stock)
    for gate in gates:
        gate.opened.set()
    for number, call in enumerate(standing):
        assert_same_tokens(call.result(), stock.generate(prompt(device, seed=number), **OPTIONS), stock)
    with counting(ours) as counts:
        ours.generate(prompt(device), **OPTIONS)
    assert counts.fast == 12 and not counts.reasons
    assert len(state_of(ours).plans) <= MAX_PLANS + MAX_DRAFT_PLANS and not state_of(ours).plans.running


def test_calls_inside_of_calls_have_places_too(device):
    """A streamer generates, in whose call a streamer generates, and so on: no call waits for another."""
    stock, ours = fresh("llama", device)
    results = []

    class Nested:
        def __init__(self, depth: int):
            self.depth, self.turns = depth, 0

        def put(self, value):
            self.turns += 1
            if self.turns == 4 and self.depth:
                results.append(ours.generate(prompt(device), streamer=Nested(self.depth - 1), **OPTIONS))

        def end(self):
            pass

    with counting(ours) as counts:
        results.append(Call(ours.generate, prompt(device), streamer=Nested(MAX_CALLS), **OPTIONS).result())
    expected = stock.generate(prompt(device), **OPTIONS)
    assert len(results) == MAX_CALLS + 1 and counts.reasons["busy"] == 1
    for found in results:
        assert_same_tokens(found, expected, stock)


def test_many_threads_at_once(device):
    """Batches, padding, beams, drafts, long prompts and samples run at once, several times."""
    stock, ours = fresh("mistral", device)
    ways = [dict(), dict(num_beams=2), dict(prompt_lookup_num_tokens=3), dict(output_scores=True)]
    inputs = [prompt(device, 1 + n % 3 if n % 4 != 2 else 1, 9 + 20 * (n % 2), seed=n) for n in range(8)]
    expected = [stock.generate(ids, **OPTIONS, **ways[n % 4]) for n, ids in enumerate(inputs)]
    for _ in range(3):
        calls = [Call(ours.generate, ids, **OPTIONS, **ways[n % 4]) for n, ids in enumerate(inputs)]
        for call, tokens in zip(calls, expected):
            assert_same_tokens(call.result(), tokens, stock)
    assert len(state_of(ours).plans) <= MAX_PLANS + MAX_DRAFT_PLANS and not state_of(ours).plans.running


def test_samples_come_from_the_default_generator(device):
    """Two threads that draw in turn give what stock gives if it draws in that order."""
    stock, ours = fresh("llama", device)

    def by_turns(model) -> list[torch.Tensor]:
        torch.manual_seed(5)
        turn, ended = threading.Condition(), set()
        now = [0]

        def waiting(mine: int):
            def processor(ids, scores):
                with turn:
                    now[0] = 1 - mine if 1 - mine not in ended else mine  # numbers drawn before this are settled
                    turn.notify_all()
                    assert turn.wait_for(lambda: now[0] == mine or 1 - mine in ended, LONG)
                return scores

            return LogitsProcessorList([processor])

        def one(mine: int):
            with turn:
                assert turn.wait_for(lambda: now[0] == mine, LONG)
            try:
                return model.generate(
                    prompt(device, seed=mine), do_sample=True, max_new_tokens=8, logits_processor=waiting(mine)
                )
            finally:
                with turn:
                    ended.add(mine)
                    now[0] = 1 - mine
                    turn.notify_all()

        calls = [Call(one, number) for number in range(2)]
        return [call.result() for call in calls]

    for found, expected in zip(by_turns(ours), by_turns(stock)):
        assert_same_tokens(found, expected)


# ---- patch() and unpatch() meanwhile --------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weights", (None, "int8"))
def test_unpatch_waits_for_a_running_call(way, weights, device):
    require_native(device)
    model = hf_fastpath.patch(build("llama").to(device), quiet=True, weights=weights)
    expected = sequences(model.generate(prompt(device), **OPTIONS, **WAYS[way]))
    gate = Gate()
    running = Call(model.generate, prompt(device), **OPTIONS, **WAYS[way], **gate.options())
    gate.wait()
    undoing = Call(hf_fastpath.unpatch, model)
    undoing.join(0.2)
    assert undoing.is_alive() and state_of(model) is not None
    new = Call(model.generate, prompt(device), **OPTIONS, **WAYS[way]).result()  # this call waits for neither
    gate.opened.set()
    assert torch.equal(sequences(running.result()), expected) and torch.equal(sequences(new), expected)
    assert undoing.result() is model and state_of(model) is None
    stock = build("llama").to(device)
    assert torch.equal(model.generate(prompt(device), **OPTIONS), stock.generate(prompt(device), **OPTIONS))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weights", (None, "int8"))
def test_patch_waits_for_a_running_call(way, weights, device):
    """The running call is transformers' own, of a model that was never seen before."""
    require_native(device)
    model = build("llama").to(device)
    expected = sequences(model.generate(prompt(device), **OPTIONS, **WAYS[way]))
    gate = Gate()
    running = Call(model.generate, prompt(device), **OPTIONS, **WAYS[way], **gate.options())
    gate.wait()
    patching_ = Call(hf_fastpath.patch, model, quiet=True, weights=weights)
    patching_.join(0.2)
    assert patching_.is_alive()
    gate.opened.set()
    assert torch.equal(sequences(running.result()), expected)
    assert patching_.result() is model and state_of(model).options.weights == weights
    with counting(model) as counts:
        model.generate(prompt(device), **OPTIONS)
    assert counts.fast == 12


def test_who_waits_too_long_is_told(device, monkeypatch):
    """A callback waits for a thread that unpatches: neither waits for ever, and the model is as it was."""
    monkeypatch.setattr(api, "_PATIENCE", 0.2)
    stock, ours = fresh("llama", device)
    errors = []

    def undo(ids, scores):
        if not errors:
            with pytest.raises(RuntimeError, match=r"unpatch\(\) waited .* another thread") as caught:
                Call(hf_fastpath.unpatch, ours).result()
            errors.append(caught)
        return scores

    options = dict(logits_processor=LogitsProcessorList([undo]))
    found = Call(ours.generate, prompt(device), **OPTIONS, **options).result()
    assert_same_tokens(found, stock.generate(prompt(device), **OPTIONS), stock)
    assert errors and state_of(ours) is not None
    gate = Gate()
    running = Call(stock.generate, prompt(device), **OPTIONS, **gate.options())
    gate.wait()
    with pytest.raises(RuntimeError, match=r"patch\(\) waited"):
        hf_fastpath.patch(stock, quiet=True)
    assert state_of(stock) is None and "forward" not in vars(stock.model.layers[0])
    gate.opened.set()
    running.result()


@pytest.mark.parametrize("weights", (None, "int8"))
def test_patch_and_unpatch_by_turns_under_load(weights):
    """Each call gives the tokens of one model, and never an error."""
    require_native(CPU)
    model = build("llama")
    wanted = [model.generate(prompt(CPU), **OPTIONS)]
    hf_fastpath.patch(model, quiet=True, weights=weights)
    wanted.append(model.generate(prompt(CPU), **OPTIONS))
    assert weights is None or not torch.equal(*wanted)
    ended = threading.Event()

    def load() -> int:
        calls = 0
        while not ended.is_set():
            found = model.generate(prompt(CPU), **OPTIONS)
            assert any(torch.equal(found, tokens) for tokens in wanted), "tokens of two models"
            calls += 1
        return calls

    loads = [Call(load) for _ in range(2)]
    try:
        for _ in range(8):
            hf_fastpath.unpatch(model)
            hf_fastpath.patch(model, quiet=True, weights=weights)
    finally:
        ended.set()
    assert all(call.result() > 0 for call in loads)


@pytest.mark.parametrize("turn", range(5))
def test_two_threads_patch_one_model(turn):
    """Both threads get the model patched once; other options are refused."""
    require_native(CPU)
    stock, model = build("llama"), build("llama")
    start = threading.Barrier(3)

    def at_once(**options):
        start.wait(LONG)
        return hf_fastpath.patch(model, quiet=True, **options)

    outcomes = []
    for call in [Call(at_once), Call(at_once), Call(at_once, max_batch_size=3)]:
        try:
            outcomes.append(call.result() is model)
        except ValueError as error:
            assert "is patched with" in str(error)
            outcomes.append(False)
    assert outcomes in ([True, True, False], [False, False, True])
    hf_fastpath.unpatch(model)
    assert not any(name.startswith("_hf_fastpath") for m in model.modules() for name in vars(m))
    assert_same_tokens(model.generate(prompt(CPU), **OPTIONS), stock.generate(prompt(CPU), **OPTIONS))


# ---- fork ------------------------------------------------------------------------------------------------------

_FORK = """
import os, sys, threading
import torch
from test_threads import Call, Gate, OPTIONS
from models import build, prompt
import hf_fastpath

torch.set_num_threads(2)
model = hf_fastpath.patch(build("llama"), quiet=True)
expected = model.generate(prompt(torch.device("cpu")), **OPTIONS)
state = vars(model)["_hf_fastpath"]
gates = [Gate() for _ in range({calls})]
calls = [Call(model.generate, prompt(torch.device("cpu")), **OPTIONS, **gate.options()) for gate in gates]
for gate in gates:
    gate.wait()
held, release = threading.Event(), threading.Event()

def hold():
    with state.plans.lock, state.door, state.stats._lock:
        held.set()
        release.wait()

holder = Call(hold)
held.wait()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # what torch asks of a child whose parent has used its pool
    before = hf_fastpath.report(model).stats["fast_tokens"]
    same = torch.equal(model.generate(prompt(torch.device("cpu")), **OPTIONS), expected)
    fast = hf_fastpath.report(model).stats["fast_tokens"] - before
    hf_fastpath.unpatch(model)
    os._exit(0 if same and fast == 12 and vars(model).get("_hf_fastpath") is None else 1)
release.set()
for gate in gates:
    gate.opened.set()
for call in calls:
    assert torch.equal(call.result(), expected)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_while_other_threads_generate():
    """The child generates, with all places free and no lock held; so do the parent's threads."""
    require_native(CPU)
    code = _FORK.format(calls=MAX_CALLS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
