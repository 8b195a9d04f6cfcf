"""``hf_fastpath.batch``: requests come and end one by one, each with the tokens that ``generate()`` gives it alone."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time

import pytest
import torch
from batched import alone, patched, texts
from in_thread import LONG
from models import VOCAB, build, prompt, require_native
from transformers import LogitsProcessorList

import hf_fastpath
from hf_fastpath.batching import engine, slots
from hf_fastpath.patching.state import state_of


@pytest.mark.parametrize("architecture", ("llama", "mistral"))
def test_requests_have_their_tokens_alone(architecture, device):
    """More requests than slots, of different lengths: neighbors come and go in every one."""
    model = patched(architecture, device)
    ids = texts(11, device)
    options = [dict(max_new_tokens=20 + 25 * (number % 4), do_sample=False) for number in range(len(ids))]
    expected = [alone(model, each, **way) for each, way in zip(ids, options)]
    with hf_fastpath.batch(model, slots=4) as batch:
        requests = [batch.submit(each[0].tolist(), **way) for each, way in zip(ids, options)]
        found = {result.id: result for result in batch}
    assert [found[request.id].tokens for request in requests] == expected
    assert all(result.finish_reason == "length" and result.error is None for result in found.values())
    steps = hf_fastpath.report(model).stats["shared_steps"]
    assert 2 <= max(steps) <= 4 and "rows a step" in str(hf_fastpath.report(model))


def test_prompts_are_taken_as_there_is_room(device):
    model, taken = patched(device=device), []

    def prompts():
        for each in texts(12, device):
            taken.append(each)
            yield each

    ended = 0
    for result in hf_fastpath.batch(model, prompts(), slots=2, max_new_tokens=6, do_sample=False):
        ended += 1
        assert len(taken) <= ended + 2 * 2 + 1
        assert result.tokens == alone(model, taken[int(result.id)], max_new_tokens=6, do_sample=False)
    assert ended == 12


def test_async(device):
    model, ids = patched(device=device), texts(5, device)
    options = dict(max_new_tokens=6, do_sample=False)
    expected = [alone(model, each, **options) for each in ids]

    async def main():
        found = {}
        with hf_fastpath.batch(model, ids, **options) as batch:
            async for result in batch:
                found[int(result.id)] = result.tokens
            waited = await batch.submit(ids[0], logprobs=True).wait()
            request = batch.submit(ids[1], stream=True)
            streamed = [token async for token in request.stream()]
            endless = batch.submit(ids[2], stream=True, max_new_tokens=5000)
            async for _ in endless.stream():
                endless.cancel()
            sampled = [await batch.submit(ids[3], seed=4, do_sample=True).wait() for _ in range(2)]
            return found, waited, streamed, endless.result(), sampled

    found, waited, streamed, cancelled, sampled = asyncio.run(main())
    assert [found[number] for number in range(5)] == expected
    assert waited.tokens == expected[0] and len(waited.logprobs) == 6 and streamed == expected[1]
    assert cancelled.finish_reason == "cancelled" and 0 < len(cancelled.tokens) < 5000
    torch.manual_seed(4)
    assert [each.tokens for each in sampled] == [alone(model, ids[3], max_new_tokens=6, do_sample=True)] * 2


def test_samples_are_those_of_their_seed(device):
    """Alone, among others, and by ``generate()`` behind ``torch.manual_seed``; settings differ by request."""
    model, ids = patched(device=device), texts(5, device)
    ways = [dict(temperature=0.9), dict(top_k=9), dict(top_p=0.8), dict(min_p=0.05), dict(temperature=1.7, top_k=40)]
    ways = [dict(way, do_sample=True, max_new_tokens=16) for way in ways]
    expected = []
    for number, (each, way) in enumerate(zip(ids, ways)):
        torch.manual_seed(number)
        expected.append(alone(model, each, **way))
    with hf_fastpath.batch(model) as batch:
        for _ in range(2):
            made = [batch.submit(each, seed=number, **way) for number, (each, way) in enumerate(zip(ids, ways))]
            assert [request.result(LONG).tokens for request in made] == expected


def test_end_tokens_and_log_probabilities(device):
    model, ids = patched(device=device), texts(4, device)
    options = dict(max_new_tokens=14, do_sample=False)
    ends = [alone(model, each, **options)[3 * number] for number, each in enumerate(ids)]
    with hf_fastpath.batch(model, logprobs=True, **options) as batch:
        made = [batch.submit(each, eos_token_id=end) for each, end in zip(ids, ends)]
        results = [request.result(LONG) for request in made]
    for each, end, result in zip(ids, ends, results):
        expected = alone(model, each, eos_token_id=end, **options)
        assert result.tokens == expected and result.tokens[-1] == end and result.finish_reason == "stop"
        whole = torch.cat([each, torch.tensor([expected], device=device)], 1)
        logits = model(whole[:, :-1]).logits[0, -len(expected) :].float().log_softmax(-1)
        by_forward = logits.gather(1, whole[0, -len(expected) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(result.logprobs), by_forward.cpu(), rtol=1e-3, atol=1e-3)


class Gate(hf_fastpath.compat.BaseStreamer):
    """A streamer that holds its own request at a token until it is opened."""

    def __init__(self, at: int):
        self.reached, self.opened, self.at, self.count = threading.Event(), threading.Event(), at, 0

    def put(self, value):
        self.count += 1
        if self.count == self.at:
            self.reached.set()
            assert self.opened.wait(LONG)

    def end(self):
        pass


def test_a_request_is_cancelled_and_one_fails(device):
    """While it waits, while it runs, and by what it was given: its neighbors do not see it."""
    model, ids = patched(device=device), texts(6, device)
    options = dict(max_new_tokens=200, do_sample=False)
    expected = [alone(model, each, max_new_tokens=20, do_sample=False) for each in ids]

    def fails(ids, scores):
        if ids.shape[1] > 45:
            raise ZeroDivisionError("of the user's own")
        return scores

    gate = Gate(5)
    with hf_fastpath.batch(model, slots=4, do_sample=False) as batch:
        held = batch.submit(ids[0], streamer=gate, max_new_tokens=20)
        assert gate.reached.wait(LONG)
        running = batch.submit(ids[1], stream=True, max_new_tokens=1200)
        first = next(iter(running.tokens()))
        failing = batch.submit(ids[2], logits_processor=LogitsProcessorList([fails]), **options)
        wrong = batch.submit([VOCAB + 5], max_new_tokens=3)
        good = [batch.submit(each, max_new_tokens=20) for each in ids[3:]]
        last = batch.submit(ids[1], max_new_tokens=20)
        last.cancel()
        assert [each.result(LONG).tokens for each in good] == expected[3:]
        running.cancel()
        result = running.result(LONG)
        assert result.finish_reason == "cancelled" and result.tokens[0] == first and len(result.tokens) < 1200
        with pytest.raises(ZeroDivisionError):
            failing.result(LONG)
        with pytest.raises(IndexError, match=f"token {VOCAB + 5}, and the model knows tokens from 0 to {VOCAB - 1}"):
            wrong.result(LONG)
        assert last.result(LONG).finish_reason == "cancelled" and not last.result().tokens
        gate.opened.set()
        assert held.result(LONG).tokens == expected[0]
        assert batch.submit(ids[1], max_new_tokens=20).result(LONG).tokens == expected[1]
        assert {each.id for each in batch} == set(), "results that were waited for are not given again"
    assert state_of(model).sharing.slots is None


def kv_bytes() -> int:
    """Return the bytes of keys and values of all caches that there are."""
    gc.collect()
    caches = (each for each in gc.get_objects() if isinstance(each, hf_fastpath.FastpathCache))
    return sum(
        buffer.nbytes for buffer in {each for cache in caches for layer in cache.key_layers for each in layer.buffers}
    )


def test_keys_and_values_are_given_back(device, monkeypatch):
    """Behind the ``with`` block nothing holds the slots' memory, so that a trainer has it for its step."""
    model, before = patched(device=device), kv_bytes()
    most, step = [0], slots.Slots.step
    monkeypatch.setattr(slots.Slots, "step", lambda self, *given: most.append(kv_bytes()) or step(self, *given))
    with hf_fastpath.batch(model, slots=4, max_new_tokens=8, do_sample=False) as batch:
        for request in [batch.submit(each) for each in texts(6, device)]:
            request.result(LONG)
    assert max(most) > before and kv_bytes() == before


