"""What stock's and torch's own functions do to a model with quantized layers: they work, or raise a clear error before
they change anything."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import SHORT, counting, require_native
from quantized import packed_in
from test_config_edits import made
from torch import nn
from torch.nn.utils import prune

import hf_fastpath
from hf_fastpath.decode.loops.patched import paused
from hf_fastpath.linears.packed_linear import PackedLinear

#: with an untied head, a tied one, and recorded families with both
FAMILIES = ("llama", "gpt2", "glm4", "t5", "bart")


def first(model: nn.Module) -> PackedLinear:
    return next(iter(packed_in(model).values()))


def state(model: nn.Module) -> tuple:
    """Return all that a function might have changed before it raised."""
    modules = {name: (id(module), sorted(vars(module))) for name, module in model.named_modules()}
    hooks = {name: (len(each._forward_hooks), len(each._forward_pre_hooks)) for name, each in model.named_modules()}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return modules, hooks, {name: (id(t), t.shape, t.dtype, t._version) for name, t in tensors}, model.config.to_dict()


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "resize to more": (lambda m: m.resize_token_embeddings(400), "resize before patch"),
    "resize to fewer": (lambda m: m.resize_token_embeddings(50), "resize before patch"),
    "resize to a multiple": (lambda m: m.resize_token_embeddings(pad_to_multiple_of=128), "to make 1?[0-9]+ tokens"),
    "save_pretrained": (lambda m: m.save_pretrained("nowhere"), "save_packed"),
    "push_to_hub": (lambda m: m.push_to_hub("nobody/nothing"), "save_packed"),
    "load_state_dict": (lambda m: m.load_state_dict({f"{next(iter(packed_in(m)))}.weight": 0}), "would not be read"),
    "load_state_dict, not strictly": (
        lambda m: m.load_state_dict({f"{next(iter(packed_in(m)))}.weight": 0}, strict=False),
        "load before patch",
    ),
    "prune the smallest": (lambda m: prune.l1_unstructured(first(m), "weight", 0.3), "'weight_orig' of a layer"),
    "prune at random": (lambda m: prune.random_unstructured(first(m), "weight", 0.3), "quantized to int8"),
    "prune rows": (lambda m: prune.ln_structured(first(m), "weight", 0.3, n=2, dim=0), "quantized to int8"),
    "prune nothing": (lambda m: prune.identity(first(m), "weight"), "quantized to int8"),
    "prune all layers": (
        lambda m: prune.global_unstructured([(first(m), "weight")], prune.L1Unstructured, amount=0.1),
        "has quantized has no 'view'",
    ),
    "a weight": (lambda m: setattr(first(m), "weight", nn.Parameter(torch.ones(3, 3))), "'weight' of a layer"),
    "a plain weight": (lambda m: setattr(first(m), "weight", torch.ones(3, 3)), "'weight' of a layer"),
    "no weight": (lambda m: delattr(first(m), "weight"), "'weight' of a layer"),
    "its data": (lambda m: first(m).weight.data.mul_(2), "has no 'data'"),
    "a product in place": (lambda m: first(m).weight.mul_(2), "has no 'mul_'"),
    "a row": (lambda m: first(m).weight.__setitem__(0, 1), "cannot be written"),
    "numbers of a row": (lambda m: first(m).weight[0], "no rows to read"),
    "other numbers": (lambda m: nn.init.normal_(first(m).weight), "normal_\\(\\) got a weight that hf_fastpath"),
    "a copy": (lambda m: torch.empty(3).copy_(first(m).weight), "copy_\\(\\) got a weight"),
    "a product": (
        lambda m: nn.functional.linear(torch.ones(1, first(m).in_features), first(m).weight),
        "linear\\(\\) got a weight that hf_fastpath has quantized, expected a tensor",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def models() -> dict[str, tuple]:
    """Return a patched model with a quantized head of each family, the arguments of its generate(), and its tokens."""
    require_native(torch.device("cpu"))
    found = {}
    for family in FAMILIES:
        model, given = made(family)
        hf_fastpath.patch(model, weights="int8", lm_head="int8", quiet=True)
        found[family] = model, given, model.generate(**given, **SHORT)
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("family", FAMILIES)
def test_refuses_before_it_changes_anything(family, name, models):
    model, given, tokens = models[family]
    before = state(model)
    function, match = REFUSED[name]
    with pytest.raises((ValueError, AttributeError, TypeError), match=match) as caught:
        function(model)
    assert "unpatch(model)" in str(caught.value) and state(model) == before
    with counting(model) as counts:
        assert torch.equal(model.generate(**given, **SHORT), tokens)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons


def new_head(model: nn.Module) -> None:
    old = model.get_output_embeddings()
    torch.manual_seed(1)
    model.set_output_embeddings(nn.Linear(old.in_features, old.out_features, bias=False))


WORKS: dict[str, Callable[[nn.Module], Any]] = {
    "resize to as many": lambda m: m.resize_token_embeddings(m.get_input_embeddings().num_embeddings),
    "resize to nothing": lambda m: m.resize_token_embeddings(),
    "tie": lambda m: m.tie_weights(),
    "untie": lambda m: (setattr(m.config, "tie_word_embeddings", False), m.tie_weights()),
    "to the CPU": lambda m: m.to("cpu").cpu(),
    "float": lambda m: m.float(),
    "its own state": lambda m: m.load_state_dict(m.state_dict()),
    "training and back": lambda m: m.train().eval(),
    "gradients": lambda m: m.requires_grad_(True).requires_grad_(False),
    "initialization": lambda m: m.init_weights(),
    "embeddings": lambda m: m.set_input_embeddings(copy.deepcopy(m.get_input_embeddings())),
    "a new head": new_head,
    "sizes": lambda m: (m.get_memory_footprint(), m.num_parameters(), m.num_parameters(exclude_embeddings=True)),
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_works_as_stock_does_with_these_layers(family, name):
    """The tokens are those of stock's loop over the same model, and all of it can be undone."""
    require_native(torch.device("cpu"))
    model, given = made(family)
    own = dict(model.named_modules())
    hf_fastpath.patch(model, weights="int8", lm_head="int8", quiet=True)
    packed = packed_in(model)
    model.generate(**given, **SHORT)
    WORKS[name](model)
    with counting(model) as counts:
        found = model.generate(**given, **SHORT)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    with paused(model):
        assert torch.equal(found, model.generate(**given, **SHORT))
    hf_fastpath.unpatch(model)
    others = [each for each in packed if model.get_submodule(each) is not own[each]]
    assert len(others) == (name == "a new head") and not packed_in(model)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("family", FAMILIES)
