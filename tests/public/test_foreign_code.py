"""Hooks, adapters and other people's forwards inside a patched model are honored."""

from __future__ import annotations

import copy
import functools
import inspect
import types

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from models import SHORT, build, counting, fresh, left_padded, over_architectures, prompt, require_native
from parity import assert_equal_generation, assert_same_tokens
from torch import nn
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.utils import ModelOutput

import hf_fastpath
from hf_fastpath.compat import CACHE


def decode_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that stock calls once for each token in generate()."""
    called: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, module in model.named_modules()
    ]
    model.generate(prompt(model.device), max_new_tokens=3, do_sample=False)
    for handle in handles:
        handle.remove()
    return [name for name in dict.fromkeys(called) if called.count(name) == 3]


@pytest.mark.each_value
@over_architectures
@pytest.mark.parametrize("kind", ("forward_hook", "forward_pre_hook", "instance_forward", "replaced", "opaque"))
def test_every_child_may_have_a_life_of_its_own(kind, architecture, device):
    """A hook, a forward on the instance, and another module in its place are honored on each module in turn.

    Each of these doubles what goes through it, and counts its calls; tokens and counts are stock's.
    """
    stock, ours = fresh(architecture, device)
    names, wrong = decode_modules(stock), []
    names = [name for name in names if ".1" not in name]  # the second layer is like the first
    assert len(names) > 12
    for name in names:
        ours.generate(prompt(device), max_new_tokens=2, do_sample=False)  # so that a plan without the change exists
        results = []
        for model in (ours, stock):
            calls: list[int] = []
            undo = _interfere(model, name, kind, calls)
            try:
                results.append(
                    (
                        model.generate(prompt(device, 2), max_new_tokens=5, do_sample=False).tolist(),
                        len(calls),
                    )
                )
            except Exception as error:  # an error on both sides is stock's own
                results.append((type(error).__name__, 0))
            finally:
                undo()
        if results[0] != results[1]:
            wrong.append(f"{name or 'the model'} ({results[0][1]} calls, stock {results[1][1]})")
    assert not wrong, "ignored: " + ", ".join(wrong)


def _doubled(value):
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value * 2
    return type(value)(map(_doubled, value)) if type(value) in (tuple, list) else value


class Opaque(nn.Module):
    """A module in the place of another one: it runs that one, doubles the result, and has no other attribute of it."""

    def __init__(self, inner: nn.Module, calls: list[int]):
        super().__init__()
        self.inner, self.calls = inner, calls

    def forward(self, *args, **kwargs):
        self.calls.append(1)
        return _doubled(self.inner(*args, **kwargs))


class Replacement(Opaque):
    """An opaque module that also has the attributes of the module it replaces."""

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def _interfere(model: nn.Module, name: str, kind: str, calls: list[int]):
    """Make the module double its result (or its input); return a function that undoes that."""
    module = model.get_submodule(name)
    if kind == "forward_hook":
        return module.register_forward_hook(lambda m, a, out: (calls.append(1), _doubled(out))[1]).remove
    if kind == "forward_pre_hook":
        hook = module.register_forward_pre_hook(lambda m, args: (calls.append(1), _doubled(args))[1])
        return hook.remove
    if kind == "instance_forward":
        held, before = vars(module).get("forward"), module.forward

        def forward(*args, **kwargs):
            calls.append(1)
            return _doubled(before(*args, **kwargs))

        # the names of the arguments stay visible, because transformers looks at them
        forward.__signature__ = inspect.signature(before)
        module.forward = forward
        if held is None:
            return lambda: vars(module).pop("forward")
        return lambda: setattr(module, "forward", held)
    if not name or name in ("model", "transformer"):
        return lambda: None  # without these parameters the model is another one
    parent, _, attribute = name.rpartition(".")
    owner = model.get_submodule(parent)
    replacement = (Opaque if kind == "opaque" else Replacement)(module, calls)
    setattr(owner, attribute, replacement)
    return lambda: setattr(owner, attribute, module)


OPAQUE = {
    "llama": ("model", "model.embed_tokens", "model.layers.1", "model.layers.1.self_attn", "model.layers.1.mlp"),
    "gpt2": ("transformer", "transformer.h.1", "transformer.h.1.attn", "transformer.h.1.mlp", "transformer.drop"),
    "mixtral": ("model.layers.1.mlp", "model.layers.1.mlp.gate", "model.layers.1.mlp.experts"),
}


@pytest.mark.each_value
@torch.no_grad()
@pytest.mark.parametrize("when", ("before_patch", "after_generate"))
@pytest.mark.parametrize(("architecture", "name"), [(a, name) for a, names in OPAQUE.items() for name in names])
def test_module_in_the_place_of_one(architecture, name, when, device):
    """As in ablations, nothing that our code looks up is there; generate() and a user's loop run over either cache."""
    stock, ours = fresh(architecture, device)
    ours.generate(prompt(device), max_new_tokens=2, do_sample=False)
    if when == "before_patch":
        hf_fastpath.unpatch(ours)
    for model in (stock, ours):
        model.set_submodule(name, Opaque(model.get_submodule(name), []))
    hf_fastpath.patch(ours, quiet=True)
    assert hf_fastpath.report(ours).loop != "fast"
    assert_equal_generation(ours, stock, fast=False)
    ids = prompt(device, 2, 9)
    expected = stock(ids).logits[:, -1]
    for cache in (DynamicCache(config=ours.config), hf_fastpath.FastpathCache(ours.config)):
        found = [ours(part, **{CACHE: cache}).logits[:, -1] for part in ids.split((8, 1), dim=1)]
        torch.testing.assert_close(found[1], expected, rtol=1e-4, atol=1e-4)


