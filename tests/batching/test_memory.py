"""Batches whose memory has a limit, and prompts that begin alike."""

from __future__ import annotations

import functools
import gc
import time
import weakref

import pytest
import torch
from batched import alone, patched, texts
from in_thread import LONG
from models import build, prompt, require_native
from transformers import LogitsProcessorList, StoppingCriteriaList

import hf_fastpath
from hf_fastpath import options as options_of
from hf_fastpath.batching import room, slots
from hf_fastpath.batching.sharing import Sharing
from hf_fastpath.decode.loops import prompt as prompts
from hf_fastpath.decode.loops.call_scope import scope_here
from hf_fastpath.patching.state import state_of


def most_bytes(monkeypatch, stores=()) -> list[int]:
    """Return a list of a number: the bytes of all caches and of what is kept of prompts, at the step with the most."""
    most, step, made = [0], slots.Slots.step, hf_fastpath.FastpathCache.__init__
    caches = weakref.WeakSet()

    def noted(self, *given, **named):
        made(self, *given, **named)
        caches.add(self)

    def looked_at(self, *given):
        held = {buffer for cache in list(caches) for layer in cache.key_layers for buffer in layer.buffers}
        most[0] = max(most[0], sum(buffer.nbytes for buffer in held) + sum(store.num_bytes for store in stores))
        return step(self, *given)

    monkeypatch.setattr(hf_fastpath.FastpathCache, "__init__", noted)
    monkeypatch.setattr(slots.Slots, "step", looked_at)
    return most


def test_memory_is_bounded(device, monkeypatch):
    """Slots and the caches of calls take no more than was said; what can never fit fails by itself."""
    model, ids = patched(device=device), texts(12, device)
    options = dict(max_new_tokens=30, do_sample=False)
    part = state_of(model).plans.part_of(model)
    limit = 6 * slots.text_bytes(part, None, slots.capacity_for(250))
    expected = [alone(model, each, **options) for each in ids]
    gc.collect()
    most = most_bytes(monkeypatch)
    with hf_fastpath.batch(model, max_memory=limit, **options) as batch:
        made = [
            batch.submit(each, **({"max_new_tokens": 200} if number == 3 else {})) for number, each in enumerate(ids)
        ]
        too_long = batch.submit(ids[0], max_new_tokens=800)
        found = [request.result(LONG).tokens for request in made]
        assert [tokens[:30] for tokens in found] == expected
        with pytest.raises(ValueError, match=r"up to \d+ tokens, whose keys and values take \d+ bytes, and max_memory"):
            too_long.result(LONG)
    assert 0 < most[0] <= limit
    assert 1 < max(hf_fastpath.report(model).stats["shared_steps"]) < 12


def together(monkeypatch, count: int) -> None:
    """Let nobody step before so many calls share steps, so that their texts grow together; once."""
    turn, begun = Sharing._turn, []

    def waits(self):
        if begun:
            return turn(self)
        self._let_out()
        self._let_in()
        if len(self.members) >= count:
            begun.append(True)
        else:
            self.changed.wait(0.001)

    monkeypatch.setattr(Sharing, "_turn", waits)


@pytest.mark.parametrize("architecture", ("llama", "gemma3_text"))
def test_the_youngest_gives_up_its_slot_and_reads_its_text_again(architecture, device, monkeypatch):
    """Where texts grow beyond the memory: greedy, sampled, with a processor, streamed, and cancelled while it waits."""
    model, ids = patched(architecture, device), texts(8, device, seed=1)
    part = state_of(model).plans.part_of(model)
    texts_in_memory = 6 if architecture == "llama" else 7
    limit = texts_in_memory * slots.text_bytes(part, None, slots.capacity_for(240))
    ways = [dict(do_sample=False), dict(do_sample=True, top_k=9), dict(do_sample=False, stream=True)]
    ways.append(dict(do_sample=False, logits_processor=LogitsProcessorList([lambda _, scores: scores])))
    ways = [dict(ways[number % 4], max_new_tokens=199 - number) for number in range(8)]
    expected = []
    for number, (each, way) in enumerate(zip(ids, ways)):
        torch.manual_seed(number)
        expected.append(alone(model, each, **{name: value for name, value in way.items() if name != "stream"}))
    gc.collect()
    most = most_bytes(monkeypatch)
    sharing = state_of(model).sharing
    together(monkeypatch, 5)
    with hf_fastpath.batch(model, max_memory=limit) as batch:
        made = [batch.submit(each, seed=number, **way) for number, (each, way) in enumerate(zip(ids, ways))]
        for number, request in enumerate(made):
            assert request.result(LONG).tokens == expected[number], number
            assert number % 4 != 2 or list(request.tokens()) == expected[number]
        stats = hf_fastpath.report(model).stats
        assert 4 < max(stats["shared_steps"]) and stats["given_up_slots"] and 0 < most[0] <= limit
        assert "read again for want of memory" in str(hf_fastpath.report(model))
        cancelled, give_up = [], room.Room._give_up

        def cancels(self, member):
            give_up(self, member)
            if not cancelled:
                cancelled.append(member.scope)
                member.scope.is_cancelled = True

        monkeypatch.setattr(room.Room, "_give_up", cancels)
        together(monkeypatch, 5)
        made = [batch.submit(each, **dict(ways[0], max_new_tokens=199)) for each in ids]
        found = [request.result(LONG) for request in made]
        right = [alone(model, each, **dict(ways[0], max_new_tokens=199)) for each in ids]
        for result, tokens, request in zip(found, right, made):
            is_cancelled = request.scope in cancelled
            assert result.finish_reason == ("cancelled" if is_cancelled else "length")
            assert is_cancelled or result.tokens == tokens
        assert cancelled
    assert (
        not sharing.room._waiting and not sharing.room._inside and sharing.slots is None and sharing.room.limit is None
    )


