"""Modes of PyTorch's and replaced functions: stock obeys them, and so does a patched model."""

from __future__ import annotations

import math

import pytest
import torch
from causal_lm_types import small_model
from models import CPU, SHORT, build, counting, fresh, prompt
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import hf_fastpath
from hf_fastpath import compat

functional = nn.functional


class Quantizing(TorchFunctionMode):
    """Emulates quantized products, as people try formats out."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        return (out * 4).round() / 4 if func is functional.linear else out


class Noisy(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        return -out if func in (torch.ops.aten.silu.default, torch.ops.aten.gelu.default) else out


def pair(kind: str) -> tuple:
    """Return (stock, patched) of a listed or a recorded family."""
    if kind == "llama":
        return fresh(kind, CPU)
    return small_model(kind), hf_fastpath.patch(small_model(kind), quiet=True)


def tokens(model) -> list[int]:
    return model.generate(prompt(CPU) % 150 + 3, **SHORT)[0].tolist()


def assert_obeyed(stock, ours, reason: str, plain: list[int] | None) -> None:
    with counting(ours) as counts:
        expected = tokens(stock)
        assert tokens(ours) == expected
    assert counts.reasons[reason] and not counts.fast, counts
    assert plain is None or expected != plain, "stock gives the same without it, so the test shows nothing"


def assert_fast(ours, plain: list[int]) -> None:
    with counting(ours) as counts:
        assert tokens(ours) == plain
    assert counts.fast and not counts.reasons, counts.reasons


@pytest.mark.parametrize("kind", ("llama", "glm4"))
@pytest.mark.parametrize("mode", (Quantizing, Noisy))
def test_modes_are_obeyed(mode, kind):
    stock, ours = pair(kind)
    plain = tokens(ours)
    with mode():
        assert_obeyed(stock, ours, "torch_mode", plain)
        assert hf_fastpath.report(ours).loop == "torch_mode"
    assert_fast(ours, plain)
    with mode():  # patch() itself looks past the mode
        again = hf_fastpath.patch(hf_fastpath.unpatch(ours), quiet=True)
    assert tokens(again) == plain


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ("llama", "glm4"))
@pytest.mark.parametrize(
    "harmless",
    (lambda: torch.device("cpu"), lambda: FlopCounterMode(display=False), lambda: torch.profiler.profile()),
    ids=("device", "flops", "profiler"),
)
def test_modes_without_effect_are_none(harmless, kind):
    stock, ours = pair(kind)
    plain = tokens(stock)
    with harmless():
        assert_fast(ours, plain)


def negated(function):
    """Make a function whose result no norm behind it makes the same again."""
    return lambda *args, **kwargs: -function(*args, **kwargs)


def doubled(function):
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


def other_token(function):
    return lambda *args, **kwargs: (function(*args, **kwargs) + 1) % 90


#: name -> (where the function is, what takes its place)
REPLACED = {
    "linear": (functional, negated),
    "silu": (functional, negated),
    "scaled_dot_product_attention": (functional, negated),
    "rsqrt": (torch, doubled),
    "argmax": (torch, other_token),
    "pow": (torch.Tensor, doubled),
}


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ("llama", "glm4"))
@pytest.mark.parametrize("name", REPLACED)
def test_replaced_functions_are_obeyed(name, kind, monkeypatch):
    stock, ours = pair(kind)
    plain = tokens(ours)
    space, other = REPLACED[name]
    with monkeypatch.context() as patch:
        patch.setattr(space, name, other(getattr(space, name)))
        assert_obeyed(stock, ours, "replaced_function", plain)
    assert_fast(ours, plain)


@pytest.mark.parametrize("kind", ("llama", "glm4"))
def test_calls_of_modules_are_obeyed(kind, monkeypatch):
    """Packages for tracing and checking put their own function in the place of ``nn.Module.__call__``."""
    stock, ours = pair(kind)
    called, call = [], nn.Module.__call__
    tokens(ours)
    with monkeypatch.context() as patch:
        patch.setattr(
            nn.Module, "__call__", lambda self, *args, **named: (called.append(1), call(self, *args, **named))[1]
        )
        assert_obeyed(stock, ours, "replaced_function", None)
    assert len(called) % 2 == 0 and called, "the patched model's modules were called otherwise than stock's"


def test_sampling_obeys_a_replaced_function(monkeypatch):
    stock, ours = pair("llama")
    monkeypatch.setattr(torch, "multinomial", lambda weights, num_samples: weights.argmin(-1, keepdim=True))
    found = [model.generate(prompt(CPU), max_new_tokens=8, do_sample=True).tolist() for model in (stock, ours)]
    assert found[0] == found[1]


def test_what_was_replaced_before_counts(monkeypatch):
    """A function is told by its origin: that it was replaced before this package looked does not matter."""
    model = build("llama")
    for other in (math.sqrt, lambda x: x):
        monkeypatch.setattr(torch, "rsqrt", other)
        assert compat.replaced_function(model).startswith("torch.rsqrt is ")
    monkeypatch.undo()
    assert compat.replaced_function(model) is None
    monkeypatch.setattr(torch, "load", print)  # no forward calls it
    assert compat.replaced_function(model) is None


def test_a_replaced_function_is_no_part_of_a_recording(monkeypatch):
    """A model whose step would have to be recorded is refused, with the function's name."""
    monkeypatch.setattr(functional, "silu", doubled(functional.silu))
    with pytest.raises(hf_fastpath.UnsupportedModelError, match=r"replaced_function[^$]*torch.nn.functional.silu"):
        hf_fastpath.patch(small_model("glm4"), quiet=True)


def test_own_loops_obey(monkeypatch):
    """Forwards outside of generate(), over our cache."""
    stock, ours = pair("llama")
    cache, ids = hf_fastpath.FastpathCache(ours.config), prompt(CPU)
    with torch.no_grad():
        for patched in (False, True):
            with monkeypatch.context() as patch:
                if patched:
                    patch.setattr(functional, "silu", doubled(functional.silu))
                expected = stock(ids).logits[:, -1]
                cache.reset()
                ours(ids[:, :-1], **{compat.CACHE: cache})
                found = ours(ids[:, -1:], **{compat.CACHE: cache}).logits[:, -1]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for model in (stock, ours):
            with Quantizing():
                logits = model(ids[:, :4]).logits
        assert torch.equal(logits, (logits * 4).round() / 4)


def test_a_mode_that_begins_in_a_callback():
    """It takes effect with the next token, and ends so."""

    def stopping(mode):
        def stop(ids, scores, **_):
            if ids.shape[1] == prompt(CPU).shape[1] + 3:
                mode.__enter__()
            if ids.shape[1] == prompt(CPU).shape[1] + 7:
                mode.__exit__(None, None, None)
            return torch.zeros(len(ids), dtype=torch.bool)

        return [stop]

    stock, ours = pair("llama")
    plain = tokens(stock)
    found = []
    for model in (stock, ours):
        ids = prompt(CPU) % 150 + 3
        found.append(model.generate(ids, stopping_criteria=stopping(Quantizing()), **SHORT)[0].tolist())
    assert found[0] == found[1] != plain
