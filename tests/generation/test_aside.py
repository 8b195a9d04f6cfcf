"""In calls of stock's loop, modules step aside where our forwards would be slower, and come back."""

from __future__ import annotations

import copy
import sys
import threading
from pathlib import Path

import pytest
import torch
from models import CPU, build, counting, prompt, require_native
from transformers import DynamicCache

import hf_fastpath
from hf_fastpath.decode.plans.plan_cache import PlanCache
from hf_fastpath.patching import aside, forwards
from hf_fastpath.patching.state import state_of

FORWARDS = str(Path(forwards.__file__))
#: a call that a plan cannot serve
ASKS = dict(max_new_tokens=6, do_sample=False, output_attentions=True, return_dict_in_generate=True)


@pytest.fixture
def pair():
    require_native(CPU)
    stock = build("llama")
    return stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True)


def frames(call) -> int:
    """Return how many functions of our forwards a call enters."""
    found = []
    sys.setprofile(lambda frame, event, _: event == "call" and found.append(frame.f_code.co_filename == FORWARDS))
    try:
        call()
    finally:
        sys.setprofile(None)
    return sum(found)


def bound(model) -> list[str]:
    return [name for name, each in model.named_modules() if "forward" in vars(each)]


class Stopper:
    """A streamer that does something at the third token."""

    def __init__(self, do):
        self.do, self.count = do, 0

    def put(self, tokens):
        self.count += 1
        if self.count == 3:
            self.do()

    def end(self):
        pass


def test_no_frame_of_ours(pair, monkeypatch):
    stock, ours = pair
    before = bound(ours)
    with counting(ours) as counts:
        assert frames(lambda: ours.generate(prompt(CPU), **ASKS)) == 0
    assert counts.fallback == 6 and counts.reasons == {"attention_outputs": 1}
    assert bound(ours) == before != []
    assert torch.equal(ours.generate(prompt(CPU), **ASKS).sequences, stock.generate(prompt(CPU), **ASKS).sequences)
    monkeypatch.setattr(aside, "LEAST_BYTES", 0)  # as of weights whose reading takes longer than Python's calls
    assert frames(lambda: ours.generate(prompt(CPU), **ASKS)) > 6 * len(before) / 2


@pytest.mark.parametrize(
    ("asks", "reason"),
    (
        (dict(output_attentions=True, return_dict_in_generate=True), "attention_outputs"),
        (dict(output_hidden_states=True, return_dict_in_generate=True), "attention_outputs"),
        (dict(use_cache=False), "no_cache"),
        (dict(cache_implementation="static"), "other_cache"),
        (dict(cache_implementation="static", do_sample=True, top_k=1), "other_cache"),
        (dict(past_key_values=DynamicCache), "other_cache"),
    ),
)
def test_a_model_is_not_looked_at_for_a_call_that_no_model_serves(asks, reason, pair, monkeypatch):
    """It takes longer than all else that is ours in such a call. The next call sees what has changed since."""
    stock, ours = pair
    looked, part_of = [], PlanCache.part_of
    monkeypatch.setattr(PlanCache, "part_of", lambda self, model: (looked.append(model), part_of(self, model))[1])
    how = dict(ASKS, output_attentions=False, return_dict_in_generate=False)
    ours.generate(prompt(CPU), **how)
    assert looked.pop() is ours and not looked
    for model in pair:
        model.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    with counting(ours) as counts:
        looked.clear()
        given = ({name: each() if callable(each) else each for name, each in (how | asks).items()} for _ in pair)
        found, expected = (each.generate(prompt(CPU), **of) for each, of in zip((ours, stock), given))
        assert not looked
    assert torch.equal(*(getattr(each, "sequences", each) for each in (found, expected)))
    assert counts.reasons == {reason: 1} and counts.fallback == 6
    assert torch.equal(ours.generate(prompt(CPU), **how), stock.generate(prompt(CPU), **how)) and looked


def test_of_modules_alone_nothing_steps_aside():
    """The user has chosen them."""
    require_native(CPU)
    ours = hf_fastpath.patch(build("llama"), ops=("mlp", "attention"), quiet=True)
    assert frames(lambda: ours.generate(prompt(CPU), **ASKS)) > 0


def test_a_call_that_is_broken_off(pair):
    _, ours = pair
    before = bound(ours)

    def interrupt():
        assert not bound(ours)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ours.generate(prompt(CPU), **ASKS, streamer=Stopper(interrupt))
    assert bound(ours) == before


def test_a_model_that_is_unpatched_meanwhile(pair):
    stock, ours = pair
    ours.generate(prompt(CPU), **ASKS, streamer=Stopper(lambda: hf_fastpath.unpatch(ours)))
    assert not bound(ours) and state_of(ours) is None
    hf_fastpath.patch(ours, quiet=True)
    assert bound(ours)


def test_a_forward_that_the_user_puts_in_meanwhile(pair):
    _, ours = pair
    mlp, own = ours.model.layers[0].mlp, lambda x: x
    ours.generate(prompt(CPU), **ASKS, streamer=Stopper(lambda: setattr(mlp, "forward", own)))
    assert mlp.forward is own and "forward" in vars(ours.model.layers[1].mlp)
    hf_fastpath.unpatch(ours)
    assert mlp.forward is own