class LoraLinear(nn.Linear):
    """A subclass whose ``weight`` is the base weight, with a low-rank addition, as in PEFT."""

    def __init__(self, base: nn.Linear):
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        generator = torch.Generator().manual_seed(0)
        self.down = nn.Parameter(torch.randn(4, base.in_features, generator=generator).to(base.weight) * 0.2)
        self.up = nn.Parameter(torch.randn(base.out_features, 4, generator=generator).to(base.weight) * 0.2)

    def forward(self, x):
        return super().forward(x) + (x @ self.down.T) @ self.up.T


@pytest.mark.each_value
@pytest.mark.parametrize("when", ("before_patch", "after_patch", "after_generate"))
@pytest.mark.parametrize("target", ("q_proj", "o_proj", "up_proj", "down_proj", "lm_head"))
def test_lora_like_projection(target, when, device):
    require_native(device)
    stock = build("llama").to(device)
    plain = stock.generate(prompt(device), **SHORT)
    ours = copy.deepcopy(stock)
    if when != "before_patch":
        hf_fastpath.patch(ours, quiet=True)
    if when == "after_generate":
        ours.generate(prompt(device), **SHORT)
    for model in (stock, ours):
        for name, module in list(model.named_modules()):
            if name.endswith(target):
                setattr(model.get_submodule(name.rpartition(".")[0]), target, LoraLinear(module))
    if when == "before_patch":
        hf_fastpath.patch(ours, quiet=True)
    expected = stock.generate(prompt(device), **SHORT)
    assert not torch.equal(expected, plain), "the adapter changes nothing, so the test shows nothing"
    with counting(ours) as counts:
        found = ours.generate(prompt(device), **SHORT)
    assert_same_tokens(found, expected, stock)
    assert counts.fast == 12 and not counts.fallback and not counts.reasons  # the step is recorded
    hf_fastpath.unpatch(ours)
    assert_same_tokens(hf_fastpath.patch(ours, strict=True, quiet=True).generate(prompt(device), **SHORT), expected)


# ---- code that other packages put on classes and in transformers' tables --------------------------------------


def replaced_forward(real, wraps: bool):
    """Make a forward for a class that changes the result; ``wraps`` makes it look like the original."""

    def forward(self, *args, **kwargs):
        out = real(self, *args, **kwargs)
        if not isinstance(out, ModelOutput):
            return _doubled(out)
        out[next(iter(out))] = out[0].roll(1, -1)
        return out

    return functools.wraps(real)(forward) if wraps else forward


