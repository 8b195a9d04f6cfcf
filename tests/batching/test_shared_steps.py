"""Calls of ``generate()`` in several threads share steps, and each has the tokens that it has alone."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter

import pytest
import torch
from in_thread import LONG, Call
from models import VOCAB, build, left_padded, prompt, require_native
from transformers import LogitsProcessorList, StoppingCriteriaList

import hf_fastpath
from hf_fastpath.batching import sharing as steps_of_calls
from hf_fastpath.decode.plans.rows_plan import RowsPlan
from hf_fastpath.patching.state import state_of


@pytest.fixture(autouse=True)
def steps_begin_ahead(request, monkeypatch):
    """On a CPU, too, steps begin before the host has seen their tokens, as on a GPU whose step is a graph."""
    if request.node.callspec.params.get("device", "cpu") == "cpu":
        monkeypatch.setattr(RowsPlan, "_may_begin", RowsPlan._has_room)


def sharing(architecture: str, device, **options):
    """Return a patched model whose calls share steps."""
    require_native(device)
    return hf_fastpath.patch(build(architecture).to(device), quiet=True, share_steps=True, **options)


class AllHere:
    """A stopping criterion that lets its calls go on once all have read their prompts, and then once all share steps,
    of which each has led no more than one; it ends none."""

    def __init__(self, count: int, times: int = 2):
        self.barrier, self.known, self.times = threading.Barrier(count), threading.local(), times

    def __call__(self, ids, scores, **kwargs):
        self.known.seen = getattr(self.known, "seen", 0) + 1
        if self.known.seen <= self.times:
            self.barrier.wait(LONG)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def together(model, calls: list[dict], **common):
    """Make calls at once; return their results, and rows -> steps with so many."""
    before = Counter(state_of(model).stats.shared_steps)
    gate = AllHere(len(calls))
    made = []
    for each in calls:
        criteria = StoppingCriteriaList([*each.pop("stopping_criteria", []), gate])
        made.append(Call(model.generate, stopping_criteria=criteria, **(common | each)))
    found = [call.result() for call in made]
    return found, Counter(state_of(model).stats.shared_steps) - before


def prompts(device, lengths=(5, 23, 11, 40, 7), vocab=VOCAB):
    return [dict(input_ids=prompt(device, 1, length, seed=length) % vocab) for length in lengths]


GREEDY = dict(do_sample=False, max_new_tokens=24)


@pytest.mark.parametrize("architecture", ("gpt2", "llama", "mistral", "gemma3_text", "qwen3_moe"))
def test_tokens_are_those_of_the_call_alone(architecture, device):
    """Lengths, windows and prompts differ; Mistral's prompts cross its window."""
    model = sharing(architecture, device)
    calls = prompts(device)
    alone = [model.generate(**each, **GREEDY) for each in calls]
    assert not state_of(model).stats.shared_steps, "a lone call shares nothing"
    found, steps = together(model, calls, **GREEDY)
    for number, (ours, expected) in enumerate(zip(found, alone)):
        assert ours.equal(expected), number
    assert max(steps) == len(calls)
    assert state_of(model).sharing.slots is None, "the last call lets go of the slots"


@pytest.mark.parametrize("options", ({"kv_dtype": "int8"}, {"kv_dtype": "fp8"}, {"weights": "int8"}), ids=str)
def test_quantized_caches_and_weights(options, device):
    """A rounding may change a quant, and that a token: so the logits of the first tokens are compared."""
    model = sharing("llama", device, **options)
    calls = prompts(device)
    kept = dict(GREEDY, output_logits=True, return_dict_in_generate=True)
    alone = [model.generate(**each, **kept) for each in calls]
    found, steps = together(model, calls, **kept)
    assert max(steps) == len(calls)
    for ours, expected in zip(found, alone):
        for step in range(5):
            scale = float(expected.logits[step].abs().max())
            torch.testing.assert_close(ours.logits[step], expected.logits[step], rtol=0, atol=0.01 * scale)


def test_adapters_and_known_beginnings(device):
    """LoRA beside the weights, and prompts whose beginnings are kept: texts are kept from slots, too."""
    require_native(device)
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(build("llama"), lora).to(device).eval()
    hf_fastpath.patch(model, quiet=True, share_steps=True, prefix_cache="100MB")
    inner = model.get_base_model()
    calls = prompts(device)
    alone = [model.generate(**each, **GREEDY) for each in calls]
    found, steps = together(inner, calls, **GREEDY)
    assert all(ours.equal(expected) for ours, expected in zip(found, alone)) and max(steps) == len(calls)
    more = [dict(input_ids=each, attention_mask=torch.ones_like(each)) for each in alone]
    expected = [hf_fastpath.unpatch(copy.deepcopy(inner)).generate(**each, **GREEDY) for each in more]
    found, steps = together(inner, more, **GREEDY)
    assert all(ours.equal(each) for ours, each in zip(found, expected)) and max(steps) == len(calls)
    assert state_of(inner).stats.prefixes.known_tokens