def test_what_shares_no_steps_runs_one_after_another(device):
    """Beams, and a model with recurrent states; the reason is told."""
    model, ids = patched(device=device), texts(3, device)
    for beams in (1, 2):
        options = dict(max_new_tokens=6, do_sample=False, num_beams=beams)
        with hf_fastpath.batch(model, **options) as batch:
            made = [batch.submit(each) for each in ids]
            assert [each.result(LONG).tokens for each in made] == [alone(model, each, **options) for each in ids]
    from recorded_types import small_model

    model = hf_fastpath.patch(small_model("lfm2").to(device), quiet=True)
    ids = [each % model.config.vocab_size for each in ids]
    sampled = dict(max_new_tokens=6, do_sample=True)
    with hf_fastpath.batch(model, max_memory="1GB", logprobs=True, **sampled) as batch:
        made = [batch.submit(each, seed=3) for each in ids]
        for each, request in zip(ids, made):
            torch.manual_seed(3)
            assert request.result(LONG).tokens == alone(model, each, **sampled)
            assert len(request.result().logprobs) == 6
    assert "recurrent states" in hf_fastpath.report(model).stats["details"]["not_shared"]


def test_nobody_waits_forever(device):
    """A request whose text is the longest gets its turn though short ones keep coming."""
    model, short = patched(device=device), prompt(device, 1, 3)
    part = state_of(model).plans.part_of(model)
    limit = 6 * slots.text_bytes(part, None, 64)
    with hf_fastpath.batch(model, max_memory=limit, do_sample=False) as batch:
        before = [batch.submit(short, max_new_tokens=8) for _ in range(4)]
        long = batch.submit(short, max_new_tokens=100)
        after = [batch.submit(short, max_new_tokens=8) for _ in range(12)]
        order = [result.id for result in batch]
    assert order.index(long.id) < order.index(after[-1].id)
    assert sorted(order, key=int) == [each.id for each in (*before, long, *after)]