@pytest.mark.each_pair
@pytest.mark.parametrize("wraps", (False, True))
@pytest.mark.parametrize("when", ("before_patch", "after_generate"))
@pytest.mark.parametrize(
    "name", ("LlamaMLP", "LlamaRMSNorm", "LlamaAttention", "LlamaDecoderLayer", "LlamaModel", "LlamaForCausalLM")
)
def test_replaced_forward_of_a_class(name, when, wraps, monkeypatch, device):
    stock, ours = fresh("llama", device)
    inputs = left_padded(device, 2)
    plain = ours.generate(**inputs, **SHORT)
    if when == "before_patch":
        hf_fastpath.unpatch(ours)
    cls = getattr(modeling_llama, name)
    monkeypatch.setattr(cls, "forward", replaced_forward(cls.forward, wraps))
    hf_fastpath.patch(ours, quiet=True)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **SHORT)
    expected = stock.generate(**inputs, **SHORT)
    assert counts.reasons["class_forward"] and not counts.fast, counts.reasons
    assert not torch.equal(expected, plain), "the other forward changes nothing, so the test shows nothing"
    assert torch.equal(found, expected)
    monkeypatch.undo()
    with counting(ours) as counts:
        assert torch.equal(ours.generate(**inputs, **SHORT), plain)
    assert counts.fast == 24


class RolledDecoder(modeling_llama.LlamaModel):
    """A decoder of the user's own in place of transformers'."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state.roll(1, -1)
        return out


@pytest.mark.parametrize("when", ("before_patch", "after_patch"))
def test_class_of_the_users_own(when, device):
    stock, ours = fresh("llama", device)
    if when == "before_patch":
        hf_fastpath.unpatch(ours)
    stock.model.__class__ = ours.model.__class__ = RolledDecoder
    hf_fastpath.patch(ours, quiet=True)
    with counting(ours) as counts:
        assert_equal_generation(ours, stock, fast=False)
    assert counts.reasons["class_forward"], counts.reasons


@pytest.mark.parametrize("name", ("apply_rotary_pos_emb", "eager_attention_forward"))
def test_replaced_function_of_a_module(name, monkeypatch, device):
    """Functions that a patched class calls by name are looked at as well."""
    require_native(device)
    stock = build("llama", attn_implementation="eager").to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    plain, real = ours.generate(prompt(device), **SHORT), getattr(modeling_llama, name)

    def doubled(*args, **kwargs):
        first, second = real(*args, **kwargs)
        return first * 2, second

    monkeypatch.setattr(modeling_llama, name, doubled)
    with counting(ours) as counts:
        found = ours.generate(prompt(device), **SHORT)
    assert counts.reasons and not counts.fast
    expected = stock.generate(prompt(device), **SHORT)
    assert torch.equal(found, expected) and not torch.equal(expected, plain)


@pytest.mark.parametrize("name", ("of_my_own", "sdpa"))
def test_users_attention_function(name, monkeypatch, device):
    """The function has a name of its own, or takes the place of one of transformers'."""

    def doubled(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value * 2, attention_mask, **kwargs)

    stock, ours = fresh("mistral", device)
    plain = ours.generate(prompt(device, 2), **SHORT)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, doubled)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, sdpa_mask)
    for model in (stock, ours):
        model.set_attn_implementation(name)
    with counting(ours) as counts:
        found = ours.generate(prompt(device, 2), **SHORT)
    expected = stock.generate(prompt(device, 2), **SHORT)
    assert counts.reasons == {"attention_function": 1} and not counts.fast
    assert torch.equal(found, expected) and not torch.equal(expected, plain)


def test_attention_functions_of_transformers_are_fast(device):
    for name in ("eager", "sdpa"):
        stock, ours = fresh("mistral", device, attn_implementation=name)
        assert_equal_generation(ours, stock)