def test_a_recorded_model(device):
    from recorded_types import small_model

    require_native(device)
    model = hf_fastpath.patch(small_model("glm4").to(device), quiet=True, share_steps=True)
    assert state_of(model).decided.recorded is not None
    calls = prompts(device, vocab=model.config.vocab_size)
    alone = [model.generate(**each, **GREEDY) for each in calls]
    found, steps = together(model, calls, **GREEDY)
    assert all(ours.equal(expected) for ours, expected in zip(found, alone))
    assert max(steps) == len(calls)


def test_batches_with_padding_among_others(device):
    model = sharing("llama", device)
    calls = [left_padded(device), *prompts(device, (3, 30)), dict(input_ids=prompt(device, 2, 9))]
    alone = [model.generate(**each, **GREEDY) for each in calls]
    found, steps = together(model, calls, **GREEDY)
    assert all(ours.equal(expected) for ours, expected in zip(found, alone))
    assert max(steps) == 3 + 1 + 1 + 2


@pytest.mark.parametrize("architecture", ("llama", "qwen3_moe"))
def test_more_than_64_rows(architecture, device):
    """A mixture of float32 on a GPU has 16 at most."""
    model = sharing(architecture, device, max_batch_size=128)
    calls = [dict(input_ids=prompt(device, 70, 9)), dict(input_ids=prompt(device, 20, 5, seed=3))]
    alone = [torch.cat([model.generate(each[None], **GREEDY) for each in call["input_ids"][::9]]) for call in calls]
    if architecture == "qwen3_moe" and device.type == "cuda":
        found = [model.generate(**call, **GREEDY) for call in calls]
        assert hf_fastpath.report(model).stats["details"]["batch_size"]
    else:
        found, steps = together(model, calls, **GREEDY)
        assert max(steps) == 90
    assert all(ours[::9].equal(expected) for ours, expected in zip(found, alone))


def test_end_tokens_end_rows_at_different_times(device):
    model = sharing("llama", device)
    calls = [*prompts(device), dict(input_ids=prompt(device, 3, 9))]
    texts = [model.generate(**each, **GREEDY) for each in calls]
    for call, text in zip(calls, texts):
        call["eos_token_id"] = [int(text[0, -12]), int(text[-1, -5])]
    alone = [model.generate(**each, **GREEDY, pad_token_id=0) for each in calls]
    assert len({each.shape[1] for each in alone}) > 2
    found, _ = together(model, calls, **GREEDY, pad_token_id=0)
    assert all(ours.equal(expected) for ours, expected in zip(found, alone))


def test_few_steps_begin_in_vain(device, monkeypatch):
    """Where calls come and go, and where a row ends; but not at each step behind the end of one of a call's rows."""
    model = sharing("llama", device)
    calls = [*prompts(device)[:2], dict(input_ids=prompt(device, 3, 9))]
    text = model.generate(**calls[2], **GREEDY)
    calls[2] |= dict(eos_token_id=int(text[0, -20]), pad_token_id=0)
    alone = [model.generate(**each, **GREEDY) for each in calls]
    begun, step = [], RowsPlan.step
    monkeypatch.setattr(RowsPlan, "step", lambda self, *given: begun.append(self) or step(self, *given))
    found, steps = together(model, calls, **GREEDY)
    assert all(ours.equal(expected) for ours, expected in zip(found, alone))
    assert (alone[2][0] == 0).sum() > 8 and sum(steps.values()) < len(begun) <= sum(steps.values()) + 8