def test_a_call_that_has_given_up_its_slot_and_goes_on_alone(device, monkeypatch):
    """A hook comes while it waits for room: stock code goes on behind the tokens that the call has taken."""
    model, ids = patched(device=device), texts(5, device, seed=1)
    options = dict(do_sample=False, max_new_tokens=199)
    expected = [alone(model, each, **options) for each in ids]
    limit = 6 * slots.text_bytes(state_of(model).plans.part_of(model), None, slots.capacity_for(240))
    give_up, out, hooks = room.Room._give_up, [], []

    def noted(self, member):
        give_up(self, member)
        out.append(member)

    def hooks_then(seen, scores, **_):
        for member in out:
            if not hooks and member.scope is scope_here() and member.is_out and member.ahead:
                hooks.append(model.model.layers[0].mlp.register_forward_hook(lambda *_: None))
        time.sleep(0.005)  # steps go on meanwhile: the first request's thread leads
        return torch.zeros(len(seen), dtype=torch.bool, device=seen.device)

    monkeypatch.setattr(room.Room, "_give_up", noted)
    together(monkeypatch, 5)
    with hf_fastpath.batch(model, max_memory=limit, **options) as batch:
        made = [batch.submit(ids[0])]
        made += [batch.submit(each, stopping_criteria=StoppingCriteriaList([hooks_then])) for each in ids[1:]]
        assert [request.result(LONG).tokens for request in made] == expected
    assert hooks, "no call was ahead of its callback when it gave up its slots"


@pytest.mark.parametrize("limited", (False, True))
@pytest.mark.parametrize("kept", (None, "50MB"))
def test_what_prompts_begin_with_is_read_once(limited, kept, device, monkeypatch):
    """By requests that are under way together; also of ``patch(prefix_cache=)``, which keeps texts at their ends."""
    require_native(device)
    model = hf_fastpath.patch(build("llama").to(device), quiet=True, prefix_cache=kept)
    stock = hf_fastpath.patch(build("llama").to(device), quiet=True)
    begin = prompt(device, 1, 70, seed=9)
    ids = [torch.cat((begin, each), 1) for each in texts(5, device)] + texts(2, device, seed=4)
    options, counts = dict(max_new_tokens=60, do_sample=False), []
    expected = [alone(stock, each, **options) for each in ids]

    for name in ("read", "read_turn"):  # a few tokens behind others are a turn on a GPU

        def noted(read, part, cache, given, how):
            logits = read(part, cache, given, how)
            counts.append(0 if logits is None else given.tokens.shape[1])
            return logits

        monkeypatch.setattr(prompts, name, functools.partial(noted, getattr(prompts, name)))
    part = state_of(model).plans.part_of(model)
    limit = 24 * slots.text_bytes(part, None, slots.capacity_for(200)) if limited else None
    with hf_fastpath.batch(model, max_memory=limit, **options) as batch:
        with state_of(model).sharing.prompts.prompt():  # until all have been submitted
            made = [batch.submit(each) for each in ids]
        assert [each.result(LONG).tokens for each in made] == expected
        beginnings = batch._beginnings
        assert not beginnings._first_pages and (beginnings.store.num_bytes > 0) == (kept is None)
        assert hf_fastpath.report(model).stats["prefixes"]["known_tokens"] == 4 * 64
        assert sum(counts) == sum(each.shape[1] for each in ids) - 4 * 64
        model.lm_head.weight.data.mul_(2.0)  # the same tokens, but another model
        counts.clear()
        made = [batch.submit(ids[0]) for _ in range(2)]
        assert [each.result(LONG).tokens for each in made] == [expected[0]] * 2
    assert max(counts) == ids[0].shape[1], "nothing is known of a model whose weights were others"


def test_beginnings_give_way_to_texts(device, monkeypatch):
    """What is kept of prompts is in the memory that was allowed, and goes before a request gives up its slot."""
    model = patched("llama", device)
    begin = prompt(device, 1, 70, seed=9)
    ids = [torch.cat((begin, each), 1) for each in texts(4, device)]
    options = dict(max_new_tokens=140, do_sample=False)
    expected = [alone(model, each, **options) for each in ids]
    limit = 6 * slots.text_bytes(state_of(model).plans.part_of(model), None, slots.capacity_for(240))
    gc.collect()
    stores, cleared = [], []
    most = most_bytes(monkeypatch, stores)
    with hf_fastpath.batch(model, max_memory=limit, **options) as batch:
        stores.append(batch._beginnings.store)
        forget = stores[0].clear
        monkeypatch.setattr(stores[0], "clear", lambda: (cleared.append(stores[0].num_bytes), forget()))
        with (turns := state_of(model).sharing.prompts).prompt():
            made, room = [batch.submit(each) for each in ids], state_of(model).sharing.room
            end = time.monotonic() + LONG
            while turns.calls + room.num_waiting < 1 + len(ids):  # so that their texts grow together
                assert time.monotonic() < end, "a request does not come to its prompt"
                time.sleep(0.001)
        assert [each.result(LONG).tokens for each in made] == expected
    assert max(cleared) > 0 and 0 < most[0] <= limit


@pytest.mark.parametrize("share", (0.5, "50%", 1.0))
def test_a_share_of_the_memory(share, device):
    found = options_of.bytes_or_share(share, device) / options_of.free_bytes(device)
    assert abs(found - (1.0 if share == 1.0 else 0.5)) < 0.2
