"""Adapters of one kind take each other's place without a recording; any other change of adapters is recorded anew."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from models import CPU, build, require_native
from torch import nn
from transformers import StoppingCriteria, StoppingCriteriaList

import hf_fastpath
from hf_fastpath.decode.state.python_state import Walk
from hf_fastpath.patching.state import state_of
from hf_fastpath.recording import whole_step

peft = pytest.importorskip("peft")
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def config(rank: int = 4, alpha: int = 6, **options):
    return peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=TARGETS, **options)


def draw(model: nn.Module, name: str, seed: int) -> None:
    """Give an adapter weights that change tokens."""
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in model.named_parameters():
        if f"lora_A.{name}." in path or f"lora_B.{name}." in path:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


class Pair:
    """A small model with an adapter, stock and patched, to which the same is done."""

    def __init__(self, first=None):
        require_native(CPU)
        self.stock = peft.get_peft_model(build("llama"), first or config(), adapter_name="first")
        draw(self.stock, "first", 0)
        self.ours = copy.deepcopy(self.stock.eval())
        hf_fastpath.patch(self.ours, quiet=True)
        for _ in range(3):  # prompts are recorded, too
            self.check()

    def do(self, what) -> None:
        for model in (self.stock, self.ours):
            what(model)
            model.eval()

    def add(self, name: str, seed: int, **options) -> None:
        self.do(lambda model: model.add_adapter(name, config(**options)))
        self.do(lambda model: draw(model, name, seed))
        self.do(lambda model: model.set_adapter(name))

    def check(self, **how) -> torch.Tensor:
        ids = torch.arange(3, 12)[None]
        how = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False) | how
        expected = self.stock.generate(input_ids=ids, **how)
        found = self.ours.generate(input_ids=ids, **how)
        assert torch.equal(expected, found)
        stats = state_of(self.ours.get_base_model()).stats
        assert not stats.fallback_tokens and not stats.reasons, dict(stats.reasons)
        return found


@contextmanager
def counted(monkeypatch):
    """Count recordings in a ``with`` block."""
    made, record = [], whole_step.record
    with monkeypatch.context() as patched:
        patched.setattr(whole_step, "record", lambda *given, **named: made.append(given) or record(*given, **named))
        yield made


def test_twenty_adapters(monkeypatch):
    """Adapters that come, go, and come again, with factors of their own."""
    pair, seen = Pair(), set()
    with counted(monkeypatch) as made:
        for number in range(20):
            pair.add(f"b{number}", number + 1, alpha=4 + number, use_rslora=number % 2 == 0)
            seen.add(tuple(pair.check()[0].tolist()))
            if number % 3 == 2:
                pair.do(lambda model, name=f"b{number - 1}": model.delete_adapter(name))
            if number % 5 == 4:
                pair.do(lambda model: model.set_adapter("first"))
                pair.check()
        assert not made
    assert len(seen) > 10, "the adapters are hardly different"


def test_a_name_that_comes_again(monkeypatch):
    """An adapter that is deleted and loaded under the same name is another one."""
    pair = Pair()
    with counted(monkeypatch) as made:
        for seed in (1, 2, 3):
            pair.add("b", seed, alpha=4 + seed)
            pair.check()
            pair.do(lambda model: model.set_adapter("first"))
            pair.do(lambda model: model.delete_adapter("b"))
            pair.check()
        assert not made


def test_hot_swap(monkeypatch, tmp_path):
    """``hotswap_adapter`` writes another adapter, with another factor, into the tensors of the first."""
    from peft.utils.hotswap import hotswap_adapter

    other = peft.get_peft_model(build("llama"), config(alpha=11))
    draw(other, "default", 7)
    other.save_pretrained(tmp_path)
    pair = Pair()
    before = pair.check()
    with counted(monkeypatch) as made:
        pair.do(lambda model: hotswap_adapter(model, str(tmp_path), adapter_name="first"))
        assert not torch.equal(pair.check(), before)
        assert not made


def test_buffers_of_adapters(monkeypatch):
    """VeRA keeps its matrices as buffers, by the adapters' names, in a container of its own."""
    require_native(CPU)
    made = [peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"], projection_prng_key=3) for _ in range(2)]
    stock = peft.get_peft_model(build("llama"), made[0], adapter_name="first")
    stock.add_adapter("b", made[1])
    generator = torch.Generator().manual_seed(2)
    for path, each in (*stock.named_parameters(), *stock.named_buffers()):
        if "vera" in path:
            each.data.copy_(torch.randn(each.shape, generator=generator))
    ours = copy.deepcopy(stock.eval())
    hf_fastpath.patch(ours, quiet=True)
    seen = []
    for name in ("first", "b", "first", "b"):
        for model in (stock, ours):
            model.set_adapter(name)
            model.eval()
        how = dict(input_ids=torch.arange(3, 12)[None], max_new_tokens=8, do_sample=False)
        seen.append(stock.generate(**how))
        assert torch.equal(seen[-1], ours.generate(**how)), name
    assert not torch.equal(*seen[:2])


@pytest.mark.parametrize("kind", ("IA3Config", "LoraConfig"))
def test_tensors_that_get_other_data(kind):
    """``parameter.data = ...`` leaves the parameter and gives it another memory, of which a list may hold views."""
    require_native(CPU)
    options = dict(feedforward_modules=["down_proj"]) if kind == "IA3Config" else dict(use_dora=True)
    made = getattr(peft, kind)(target_modules=TARGETS, **options)
    stock = peft.get_peft_model(build("llama"), made, adapter_name="first").eval()
    ours = copy.deepcopy(stock)
    hf_fastpath.patch(ours, quiet=True)
    how, seen = dict(input_ids=torch.arange(3, 12)[None], max_new_tokens=8, do_sample=False), set()
    for _ in range(3):
        for model in (stock, ours):
            for path, parameter in model.named_parameters():
                if ".first" in path:
                    parameter.data = parameter.data * -1.5 + 0.1
        expected = stock.generate(**how)
        assert torch.equal(expected, ours.generate(**how))
        seen.add(tuple(expected[0].tolist()))
    assert len(seen) > 1


def test_other_values_of_a_layer_count(monkeypatch):
    """A dict in a layer that is not by the adapters' names is no adapter's: what it holds is looked at."""
    pair = Pair()
    pair.add("b", 1)
    pair.check()
    layer = lambda model: model.base_model.model.model.layers[0].self_attn.q_proj  # noqa: E731
    pair.do(lambda model: setattr(layer(model), "notes", {}))
    pair.check()
    with counted(monkeypatch) as made:
        pair.do(lambda model: layer(model).notes.update(other=1))
        pair.check()
        assert made


def test_two_at_once(monkeypatch):
    pair = Pair()
    for seed, name in enumerate(("b", "c", "d"), 1):
        pair.add(name, seed)
    pair.do(lambda model: model.base_model.set_adapter(["first", "b"]))
    for _ in range(2):
        pair.check()
    with counted(monkeypatch) as made:
        pair.do(lambda model: model.base_model.set_adapter(["c", "d"]))
        pair.check()
        pair.do(lambda model: model.base_model.set_adapter(["d", "first"]))
        pair.check()
        assert not made


@pytest.mark.parametrize("other", (dict(rank=8), dict(use_dora=True), dict(lora_bias=True)), ids=str)
def test_another_kind_is_recorded(other, monkeypatch):
    """Another rank, DoRA or a bias is another step; once it is known, adapters of its kind need no recording."""
    pair = Pair()
    with counted(monkeypatch) as made:
        pair.add("b", 1, **other)
        for _ in range(2):
            pair.check()
        assert made
        made.clear()
        pair.add("c", 2, **other)
        pair.check()
        pair.do(lambda model: model.set_adapter("first"))
        pair.check()
        assert not made


def test_factors_that_calls_have_baked_in(monkeypatch):
    """DoRA's factor is a number in calls, so that another one is recorded."""
    pair = Pair(config(use_dora=True))
    with counted(monkeypatch) as made:
        pair.add("b", 1, use_dora=True, alpha=9)
        pair.check()
        assert made


def test_a_model_that_is_again_what_it_was_is_not_gone_through(monkeypatch):
    """Going back and forth between known adapters makes no walk through the model."""
    pair = Pair()
    for seed, name in enumerate(("b", "c"), 1):
        pair.add(name, seed)
    for name in ("first", "b", "c"):
        pair.do(lambda model, name=name: model.set_adapter(name))
        pair.check()
    walks, enter = [], Walk.enter
    monkeypatch.setattr(Walk, "enter", lambda self, model: walks.append(model) or enter(self, model))
    seen = set()
    for name in ("first", "b", "c", "b", "first", "c"):
        pair.do(lambda model, name=name: model.set_adapter(name))
        seen.add(tuple(pair.check()[0].tolist()))
    assert not walks and len(seen) == 3
    layer = lambda model: model.base_model.model.model.layers[0].self_attn.q_proj  # noqa: E731
    pair.do(lambda model: layer(model)._active_adapter.append("b"))  # in place
    pair.check()
    assert walks


def test_a_swapped_step_is_watched(monkeypatch):
    """What changes behind a swap counts: a factor, an attribute of a layer, a hook, a weight."""
    pair = Pair()
    pair.add("b", 1)
    first = pair.check()
    layer = lambda model: model.base_model.model.model.layers[0].self_attn.q_proj  # noqa: E731
    with counted(monkeypatch) as made:
        pair.do(lambda model: layer(model).scaling.update(b=7.0))
        assert not torch.equal(pair.check(), first) and not made
        pair.do(lambda model: layer(model).lora_A["b"].weight.data.mul_(-3))
        pair.check()
        assert not made
    pair.do(lambda model: setattr(model.base_model.model.model.layers[0].input_layernorm, "variance_epsilon", 0.5))
    pair.check()


def test_a_callback_swaps(monkeypatch):
    """Tokens behind a change of adapters in a call are those of the new one."""
    pair = Pair()
    pair.add("b", 1)
    with_b = pair.check()
    pair.do(lambda model: model.set_adapter("first"))

    class Swap(StoppingCriteria):
        def __init__(self, model):
            self.model, self.calls = model, 0

        def __call__(self, input_ids, scores, **others):
            self.calls += 1
            if self.calls == 3:
                self.model.set_adapter("b")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    ids, found = torch.arange(3, 12)[None], []
    with counted(monkeypatch) as made:
        for model in (pair.stock, pair.ours):
            model.set_adapter("first")
            how = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False)
            found.append(model.generate(input_ids=ids, stopping_criteria=StoppingCriteriaList([Swap(model)]), **how))
        assert torch.equal(*found) and not torch.equal(found[0], with_b) and not made
