"""verify() of models whose loop is stock's: it compares what is patched, or says why there is nothing to compare."""

from __future__ import annotations

import pytest
import torch
from models import build, prompt, require_native
from test_config_edits import made
from test_weights_that_are_no_tensors import quantize_dynamic
from torch import nn

import hf_fastpath
from hf_fastpath.decode.sources import steps

CPU = torch.device("cpu")


class Nibbles(nn.Module):
    """A layer that asserts the type of its weight without a text, as bitsandbytes' of four bits does."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, base.bias
        self.scale = base.weight.detach().abs().amax(1, keepdim=True) / 127
        packed = (base.weight.detach() / self.scale).round() + 128
        self.weight = nn.Parameter(packed.to(torch.uint8), requires_grad=False)

    def forward(self, x):
        assert self.weight.dtype == torch.uint8
        assert x.dtype == self.scale.dtype
        return nn.functional.linear(x, (self.weight.to(x.dtype) - 128) * self.scale, self.bias)


class Noted(nn.Parameter):
    """A weight that carries its scales, as bitsandbytes' of eight bits does."""

    CB: torch.Tensor


class OfNoted(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.CB.to(x.dtype), self.bias)


def of_noted(base: nn.Linear) -> nn.Module:
    made_of = OfNoted(base.in_features, base.out_features, bias=base.bias is not None)
    made_of.weight = Noted(torch.zeros(1, dtype=torch.int8), requires_grad=False)
    made_of.weight.CB = base.weight.detach()
    return made_of


class Lora(nn.Module):
    """Reads the weights inside without calling the layers that hold them, as DoRA does."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        weight = self.base_layer.weight + self.up.weight @ self.down.weight
        return nn.functional.linear(x, weight / weight.norm(dim=1, keepdim=True))


Lora.__module__ = "peft.tuners.lora.layer"


def replaced(make):
    def replace(model: nn.Module) -> None:
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and name.endswith(("q_proj", "down_proj")):
                parent, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(parent), attribute, make(module))

    return replace


#: what other code makes of a model, and the reason for stock's loop; none where the step is recorded
CHANGES = {
    "asserted types": (replaced(Nibbles), ""),
    "weights with attributes": (replaced(of_noted), "quantized_format"),
    "dynamic quantization": (quantize_dynamic, ""),
    "adapters": (replaced(Lora), "adapter"),
    "a hook": (lambda m: m.model.layers[0].mlp.register_forward_hook(lambda *_: None), "hooks"),
    "activation": (lambda m: setattr(m.model.layers[1].mlp, "act_fn", nn.Tanh()), ""),
}


@pytest.mark.filterwarnings("ignore:hf_fastpath:UserWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_patched_modules_are_compared(name, monkeypatch):
    require_native(CPU)
    change, reason = CHANGES[name]
    model = build("llama")
    change(model)
    parameters = dict(model.named_parameters())
    result = hf_fastpath.verify(model, prompt(CPU, 2, 20), max_new_tokens=6)
    if not reason:
        assert result.ok and not result.stock_loop
        return
    assert result.ok and result.stock_loop.startswith(reason) and result.to_dict()["stock_loop"] == result.stock_loop
    assert "the decode loop is stock's, and its patched modules are compared: " + reason in str(result)
    assert result.max_floor > 0, "the reference is no other than stock"
    assert all(each is parameters[path] for path, each in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in model.modules()), "hooks of the reference stay"
    norm = steps.norm
    monkeypatch.setattr(steps, "norm", lambda *arguments: 3 * norm(*arguments))
    wrong = hf_fastpath.verify(model, prompt(CPU, 2, 20), max_new_tokens=6)
    assert not wrong.ok and wrong.mean_error > result.mean_error


def test_a_loop_that_is_ours_is_not_spoken_of():
    require_native(CPU)
    result = hf_fastpath.verify(build("llama"), prompt(CPU), max_new_tokens=4)
    assert result.ok and result.stock_loop == "" and "stock's, and" not in str(result)


@pytest.mark.parametrize("family", ("glm4", "t5"))
def test_nothing_to_compare(family):
    """A recorded model has no patched modules, so that only its loop could be compared."""
    require_native(CPU)
    model, given = made(family)
    hf_fastpath.patch(model, quiet=True)
    linear = next(module for module in model.modules() if type(module) is nn.Linear)
    linear.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"nothing of this \w+ runs our code, so there is nothing to compare: hooks"):
        hf_fastpath.verify(model, given, max_new_tokens=4)
    hf_fastpath.unpatch(model)
    with pytest.raises(hf_fastpath.UnsupportedModelError, match="hooks"):
        hf_fastpath.verify(model, given, max_new_tokens=4)