def test_processors_criteria_scores_and_caches(device, monkeypatch):
    """Each call has what only its own thread can do between tokens; the cache that it gives can be gone on with."""
    monkeypatch.setattr(steps_of_calls, "_PATIENCE", 1.0)  # however busy the machine is, a step waits for five threads
    model = sharing("mistral", device)

    def ban_odd(ids, scores):
        return scores.masked_fill(torch.arange(VOCAB, device=scores.device) % 2 == 1, -torch.inf)

    def ends_at(length):
        return lambda ids, scores, **_: torch.full((len(ids),), ids.shape[1] >= length, device=ids.device)

    ids = [each["input_ids"] for each in prompts(device)]
    ways = [
        dict(logits_processor=LogitsProcessorList([ban_odd])),
        dict(output_scores=True, output_logits=True, return_dict_in_generate=True),
        dict(stopping_criteria=StoppingCriteriaList([ends_at(ids[2].shape[1] + 9)])),
        dict(repetition_penalty=1.3),
        dict(return_dict_in_generate=True),
    ]
    calls = [dict(input_ids=each, **copy.copy(way)) for each, way in zip(ids, ways)]
    alone = [model.generate(**each, **GREEDY) for each in calls]
    found, steps = together(model, calls, **GREEDY)
    assert max(steps) == len(calls)
    for number in (0, 2, 3):
        assert found[number].equal(alone[number]), number
    for number in (1, 4):
        assert found[number].sequences.equal(alone[number].sequences), number
    for kind in ("scores", "logits"):
        for ours, expected in zip(getattr(found[1], kind), getattr(alone[1], kind), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    cache, its = (getattr(each[4], hf_fastpath.compat.CACHE) for each in (found, alone))
    assert cache.get_seq_length() == its.get_seq_length()
    for ours, expected in zip(cache.key_layers, its.key_layers):
        torch.testing.assert_close(ours.keys, expected.keys, rtol=1e-4, atol=1e-4)
    more = [
        model.generate(each.sequences, **{hf_fastpath.compat.CACHE: c}, **GREEDY)
        for each, c in ((found[4], cache), (alone[4], its))
    ]
    assert more[0].equal(more[1])


@pytest.mark.parametrize("slow", ("streamer", "criterion"))
def test_sixteen_staggered_threads_one_slow_one_that_raises(slow, device):
    """The steps of all are no more than those of the longest call and a little."""
    model = sharing("llama", device)
    tokens = 300  # a small model's tokens take no longer than what Python does for a call

    def is_slow(ids, *_, **__):
        time.sleep(0.002)
        return torch.zeros(len(ids), dtype=torch.bool, device=device)

    class Slow:
        put, end = staticmethod(is_slow), staticmethod(lambda: None)

    class Raises:
        def put(self, value):
            self.seen = getattr(self, "seen", 0) + 1
            if self.seen == 10:
                raise ZeroDivisionError("of the user's own")

        def end(self):
            pass

    ids = [prompt(device, 1, 4 + 3 * number, seed=number) for number in range(16)]
    options = [dict(do_sample=False, max_new_tokens=tokens - number % 4) for number in range(16)]
    alone = [model.generate(each, **way) for each, way in zip(ids, options)]
    ways = {"streamer": dict(streamer=Slow()), "criterion": dict(stopping_criteria=StoppingCriteriaList([is_slow]))}
    options[3] |= ways[slow]
    options[9]["streamer"] = Raises()
    calls = [
        Call(model.generate, each, after=0.001 * number, **way) for number, (each, way) in enumerate(zip(ids, options))
    ]
    for number, (call, expected) in enumerate(zip(calls, alone)):
        if number == 9:
            with pytest.raises(ZeroDivisionError):
                call.result()
        else:
            assert call.result().equal(expected), number
    steps = state_of(model).stats.shared_steps
    assert sum(steps.values()) <= 1.3 * tokens, dict(steps)
    assert state_of(model).sharing.slots is None


def test_samples_are_drawn_by_each_call(device):
    """Every call draws one number a step; of calls that all give the same token, each does so among the others."""
    model = sharing("llama", device)
    calls = [dict(each, top_k=1) for each in prompts(device)]
    sampled = dict(do_sample=True, max_new_tokens=24)
    alone = [model.generate(**each, **sampled) for each in calls]
    found, _ = together(model, calls, **sampled)
    assert all(ours.equal(expected) for ours, expected in zip(found, alone))
    found, steps = together(model, prompts(device), **sampled, temperature=1.3)
    assert max(steps) == 5 and all(each.shape[1] == call["input_ids"].shape[1] + 24 for each, call in zip(found, calls))


def test_a_model_with_states_runs_as_it_does_alone(device):
    from recorded_types import small_model

    require_native(device)
    model = hf_fastpath.patch(small_model("lfm2").to(device), quiet=True, share_steps=True)
    calls = prompts(device, (5, 23, 7), model.config.vocab_size)
    alone = [model.generate(**each, **GREEDY) for each in calls]
    found, steps = together(model, calls, **GREEDY)
    assert not steps and all(ours.equal(expected) for ours, expected in zip(found, alone))
    assert "recurrent states" in hf_fastpath.report(model).stats["details"]["not_shared"]


@pytest.mark.parametrize("error", (KeyboardInterrupt, MemoryError))
@pytest.mark.parametrize("behind", (False, True))
def test_a_step_that_breaks_off(error, behind, device, monkeypatch):
    """An interrupt ends the call whose thread it comes to, before the step or behind it, and no other; an error of the
    step ends those that were in it. Then all is as before."""
    from hf_fastpath.batching.slots import Slots

    model, step, broken = sharing("mistral", device), Slots.step, []
    calls = prompts(device)
    alone = [model.generate(**each, **GREEDY) for each in calls]

    def breaks(self, tokens, goes_on):
        is_due = len(tokens) > 2 and not broken
        if is_due:
            broken.append(len(tokens))
        if is_due and not behind:
            raise error("here")
        found = step(self, tokens, goes_on)
        if is_due:
            raise error("here")
        return found

    monkeypatch.setattr(Slots, "step", breaks)
    gate, ended = AllHere(len(calls), times=1), 0
    made = [Call(model.generate, stopping_criteria=StoppingCriteriaList([gate]), **GREEDY, **each) for each in calls]
    for call, expected in zip(made, alone):
        try:
            assert call.result().equal(expected)
        except error:
            ended += 1
    assert ended == (1 if error is KeyboardInterrupt else broken[0])
    assert state_of(model).sharing.slots is None and not state_of(model).sharing.members
    found, _ = together(model, prompts(device), **GREEDY)
    assert all(ours.equal(expected) for ours, expected in zip(found, alone))


def test_a_callback_that_changes_the_model_and_one_that_generates(device):
    """What a callback changes takes effect with the next token; a call inside of a callback is a call as any other."""
    model = sharing("llama", device)
    ids, other = prompt(device, 1, 9), prompt(device, 1, 5, seed=3)
    head = model.lm_head.weight

    def negates(at):
        def criterion(seen, scores, **_):
            if seen.shape[1] == at:
                head.data.neg_()
            return torch.zeros(len(seen), dtype=torch.bool, device=seen.device)

        return StoppingCriteriaList([criterion])

    inner = []

    def asks(seen, scores, **_):
        if not inner:
            inner.append(model.generate(other, **GREEDY))
        return torch.zeros(len(seen), dtype=torch.bool, device=seen.device)

    expected = [model.generate(each, **GREEDY) for each in (ids, other)]
    outer = Call(model.generate, ids, stopping_criteria=StoppingCriteriaList([asks]), **GREEDY)
    assert outer.result().equal(expected[0]) and inner[0].equal(expected[1])
    changed = model.generate(ids, stopping_criteria=negates(15), **GREEDY)
    head.data.neg_()
    beside = Call(model.generate, prompt(device, 1, 4), do_sample=False, max_new_tokens=400)
    found = Call(
        model.generate,
        ids,
        logits_processor=LogitsProcessorList([lambda _, scores: scores]),
        **GREEDY,
        stopping_criteria=negates(15),
    ).result()
    assert found.equal(changed) and not changed.equal(expected[0])
    beside.result()


@pytest.mark.parametrize("architecture", ("llama", "mistral"))
def test_what_is_chosen_ahead_of_a_slow_criterion_is_dropped(architecture, device):
    """The call's cache has the tokens that it has taken, and stock code goes on behind these when a hook comes."""
    model = sharing(architecture, device)
    ids, other = prompt(device, 1, 30), dict(input_ids=prompt(device, 1, 5, seed=3), do_sample=False)
    hooks = []

    def slow(at, then):
        def criterion(seen, scores, **_):
            time.sleep(0.003)
            if seen.shape[1] == at:
                then()
            return torch.full((len(seen),), then is ends and seen.shape[1] >= at, device=seen.device)

        return dict(stopping_criteria=StoppingCriteriaList([criterion]), do_sample=False, max_new_tokens=60)

    def ends():
        pass

    def hooked():
        hooks.append(model.model.layers[0].mlp.register_forward_hook(lambda *_: None))

    for then in (ends, hooked):
        given = dict(input_ids=ids, return_dict_in_generate=True)
        alone = model.generate(**given, **slow(45, then))
        while hooks:
            hooks.pop().remove()
        beside = [Call(model.generate, max_new_tokens=400, **other) for _ in range(2)]
        found = Call(model.generate, **given, **slow(45, then)).result()
        for call in beside:
            call.result()
        while hooks:
            hooks.pop().remove()
        assert found.sequences.equal(alone.sequences)
        cache, its = (getattr(each, hf_fastpath.compat.CACHE) for each in (found, alone))
        assert cache.get_seq_length() == its.get_seq_length() == alone.sequences.shape[1] - 1
        for ours, expected in zip(cache.key_layers, its.key_layers):
            torch.testing.assert_close(ours.keys, expected.keys, rtol=1e-4, atol=1e-4)
    assert max(state_of(model).stats.shared_steps) >= 2
