"""PEFT's adapters inside recorded models: what PEFT changes in place takes effect, and the loop stays fast."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import causal_lm_types
import encoder_decoder_types
import multimodal_types
import pytest
import torch
from models import counting

import hf_fastpath
from hf_fastpath.recording import whole_step as recorded_step

peft = pytest.importorskip("peft", reason="PEFT is not installed")

IDS = torch.arange(4, 13)[None]
SHORT = dict(max_new_tokens=8, do_sample=False)


def causal(name: str) -> tuple[Any, dict[str, Any]]:
    return causal_lm_types.small_model(name), {"input_ids": IDS}


def encoder_decoder(name: str) -> tuple[Any, dict[str, Any]]:
    return encoder_decoder_types.small_model(name), {"input_ids": IDS}


def multimodal(name: str) -> tuple[Any, dict[str, Any]]:
    return multimodal_types.small_model(name), multimodal_types.prompt(name, (1,))


#: name -> (model and inputs, layers that get an adapter)
MODELS: dict[str, tuple[Callable[[str], tuple], list[str]]] = {
    "glm4": (causal, ["q_proj", "down_proj"]),
    "deepseek_v2": (causal, ["o_proj", "kv_a_proj_with_mqa"]),
    "lfm2": (causal, ["in_proj", "w2"]),
    "t5": (encoder_decoder, ["q", "wo"]),
    "bart": (encoder_decoder, ["v_proj", "fc2"]),
    "qwen2_5_vl": (multimodal, ["q_proj", "down_proj"]),
}
#: those that every run tries with each kind of adapter
FEW = ("glm4", "t5")

KINDS = {
    "lora": lambda targets: peft.LoraConfig(r=2, lora_alpha=16, target_modules=targets, init_lora_weights=False),
    "dora": lambda targets: peft.LoraConfig(
        r=2, lora_alpha=16, target_modules=targets, init_lora_weights=False, use_dora=True
    ),
    "rslora": lambda targets: peft.LoraConfig(
        r=2, lora_alpha=16, target_modules=targets, init_lora_weights=False, use_rslora=True
    ),
    "loha": lambda targets: peft.LoHaConfig(r=4, alpha=400, target_modules=targets, init_weights=False),
    "lokr": lambda targets: peft.LoKrConfig(r=4, alpha=100, target_modules=targets, init_weights=False),
    "ia3": lambda targets: peft.IA3Config(
        target_modules=targets, feedforward_modules=targets[1:], init_ia3_weights=False
    ),
}


def adapted(model: Any, kind: str, targets: list[str]) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel(model, KINDS[kind](targets)).eval()


def tuners(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(getattr(module, "scaling", None), dict)]


def scale_in_place(model: Any) -> None:
    for module in tuners(model):
        module.scaling["default"] *= 0.25


def scale_layers(model: Any) -> None:
    for module in tuners(model):
        module.scale_layer(3.0)


#: what is done to an adapted model, one after the other; a name says which tokens must come out again
STEPS: list[tuple[str, Callable[[Any], Any]]] = [
    ("adapter", lambda model: None),
    ("adapter", lambda model: model.merge_adapter()),
    ("adapter", lambda model: model.unmerge_adapter()),
    ("scaled", scale_in_place),
    ("scaled more", scale_layers),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if kind == "lora" or name in FEW[:1] else pytest.mark.full)
        for name in MODELS
        for kind in KINDS
    ],
)
def test_adapters_take_effect(name, kind, monkeypatch):
    make, targets = MODELS[name]
    (stock, inputs), (ours, _) = make(name), make(name)
    plain = stock.generate(**inputs, **SHORT)
    hf_fastpath.patch(ours, quiet=True)
    assert torch.equal(ours.generate(**inputs, **SHORT), plain)
    ours, patched = adapted(ours, kind, targets), ours
    stock = adapted(stock, kind, targets)
    ours.load_state_dict(stock.state_dict())
    seen: dict[str, torch.Tensor] = {}

    def check(what: str, disabled: bool = False) -> None:
        with ExitStack() as stack:
            for model in (stock, ours) if disabled else ():
                stack.enter_context(model.disable_adapter())
            expected = stock.generate(**inputs, **SHORT)
            with counting(patched) as counts:
                found = ours.generate(**inputs, **SHORT)
        assert torch.equal(found, expected), f"{name}, {kind}: {what}"
        assert counts.fast and not counts.fallback, f"{name}, {kind}, {what}: {counts.reasons}"
        seen.setdefault(what, expected)

    for what, change in STEPS:
        if kind == "ia3" and what != "adapter":
            continue  # it has no scale
        for model in (stock, ours):
            change(model)
        check(what)
    check("plain", disabled=True)
    assert torch.equal(seen["plain"], plain) and not torch.equal(seen["adapter"], plain), "an adapter changes nothing"
    records = []
    record = recorded_step.record
    monkeypatch.setattr(recorded_step, "record", lambda *given: (records.append(given), record(*given))[1])
    for _ in range(2):
        check("plain", disabled=True)
        check(list(seen)[-2])
    assert not records, "going back and forth records anew"


@pytest.mark.parametrize("name", FEW)
def test_patched_with_an_adapter(name):
    """A model that is patched with an adapter inside, merged or not, and is changed then."""
    make, targets = MODELS[name]
    (stock, inputs), (ours, _) = make(name), make(name)
    for merged in (False, True):
        models = [adapted(copy.deepcopy(model), "lora", targets) for model in (stock, ours)]
        models[1].load_state_dict(models[0].state_dict())
        for model in models if merged else ():
            model.merge_adapter()
        hf_fastpath.patch(models[1], quiet=True)
        for change in ("nothing", "the other"):
            for model in models:
                if change != "nothing":
                    (model.unmerge_adapter if merged else model.merge_adapter)()
            expected, found = (model.generate(**inputs, **SHORT) for model in models)
            assert torch.equal(expected, found), f"{name}, merged {merged}, {change}"