@pytest.mark.parametrize(("count", "slots_"), ((200, 16), pytest.param(5000, 64, marks=pytest.mark.full)))
@pytest.mark.parametrize("limited", (False, True))
def test_a_soak_of_requests(count, slots_, limited, device):
    """Random lengths, settings, beginnings, cancelled and failing ones: all answers are right, and nothing is left."""
    model, chosen = patched("gpt2", device), random.Random(5)
    options = dict(do_sample=False)
    begin = prompt(device, 1, 35, seed=9)
    ids = [each if number % 3 else torch.cat((begin, each), 1) for number, each in enumerate(texts(24, device, seed=3))]
    expected = [alone(model, each, max_new_tokens=44, **options) for each in ids]
    part, sharing = state_of(model).plans.part_of(model), state_of(model).sharing
    limit = (slots_ // 2 + 2) * slots.text_bytes(part, None, 128) if limited else None

    def fails(ids, scores):
        raise ZeroDivisionError("of the user's own")

    def run(count):
        with hf_fastpath.batch(model, slots=slots_, max_memory=limit, **options) as batch:
            made = []
            for _ in range(count):
                which, tokens = chosen.randrange(24), chosen.randint(1, 44)
                kind = chosen.choice(("plain",) * 8 + ("cancelled", "failing", "stream"))
                given = dict(logits_processor=LogitsProcessorList([fails])) if kind == "failing" else {}
                request = batch.submit(ids[which], max_new_tokens=tokens, stream=kind == "stream", **given)
                if kind == "cancelled":
                    threading.Timer(0.001 * chosen.random(), request.cancel).start()
                made.append((kind, which, tokens, request))
            for kind, which, tokens, request in made:
                if kind == "failing":
                    with pytest.raises(ZeroDivisionError):
                        request.result(LONG)
                    continue
                result = request.result(LONG)
                right = expected[which][:tokens]
                if kind == "cancelled":
                    assert result.tokens in ([], right)
                else:
                    assert result.tokens == right and (kind != "stream" or list(request.tokens()) == right)
            assert not batch._ended and not batch._running and not batch._beginnings._first_pages
        assert not sharing.room._waiting and not sharing.room._inside and not sharing.prompts.calls

    def tensors() -> int:
        state_of(model).plans.clear()  # there is one of each number of slots that has occurred
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    run(60)
    before = tensors()
    threads = threading.active_count()
    run(count)
    assert tensors() <= before + 20
    until = time.monotonic() + LONG
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= threads
    assert sharing.slots is None and not sharing.calls


def test_adapters_by_request(device):
    """Requests with different adapters take turns; behind them, those that were active are so again."""
    require_native(device)
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    lora = dict(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(**lora), adapter_name="first")
    model.add_adapter("second", peft.LoraConfig(**lora | dict(r=3)))
    hf_fastpath.patch(model.to(device).eval(), quiet=True)
    ids, options = texts(9, device), dict(max_new_tokens=12, do_sample=False)
    expected = []
    for number, each in enumerate(ids):
        model.set_adapter(("first", "second")[number % 2])
        expected.append(alone(model, each, **options))
    model.set_adapter("first")
    assert expected[1] != alone(model, ids[1], **options), "the adapters are hardly different"
    wanted = {name: each.requires_grad for name, each in model.named_parameters()}
    with hf_fastpath.batch(model, slots=4, **options) as batch:
        names = [(None, "second")[number % 2] for number in range(len(ids))]
        made = [batch.submit(each, adapter=name) for each, name in zip(ids, names)]
        order = [int(result.id) for result in batch]
        found = [request.result(LONG).tokens for request in made]
        with pytest.raises(ValueError, match="adapter is 'secnd', expected one of first, second. Did you mean"):
            batch.submit(ids[0], adapter="secnd")
        with pytest.raises(ValueError, match=r"adapter_names is .* submit\(prompt, adapter='name'\)"):
            batch.submit(ids[0], adapter_names=["second"])
    assert found == expected and sorted(order) == list(range(len(ids)))
    assert {name: each.requires_grad for name, each in model.named_parameters()} == wanted
    assert alone(model, ids[0], **options) == expected[0]
    with pytest.raises(ValueError, match="expected None: the model has no adapters"):
        hf_fastpath.batch(patched(device=device), adapter="first").submit(ids[0])


def test_bad_input(device):
    model = patched(device=device)
    with pytest.raises(ValueError, match="is not patched: call hf_fastpath.patch"):
        hf_fastpath.batch(build("llama"))
    for slots_ in (0, 65, 2.0):
        with pytest.raises(ValueError, match="expected a whole number from 1 to 64"):
            hf_fastpath.batch(model, slots=slots_)
    with pytest.raises(ValueError, match="max_memory is 'much', expected a number of bytes"):
        hf_fastpath.batch(model, max_memory="much")
    for share in (0.0, 1.5, "200%"):
        with pytest.raises(ValueError, match="expected bytes, such as '2GB', or a share"):
            hf_fastpath.batch(model, max_memory=share)
    batch = hf_fastpath.batch(model)
    with pytest.raises(ValueError, match="the batch has no tokenizer"):
        batch.submit("text")
    with pytest.raises(ValueError, match=r"expected whole numbers \[seq_len\]"):
        batch.submit([[1, 2], [3, 4]])
    with pytest.raises(ValueError, match="num_return_sequences is 2, expected 1"):
        batch.submit([1], num_return_sequences=2)
    with pytest.raises(ValueError, match="submit it with stream=True"):
        next(batch.submit([1, 2], max_new_tokens=1).tokens())
    batch.close()
    with pytest.raises(RuntimeError, match="closed"):
        batch.submit([1])
    assert engine.Batch is type(batch)
