"""``generate(adapter_names=)``: rows of one batch with adapters of their own, in our loop."""

from __future__ import annotations

import copy
import hashlib

import pytest
import torch
from causal_lm_types import small_model
from models import CPU, build, require_native
from torch import nn
from transformers import LogitsProcessorList

import hf_fastpath
from hf_fastpath.patching.state import state_of
from hf_fastpath.recording import whole_step

peft = pytest.importorskip("peft")
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
HOW = dict(max_new_tokens=7, min_new_tokens=7, do_sample=False)


def config(rank: int = 4, **options):
    return peft.LoraConfig(**dict(r=rank, lora_alpha=2 * rank, target_modules=TARGETS) | options)


def draw(model: nn.Module) -> None:
    """Give adapters weights that change tokens."""
    generator = torch.Generator().manual_seed(0)
    for path, parameter in model.named_parameters():
        if "lora_" in path:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


class Pair:
    """A small model with adapters, stock and patched, to which the same is done."""

    def __init__(self, model: nn.Module | None = None, adapters: dict | None = None, device=CPU, **options):
        require_native(device)
        known = (
            {"a": config(), "b": config(8), "c": config(3, target_modules=TARGETS[:3])}
            if adapters is None
            else adapters
        )
        (first, how), *others = known.items()
        self.stock = peft.get_peft_model(build("llama") if model is None else model, how, adapter_name=first)
        for name, each in others:
            self.stock.add_adapter(name, each)
        draw(self.stock)
        self.stock.to(device).eval()
        self.ours = copy.deepcopy(self.stock)
        hf_fastpath.patch(self.ours, quiet=True, **options)
        self.stats = state_of(self.ours.get_base_model()).stats

    def ids(self, rows: int) -> torch.Tensor:
        return (torch.arange(3, 12)[None] + 5 * torch.arange(rows)[:, None]).to(self.stock.device)

    def both(self, names, **how) -> list[torch.Tensor]:
        self.stats.reasons.clear()
        self.stats.fallback_tokens = self.stats.fast_tokens = 0
        found = []
        for model in (self.stock, self.ours):
            torch.manual_seed(5)
            found.append(model.generate(input_ids=self.ids(len(names)), adapter_names=list(names), **HOW | how))
        return found

    def check(self, names, **how) -> torch.Tensor:
        expected, found = self.both(names, **how)
        assert torch.equal(expected, found), names
        assert self.stats.fast_tokens and not self.stats.fallback_tokens and not self.stats.reasons, self.stats.reasons
        return found


def test_rows_have_their_adapters(device, monkeypatch):
    """Adapters of other ranks and layers, and rows with none: what is recorded once serves every mixture of names."""
    pair = Pair(device=device)
    first = pair.check(["a", "b", "__base__", "c"])
    made, record = [], whole_step.record
    monkeypatch.setattr(whole_step, "record", lambda *given, **named: made.append(given) or record(*given, **named))
    seen = {tuple(row) for row in first.tolist()}
    for names in (["c", "a", "b", "__base__"], ["a"] * 4, ["__base__"] * 4, ["b", "b", "c", "c"]):
        found = pair.check(names)
        seen |= {tuple(row) for row in found.tolist()}
    assert not made and len(seen) > 10, "the adapters are hardly different"


def test_rows_are_those_of_the_adapter_alone(device):
    pair, names = Pair(device=device), ["b", "__base__", "a", "c"]
    found = pair.check(names)
    for row, name in enumerate(names):
        pair.ours.set_adapter("a" if name == "__base__" else name)
        ids = pair.ids(4)[row : row + 1]
        if name == "__base__":
            with pair.ours.disable_adapter():
                alone = pair.ours.generate(input_ids=ids, **HOW)
        else:
            alone = pair.ours.generate(input_ids=ids, **HOW)
        assert torch.equal(alone[0], found[row]), name


@pytest.mark.parametrize("rows", (1, 3, 8, 20))
def test_other_batches(rows, device):
    """Also more rows than the ops of adapters take."""
    pair = Pair(device=device)
    pair.check([("a", "b", "c", "__base__")[row % 4] for row in range(rows)])


@pytest.mark.parametrize("how", (dict(do_sample=True), dict(do_sample=True, top_k=9, temperature=0.8)), ids=str)
def test_samples(how, device):
    Pair(device=device).check(["a", "c", "b"], **how)


def gpt2():
    return build("gpt2"), {
        name: config(rank, target_modules=["c_attn", "c_proj"]) for name, rank in (("a", 4), ("b", 8))
    }


def glm4():
    targets = ["q_proj", "k_proj", "o_proj", "down_proj"]
    return small_model("glm4"), {name: config(rank, target_modules=targets) for name, rank in (("a", 4), ("b", 8))}


def many():
    return build("llama"), {name: config(2 + number % 3) for number, name in enumerate("abcdefghij")}


@pytest.mark.parametrize("make", (gpt2, glm4, many), ids=lambda made: made.__name__)
def test_other_models_and_many_adapters(make):
    model, adapters = make()
    pair = Pair(model, adapters)
    pair.check([*list(adapters)[:8], "__base__"])
    pair.check([*list(adapters)[-3:], "__base__"])


def test_quantized_weights_below():
    """The rows of a model whose own weights are quantized are those of each adapter alone."""
    pair, names = Pair(weights="int8"), ["a", "b", "c"]
    _, found = pair.both(names)
    assert not pair.stats.fallback_tokens and not pair.stats.reasons, pair.stats.reasons
    for row, name in enumerate(names):
        pair.ours.set_adapter(name)
        assert torch.equal(pair.ours.generate(input_ids=pair.ids(3)[row : row + 1], **HOW)[0], found[row])