def test_casts(family, dtype):
    """The quants stay; the type that the weight tells goes with the model."""
    require_native(torch.device("cpu"))
    model, given = made(family)
    hf_fastpath.patch(model, weights="int8", lm_head="int8", quiet=True)
    before = {name: layer.quants.clone() for name, layer in packed_in(model).items()}
    model.to(dtype)
    for name, layer in packed_in(model).items():
        assert torch.equal(layer.quants, before[name]) and layer.scales.dtype == torch.float16
        assert layer.weight.dtype == dtype and layer.weight.shape == (layer.out_features, layer.in_features)
        assert layer.weight.device == layer.quants.device and not isinstance(layer.weight, torch.Tensor)
    with counting(model) as counts:
        model.generate(**given, **SHORT)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    assert hf_fastpath.verify(model, given, max_new_tokens=8).ok


@pytest.mark.each_value
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", (400, 50))
def test_a_head_of_its_own_type_is_resized(family, tokens):
    """As stock does; the projections stay quantized."""
    require_native(torch.device("cpu"))
    model, given = made(family)
    hf_fastpath.patch(model, weights="int8", quiet=True)
    layers = {name: id(layer) for name, layer in packed_in(model).items()}
    model.resize_token_embeddings(tokens)
    assert {name: id(layer) for name, layer in packed_in(model).items()} == layers
    given = {name: each % tokens for name, each in given.items()}
    with counting(model) as counts:
        found = model.generate(**given, **SHORT)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons and int(found.max()) < tokens
    with paused(model):
        assert torch.equal(found, model.generate(**given, **SHORT))


@pytest.mark.parametrize("family", ("gpt2", "t5", "bart"))
def test_a_head_is_not_tied_to_another_weight(family):
    """It was made of the old embeddings."""
    require_native(torch.device("cpu"))
    model, _ = made(family)
    hf_fastpath.patch(model, weights="int8", lm_head="int8", quiet=True)
    model.set_input_embeddings(copy.deepcopy(model.get_input_embeddings()))
    with pytest.raises(ValueError, match="'weight' of a layer whose weight hf_fastpath has quantized"):
        model.tie_weights()


def test_a_part_of_the_model_refuses_weights_that_it_would_not_read():
    require_native(torch.device("cpu"))
    model, _ = made("llama")
    weights = {name: each.clone() for name, each in model.model.state_dict().items()}
    hf_fastpath.patch(model, weights="int8", quiet=True)
    with pytest.raises(RuntimeError, match=re.escape("layers.0.self_attn.q_proj.weight would not be read")):
        model.model.load_state_dict(weights, strict=False)
