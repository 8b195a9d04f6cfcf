"""Modules whose ``weight`` or ``bias`` is a method, a property of another type or anything else but a tensor: they run
stock with a reason, or fast with stock's tokens."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from models import SHORT, counting, require_native
from parity import assert_same_tokens
from test_config_edits import WHEN, made
from torch import nn

import hf_fastpath
from hf_fastpath import UnsupportedModelError


class Methods(nn.Module):
    """Gives the weight of a module inside through methods, as PyTorch's dynamically quantized layers do."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside = inside

    def weight(self):
        return self.inside.weight

    def bias(self):
        return self.inside.bias

    def forward(self, *args, **kwargs):
        return self.inside(*args, **kwargs)


class Properties(Methods):
    """Has names and numbers in the place of tensors."""

    weight = property(lambda self: "packed")
    bias = property(lambda self: 0.0)


class Lists(Methods):
    """Has a list of slices in the place of its weight, and no bias at all."""

    weight = property(lambda self: list(self.inside.weight.chunk(2)))
    bias = property(lambda self: (_ for _ in ()).throw(AttributeError("bias")))


def quantize_dynamic(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and in use
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)


def replace_by(cls: type, of: type | str) -> Callable[[nn.Module], None]:
    """Return a function that replaces all modules of a class, or whose class has a word in its name."""

    def replace(model: nn.Module) -> None:
        for name, module in list(model.named_modules()):
            fits = isinstance(module, of) if isinstance(of, type) else of in type(module).__name__.lower()
            if fits and not isinstance(module, Methods):
                parent, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(parent), attribute, cls(module))

    return replace


CHANGES = {
    "quantize_dynamic": quantize_dynamic,
    "linear layers with methods": replace_by(Methods, nn.Linear),
    "linear layers with properties": replace_by(Properties, nn.Linear),
    "linear layers with lists": replace_by(Lists, nn.Linear),
    "norms with methods": replace_by(Methods, "norm"),
    "embeddings with methods": replace_by(Methods, nn.Embedding),
    "activations with properties": replace_by(Properties, "activation"),
}
#: what may be said of each
REASONS = {
    "quantized_format",
    "unsupported_projection",
    "class_not_supported",
    "unsupported_activation",
    "partial_patch",
}


def runs(model: nn.Module, given: dict) -> torch.Tensor | None:
    """Return stock's tokens, or None if the model's own code reads what has no tensor there."""
    try:
        return model.generate(**given, **SHORT)
    except (AttributeError, TypeError):
        return None


def cases() -> list[tuple[str, str, str]]:
    """Return every change of every family: of two families at every time, of the others at one."""
    found = [(family, change, when) for family in ("llama", "glm4") for change in CHANGES for when in WHEN]
    others = ((family, change) for family in ("gpt2", "mixtral", "t5", "bart") for change in CHANGES)
    return found + [(*each, WHEN[place % len(WHEN)]) for place, each in enumerate(others)]


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore:hf_fastpath:UserWarning")
@pytest.mark.parametrize(("family", "change", "when"), cases())
def test_what_is_no_tensor_is_not_read(family, change, when):
    require_native(torch.device("cpu"))
    stock, given = made(family)
    ours = copy.deepcopy(stock)
    CHANGES[change](stock)
    expected = runs(stock, given)
    if expected is None:
        pytest.skip(f"{family}'s own code reads the weight")
    if when != "before_patch":
        hf_fastpath.patch(ours, quiet=True)
    if when == "after_generate":
        ours.generate(**given, **SHORT)
    CHANGES[change](ours)
    try:
        hf_fastpath.patch(ours, quiet=True)
    except UnsupportedModelError as error:
        assert when == "before_patch" and any(code in str(error) for code in REASONS), error
        assert_same_tokens(ours.generate(**given, **SHORT), expected, stock)
        return
    with counting(ours) as counts:
        found = ours.generate(**given, **SHORT)
    assert_same_tokens(found, expected, stock)
    assert counts.fast or counts.reasons and set(counts.reasons) <= REASONS, counts.reasons
    report = hf_fastpath.report(ours)
    assert (report.loop == "fast") == bool(counts.fast) and report.loop in {"fast", *REASONS}, report
    if counts.fast or report.patched:
        assert hf_fastpath.verify(ours, given, max_new_tokens=4).ok
    else:
        with pytest.raises(ValueError, match=f"nothing to compare: {report.loop}"):
            hf_fastpath.verify(ours, given, max_new_tokens=4)


@pytest.mark.parametrize("family", ("llama", "gpt2"))
@pytest.mark.parametrize("name", ("weight", "bias"))
def test_a_norm_whose_own_weight_is_no_tensor(family, name):
    """The class is the family's, so that only what is in it tells."""
    require_native(torch.device("cpu"))
    stock, given = made(family)
    if name == "bias" and family == "llama":
        pytest.skip("it has no bias")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    norm = next(module for module in ours.modules() if "norm" in type(module).__name__.lower())
    del norm._parameters[name]
    setattr(norm, name, 1.0)
    report = hf_fastpath.report(ours)
    if (family, name) == ("llama", "weight"):  # whose norm multiplies by whatever it is: the step is recorded
        stocks = next(module for module in stock.modules() if "norm" in type(module).__name__.lower())
        del stocks._parameters[name]
        setattr(stocks, name, 1.0)
        assert_same_tokens(ours.generate(**given, **SHORT), stock.generate(**given, **SHORT), stock)
        assert report.loop == "fast"
        return
    assert report.loop == "unsupported_projection" and "is no tensor, it is a float" in str(report)


def test_a_plain_tensor_is_no_parameter_of_a_projection(device):
    """Other code computes it at every call, and notes nothing if it changes: a recorded step reads it live."""
    require_native(device)
    stock, given = made("llama")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    for model in (stock, ours):
        linear = model.model.layers[1].mlp.down_proj
        weight = linear._parameters.pop("weight").detach()
        linear.weight = 2 * weight
    with counting(ours) as counts:
        found = ours.generate(**given, **SHORT)
    assert_same_tokens(found, stock.generate(**given, **SHORT), stock)
    assert counts.fast and not counts.fallback and not counts.reasons
    for model in (stock, ours):
        model.model.layers[1].mlp.down_proj.weight.mul_(-1)
    assert_same_tokens(ours.generate(**given, **SHORT), stock.generate(**given, **SHORT), stock)