def test_the_model_is_left_as_it_was(device):
    """Hooks and active adapters are PEFT's again behind a call, and behind one that breaks off; later calls go on."""
    pair = Pair(device=device)
    pair.ours.set_adapter("b")
    pair.stock.set_adapter("b")
    alone = pair.ours.generate(input_ids=pair.ids(2), **HOW)
    layer = pair.ours.base_model.model.model.layers[0].self_attn.q_proj

    def fail(ids, scores):
        raise KeyError("on purpose")

    pair.check(["a", "c"])
    assert layer.active_adapters == ["b"] and not layer._forward_pre_hooks and not layer._forward_pre_hooks_with_kwargs
    assert torch.equal(pair.ours.generate(input_ids=pair.ids(2), **HOW), alone)
    for model in (pair.stock, pair.ours):
        with pytest.raises(KeyError, match="on purpose"):
            given = dict(adapter_names=["a", "c"], logits_processor=LogitsProcessorList([fail]))
            model.generate(input_ids=pair.ids(2), **HOW, **given)
    assert layer.active_adapters == ["b"]
    left = [len(each._forward_pre_hooks) for each in pair.stock.modules()]
    assert [len(each._forward_pre_hooks) for each in pair.ours.modules()] == left and sum(left)  # PEFT leaves its own
    pair.check(["c", "b"])  # the newest hook counts


def test_callbacks_change_weights(device):
    """``lora_A.data`` that a callback edits is read with the next token, and base weights stay bit for bit."""
    pair = Pair(device=device)
    plain = pair.check(["a", "b", "__base__"])
    found, sums = [], []
    for model in (pair.stock, pair.ours):
        model = copy.deepcopy(model)
        layers = [each for each in model.modules() if hasattr(each, "lora_A")]
        calls: list[int] = []

        def edit(ids, scores, layers=layers, calls=calls):
            calls.append(1)
            if len(calls) == 3:
                for layer in layers:
                    layer.lora_A["b"].weight.data = -2 * layer.lora_A["b"].weight.data
            elif len(calls) == 5:
                for layer in layers:
                    layer.lora_A["a"].weight.data.mul_(-3)
            data = (each.base_layer.weight.detach().cpu().numpy().tobytes() for each in layers)
            sums.append(hashlib.sha256(b"".join(data)).hexdigest())
            return scores

        given = dict(adapter_names=["a", "b", "__base__"], logits_processor=LogitsProcessorList([edit]))
        found.append(model.generate(input_ids=pair.ids(3), **HOW, **given))
    assert torch.equal(*found) and not torch.equal(found[0], plain)
    assert torch.equal(found[0][2], plain[2]) and len(set(sums)) == 1 and len(sums) == 14


def test_share_steps_and_prefixes(device):
    """Such calls share no steps, and leave nothing to calls that begin alike."""
    pair = Pair(device=device, share_steps=True, prefix_cache="16MB")
    expected, found = pair.both(["a", "b"])
    assert torch.equal(expected, found) and set(pair.stats.reasons) == {"not_shared"} and not pair.stats.fallback_tokens
    expected, found = pair.both(["b", "a"])
    assert torch.equal(expected, found)
    for model in (pair.stock, pair.ours):
        model.base_model.set_adapter(["a", "b", "c"])
    assert torch.equal(*(model.generate(input_ids=pair.ids(2), **HOW) for model in (pair.stock, pair.ours)))


def with_bias():
    return {"a": config(), "b": config(lora_bias=True)}


def of_embedding():
    return {"a": config(), "b": config(target_modules=[*TARGETS, "embed_tokens"])}


@pytest.mark.parametrize(
    ("adapters", "how"),
    ((None, dict(num_beams=2)), (None, dict(prompt_lookup_num_tokens=2)), (with_bias, {}), (of_embedding, {})),
    ids=("beams", "drafts", "bias", "embedding"),
)
def test_what_stock_code_serves(adapters, how):
    """A reason says so where an adapter is more than LoRA beside a product, and in other loops."""
    pair = Pair(adapters=None if adapters is None else adapters())
    expected, found = pair.both(["a"] if "prompt_lookup_num_tokens" in how else ["a", "b"], **how)
    assert torch.equal(expected, found)
    assert set(pair.stats.reasons) == {"adapter_names"}, pair.stats.reasons
    if adapters is not None:
        pair.check(["a", "__base__"])  # the other one is loaded, and nobody's
        pair.both(["a", "b"])
    assert "set_adapter(name)" in str(hf_fastpath.report(pair.ours))
    pair.ours.set_adapter("a")
    pair.stock.set_adapter("a")
    assert torch.equal(*(model.generate(input_ids=pair.ids(2), **HOW) for model in (pair.stock, pair.ours)))


def test_errors_are_pefts():
    pair = Pair()
    pair.check(["a", "b"])
    for names, message in (
        (["a"], "Length of `adapter_names` should be the same"),
        (["a", "x"], "non-existing adapter"),
    ):
        with pytest.raises(ValueError, match=message):
            pair.ours.generate(input_ids=pair.ids(2), adapter_names=names, **HOW)
    pair.check(["b", "a"])
    handle = pair.ours.base_model.model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    expected, found = pair.both(["a", "b"])
    assert torch.equal(expected, found) and set(pair.stats.reasons) == {"hooks"}
    handle.remove()
