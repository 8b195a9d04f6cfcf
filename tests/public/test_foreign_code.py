"""Hooks, adapters and other people's forwards inside a patched model are honored."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from models import SHORT, build, counting, fresh, left_padded, over_architectures, prompt, require_native
from parity import assert_same_tokens
from torch import nn

import hf_fastpath
from hf_fastpath import FallbackError


def decode_modules(model: nn.Module) -> list[str]:
    """Names of the modules that stock calls once a token in generate()."""
    called: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, module in model.named_modules()
    ]
    model.generate(prompt(model.device), max_new_tokens=3, do_sample=False)
    for handle in handles:
        handle.remove()
    return [name for name in dict.fromkeys(called) if called.count(name) == 3]


@over_architectures
@pytest.mark.parametrize("kind", ("forward_hook", "forward_pre_hook", "instance_forward", "replaced"))
def test_every_child_may_have_a_life_of_its_own(kind, architecture, device):
    """A hook, a forward on the instance, another module in its place: honored on each module in turn.

    Each doubles what goes through it, and counts its calls; tokens and counts are stock's.
    """
    stock, ours = fresh(architecture, device)
    names, wrong = decode_modules(stock), []
    names = [name for name in names if ".1" not in name]  # the second layer is as the first
    assert len(names) > 12
    for name in names:
        ours.generate(prompt(device), max_new_tokens=2, do_sample=False)  # a plan without it exists
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
            except Exception as error:  # an error on both is stock's own
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


class Replacement(nn.Module):
    """Another module in the place of one: forwards to it, doubles the result."""

    def __init__(self, inner: nn.Module, calls: list[int]):
        super().__init__()
        self.inner, self.calls = inner, calls

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args, **kwargs):
        self.calls.append(1)
        return _doubled(self.inner(*args, **kwargs))


def _interfere(model: nn.Module, name: str, kind: str, calls: list[int]):
    """Make the module double its result (or its input); returns what undoes that."""
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

        # the arguments' names stay visible, as transformers looks at them
        forward.__signature__ = inspect.signature(before)
        module.forward = forward
        if held is None:
            return lambda: vars(module).pop("forward")
        return lambda: setattr(module, "forward", held)
    if not name or name in ("model", "transformer"):
        return lambda: None  # without these it is another model
    parent, _, attribute = name.rpartition(".")
    owner = model.get_submodule(parent)
    replacement = Replacement(module, calls)
    setattr(owner, attribute, replacement)
    return lambda: setattr(owner, attribute, module)


class LoraLinear(nn.Linear):
    """As PEFT does it: a subclass whose ``weight`` is the base weight, with a low-rank addition."""

    def __init__(self, base: nn.Linear):
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        generator = torch.Generator().manual_seed(0)
        self.down = nn.Parameter(torch.randn(4, base.in_features, generator=generator).to(base.weight) * 0.2)
        self.up = nn.Parameter(torch.randn(base.out_features, 4, generator=generator).to(base.weight) * 0.2)

    def forward(self, x):
        return super().forward(x) + (x @ self.down.T) @ self.up.T


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
    assert counts.reasons["unsupported_projection"] and not counts.fast
    with pytest.raises(FallbackError, match="unsupported_projection"):
        hf_fastpath.unpatch(ours)
        hf_fastpath.patch(ours, strict=True, quiet=True).generate(prompt(device), **SHORT)


def test_accelerate_hooks_are_respected(device):
    """A module under an accelerate hook keeps it: the hook runs around our forward."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

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