def test_two_calls_at_once(pair):
    """The forwards come back with the last of them."""
    _, ours = pair
    before, inside, go_on = bound(ours), threading.Event(), threading.Event()

    def wait():
        inside.set()
        assert go_on.wait(60)

    first = threading.Thread(target=lambda: ours.generate(prompt(CPU), **ASKS, streamer=Stopper(wait)))
    first.start()
    assert inside.wait(60)
    ours.generate(prompt(CPU), **ASKS)
    assert not bound(ours)
    fast = ours.generate(prompt(CPU), max_new_tokens=6, do_sample=False)
    go_on.set()
    first.join()
    assert bound(ours) == before
    assert torch.equal(fast, ours.generate(prompt(CPU), max_new_tokens=6, do_sample=False))


@torch.no_grad()
def test_behind_forwards_over_a_cache_of_the_users_own_they_stay_out(pair):
    """Until another forward wants them."""
    stock, ours = pair
    before, ids = bound(ours), prompt(CPU)
    caches = [DynamicCache(config=each.config) for each in pair]
    for _ in range(3):
        expected, found = (each(ids, past_key_values=cache).logits for each, cache in zip(pair, caches))
        assert torch.equal(found, expected)
        ids = expected[:, -1:].argmax(-1)
        assert bound(ours) == ["", "model"]
    assert frames(lambda: ours(ids, past_key_values=caches[1])) == 1, "the decoder's forward lets its kind pass"
    copied = copy.deepcopy(ours)
    assert bound(copied) == before == bound(ours)
    copied(prompt(CPU), use_cache=False)
    assert bound(copied) == ["", "model"]
    copied(prompt(CPU), use_cache=True)
    assert bound(copied) == before
    ours.generate(prompt(CPU), max_new_tokens=4)
    looked = state_of(ours).plans.snapshot
    for others in ({}, ASKS):
        ours(ids, past_key_values=caches[1])
        assert bound(ours) == ["", "model"]
        ours.generate(prompt(CPU), **{"max_new_tokens": 4} | others)
        assert bound(ours) == before and state_of(ours).plans.snapshot is looked, "nothing has changed"
    ours(ids, past_key_values=caches[1])
    ours(prompt(CPU), use_cache=True)  # over a cache of ours
    assert bound(ours) == before
    ours(ids, past_key_values=caches[1])
    with counting(ours) as counts:
        ours(prompt(CPU), output_hidden_states=True)
    assert bound(ours) == before and not counts.reasons
    ours(ids, past_key_values=caches[1])
    with torch.enable_grad():
        ours(prompt(CPU)).logits.sum().backward()
    assert bound(ours) == before
    ours(ids, past_key_values=caches[1])
    hf_fastpath.unpatch(ours)
    assert not bound(ours)


@torch.no_grad()
def test_forwards_of_another_kind_do_not_pass(pair):
    """One over our cache, one that is to give more, one with gradients, one of another thread, one that is compared."""
    stock, ours = pair
    ids = prompt(CPU)
    cache = DynamicCache(config=ours.config)
    for _ in range(3):
        ours(ids[:, :1], past_key_values=cache)
    assert state_of(ours).aside.known is not None
    found, expected = ours(ids, use_cache=True), stock(ids, use_cache=True)
    assert isinstance(found.past_key_values, hf_fastpath.FastpathCache) and state_of(ours).aside.known is None
    torch.testing.assert_close(found.logits, expected.logits)
    step = ours(ids[:, :1], past_key_values=found.past_key_values).logits
    torch.testing.assert_close(step, stock(ids[:, :1], past_key_values=expected.past_key_values).logits)
    for _ in range(3):
        ours(ids, use_cache=False)
    assert state_of(ours).aside.known is not None
    with counting(ours) as counts:
        other = threading.Thread(target=torch.no_grad()(lambda: ours(ids[:, :1], past_key_values=cache)))
        other.start()
        other.join()
    assert counts.reasons == {"other_cache": 1}
    assert ours(ids, use_cache=False, output_hidden_states=True).hidden_states
    for _ in range(3):
        ours(ids, use_cache=False)
    assert hf_fastpath.verify(ours, ids).ok


@torch.no_grad()
def test_strict_raises_at_every_forward(pair):
    strict = hf_fastpath.patch(copy.deepcopy(pair[0]), quiet=True, strict=True)
    cache = DynamicCache(config=strict.config)
    strict(prompt(CPU), past_key_values=cache)
    for _ in range(3):
        with pytest.raises(hf_fastpath.FallbackError, match="other_cache"):
            strict(prompt(CPU)[:, :1], past_key_values=cache)


@torch.no_grad()
def test_a_forward_put_in_while_they_stay_out(pair):
    _, ours = pair
    mlp, own = ours.model.layers[0].mlp, lambda x: x
    ours(prompt(CPU), past_key_values=DynamicCache(config=ours.config))
    mlp.forward = own
    ours(prompt(CPU), output_hidden_states=True)
    assert mlp.forward is own and "forward" in vars(ours.model.layers[1].mlp)
    hf_fastpath.unpatch(ours)
    assert mlp.forward is own