@pytest.mark.parametrize("name", ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"))
@pytest.mark.parametrize("place", ("instance", "class"))
def test_overridden_method_of_generate(place, name, monkeypatch, device):
    """A method that steps between generate() and the forward is called for every token, as in stock; one that gives a
    token's inputs leaves the call fast, as long as it gives no more."""
    stock, ours = fresh("llama", device)
    real, calls = getattr(type(stock), name), []

    def override(self, *args, **kwargs):
        calls.append(1)
        return real(self, *args, **kwargs)

    override = functools.wraps(real)(override)
    made = []
    if place == "class":
        monkeypatch.setattr(type(stock), name, override)
    for model in (ours, stock):
        if place == "instance":
            setattr(model, name, types.MethodType(override, model))
        with counting(ours) as counts:
            tokens = model.generate(prompt(device), return_dict_in_generate=True, **SHORT)
        is_fast = model is ours and name == "prepare_inputs_for_generation"
        assert (model is ours and not is_fast) == bool(counts.reasons["generation_method"])
        assert counts.fast == (SHORT["max_new_tokens"] if is_fast else 0)
        made.append((tokens.sequences.tolist(), None if is_fast else type(tokens[CACHE]), len(calls)))
        calls.clear()
    if name == "prepare_inputs_for_generation":
        made[1] = (made[1][0], None, made[1][2])
    assert made[0] == made[1] and made[0][2] >= 12
    if place == "instance":
        setattr(ours, name, types.MethodType(real, ours))  # PEFT leaves it so
        with counting(ours) as counts:
            ours.generate(prompt(device), **SHORT)
        assert counts.fast == 12


# ---- accelerate ----------------------------------------------------------------------------------------------


def test_accelerate_hooks_are_respected(device):
    """A module under an accelerate hook keeps the hook, which runs around our forward."""
    require_native(device)
    stock, calls = build("llama").to(device), []
    ours = copy.deepcopy(stock)

    class Count(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(1)
            return args, kwargs

    for name in ("self_attn", "mlp"):
        add_hook_to_module(getattr(ours.model.layers[0], name), Count())
    hf_fastpath.patch(ours, quiet=True)
    inputs = left_padded(device, 2)
    found = ours.generate(**inputs, **SHORT)
    assert_same_tokens(found, stock.generate(**inputs, **SHORT), stock, inputs["attention_mask"])
    assert len(calls) == 24, f"the hooks ran {len(calls)} times in 12 steps"
    hf_fastpath.unpatch(ours)
    for name in ("self_attn", "mlp"):
        remove_hook_from_module(getattr(ours.model.layers[0], name))
    assert_same_tokens(ours.generate(**inputs, **SHORT), found)


@pytest.mark.parametrize("hooks_come", ("before_patch", "after_patch"))
@pytest.mark.parametrize("hooks_go", ("before_unpatch", "after_unpatch"))
def test_accelerate_hooks_come_and_go_in_any_order(hooks_come, hooks_go, device):
    """In the end the modules hold nothing of ours, and the model is stock's."""
    require_native(device)
    stock = build("llama").to(device)
    expected, ours = stock.generate(prompt(device), **SHORT), copy.deepcopy(stock)
    add = [lambda: add_hook_to_module(ours.model.layers[0], ModelHook()), lambda: hf_fastpath.patch(ours, quiet=True)]
    remove = [lambda: remove_hook_from_module(ours.model.layers[0]), lambda: hf_fastpath.unpatch(ours)]
    steps = [*(add if hooks_come == "before_patch" else add[::-1])]
    steps += [*(remove if hooks_go == "before_unpatch" else remove[::-1])]
    for step in steps:
        step()
        assert_same_tokens(ours.generate(prompt(device), **SHORT), expected, stock)
    for module in ours.modules():
        assert not [name for name in vars(module) if name.startswith("_hf_")]
        functions = (getattr(value, "__func__", None) for value in vars(module).values())
        assert not any(getattr(f, "__module__", "").startswith("hf_fastpath") for f in functions if f)


def test_forward_that_others_wrapped_outlives_unpatch(device):
    """Somebody keeps our bound forward inside their own forward: after unpatch() it runs stock's."""
    stock, ours = fresh("llama", device)
    mlp = ours.model.layers[0].mlp
    held = mlp.forward
    mlp.forward = lambda hidden_states: held(hidden_states) * 1.0
    hf_fastpath.unpatch(ours)
    x = torch.randn(1, 5, 112, device=device)
    with torch.no_grad():
        assert torch.equal(mlp(x), stock.model.layers[0].mlp(x))
