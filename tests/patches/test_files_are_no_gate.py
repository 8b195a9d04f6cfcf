"""What a listed family's file does not know is as fast as what it knows: its step is recorded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from causal_lm_types import small_model
from models import CPU, build, counting, hidden_files, require_native
from torch import nn
from transformers.pytorch_utils import Conv1D

import hf_fastpath
from hf_fastpath.architecture import architectures
from hf_fastpath.options import Options
from hf_fastpath.patching.analyse import analyse

NAMES = sorted(each.name for each in architectures())
NEW = 8


def prompt(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(length))


def padded(rows: int, length: int) -> dict[str, Any]:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, :4] = 0
    return {"input_ids": prompt(rows, length), "attention_mask": mask}


#: ways to call ``generate()``
WAYS = {
    "short": lambda: {"input_ids": prompt(1, 7)},
    "padded": lambda: padded(2, 19),
    "long": lambda: {"input_ids": prompt(1, 40)},
    "beams": lambda: {"input_ids": prompt(1, 9), "num_beams": 2},
    "drafts": lambda: {"input_ids": prompt(1, 9), "prompt_lookup_num_tokens": 3},
    "sampling": lambda: {"input_ids": prompt(2, 6), "do_sample": True, "top_k": 9},
}


def assert_fast(ours: nn.Module, stock: nn.Module, ways: tuple[str, ...] = tuple(WAYS)) -> None:
    for way in ways:
        options = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0} | WAYS[way]()
        torch.manual_seed(3)
        try:
            expected = stock.generate(**options)
        except TypeError:  # transformers before 5.18 crops layers of its cache that no module of the model has filled
            assert way == "drafts" and len(getattr(*layers_of(stock))) < stock.config.num_hidden_layers
            continue
        torch.manual_seed(3)
        with counting(ours) as counts:
            found = ours.generate(**options)
        assert torch.equal(found, expected), way
        assert counts.fast and not counts.fallback, (way, counts.reasons, str(hf_fastpath.report(ours)))


# ---- all families, with their files and without ------------------------------------------------------------------


def adapted(model: nn.Module, merged: bool) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(1)
    found = {
        name.rpartition(".")[2]
        for name, each in model.named_modules()
        if isinstance(each, (nn.Linear, Conv1D)) and each is not model.get_output_embeddings()
    }
    config = peft.LoraConfig(r=3, lora_alpha=8, target_modules=[*found], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config).eval()
    if merged:
        wrapped.merge_adapter()


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapter", (None, "unmerged", "merged"))
@pytest.mark.parametrize("hidden", (False, True), ids=("file", "no file"))
@pytest.mark.parametrize("name", NAMES)
def test_a_file_changes_nothing_of_what_is_fast(name, hidden, adapter):
    require_native(CPU)
    stock = small_model(name)
    if hasattr(stock.config, "original_max_position_embeddings"):  # see test_a_long_prompt_of_phi3
        stock.config.original_max_position_embeddings = 4096
    ours = copy.deepcopy(stock)
    if adapter is not None:
        for model in (stock, ours):
            adapted(model, adapter == "merged")
    with hidden_files() if hidden else nullcontext():
        hf_fastpath.patch(ours, quiet=True)
    assert_fast(ours, stock, ("short", "padded"))


@pytest.mark.parametrize("hidden", (False, True))
@pytest.mark.parametrize("architecture", ("llama", "gpt2"))
def test_a_model_with_a_file_is_recorded_if_that_is_hidden(architecture, hidden):
    with hidden_files() if hidden else nullcontext():
        plan = analyse(build(architecture), Options.parse())
    assert (plan.recorded is not None) == hidden


# ---- what files do not know ----------------------------------------------------------------------------------------


def layers_of(model: nn.Module) -> tuple[nn.Module, str]:
    inner = model.get_decoder()
    return inner, "layers" if hasattr(inner, "layers") else "h"


def in_order(*places: int) -> Callable[[nn.Module], None]:
    def change(model):
        inner, name = layers_of(model)
        setattr(inner, name, nn.ModuleList(getattr(inner, name)[place] for place in places))

    return change


def scaled(kind: str, factor: float) -> Callable[[nn.Module], None]:
    """Put a subclass with another forward in the place of a class."""

    def change(model):
        found = [each for each in model.modules() if type(each).__name__.endswith(kind)]
        assert found
        for each in found:
            home = type(each)

            def forward(self, *args, home=home, **kwargs):
                result = home.forward(self, *args, **kwargs)
                return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

            each.__class__ = type(f"Own{home.__name__}", (home,), {"forward": forward, "__module__": __name__})

    return change


def without_norm(model: nn.Module) -> None:
    inner, _ = layers_of(model)
    setattr(inner, next(name for name in ("norm", "ln_f") if hasattr(inner, name)), nn.Identity())


def activation(model: nn.Module) -> None:
    for each in model.modules():
        for name in ("act_fn", "act"):
            if hasattr(each, name):
                setattr(each, name, nn.Softsign())


#: what a user changes -> the families that are tried
CHANGES: dict[str, tuple[Callable[[nn.Module], None], tuple[str, ...]]] = {
    "activation": (activation, ("llama", "gpt2", "gemma2")),
    "other order": (in_order(1, 0), ("llama", "gpt2", "mixtral")),
    "one layer twice": (in_order(0, 1, 1), ("llama", "mixtral")),
    "grown": (in_order(0, 1, 0, 1), ("llama", "qwen3")),
    "one layer": (in_order(0), ("gemma2", "gpt2")),
    "no norm": (without_norm, ("llama", "gpt2")),
    "own mlp": (scaled("MLP", 0.9), ("llama", "gpt2", "gemma2")),
    "own attention": (scaled("Attention", 0.9), ("llama", "gpt2", "qwen3")),
    "own norm": (scaled("Norm", 1.1), ("llama", "gemma2", "gpt2")),
    "own layer": (scaled("DecoderLayer", 1.01), ("llama", "mixtral")),
}


@pytest.mark.each_value
@pytest.mark.parametrize("when", ("before", "behind"))
@pytest.mark.parametrize(("what", "name"), [(what, name) for what, (_, names) in CHANGES.items() for name in names])
def test_changes_that_no_file_knows(what, name, when):
    """Before ``patch()`` and behind it; what was changed is no class of transformers' any more, or has another one."""
    require_native(CPU)
    stock, change = build(name), CHANGES[what][0]
    ours = copy.deepcopy(stock)
    if when == "behind":
        hf_fastpath.patch(ours, quiet=True)
        assert_fast(ours, stock, ("short",))
    for model in (stock, ours):
        change(model)
    if when == "before":
        hf_fastpath.patch(ours, quiet=True)
    assert_fast(ours, stock)


CONFIGS = {
    "gpt2-upcast": ("gpt2", dict(reorder_and_upcast_attn=True)),
    "gpt2-mish": ("gpt2", dict(activation_function="mish")),
    "llama-tanh": ("llama", dict(hidden_act="tanh")),
    "mixtral-tanh": ("mixtral", dict(hidden_act="tanh")),
    "opt-projected": ("opt", dict(word_embed_proj_dim=64)),
    "opt-norms": ("opt", dict(do_layer_norm_before=False)),
    "gemma2-cap": ("gemma2", dict(final_logit_softcapping=-30.0)),
}


@pytest.mark.parametrize(("name", "entries"), CONFIGS.values(), ids=CONFIGS)
def test_configs_that_no_file_knows(name, entries):
    require_native(CPU)
    stock = build(name, **entries)
    assert_fast(hf_fastpath.patch(copy.deepcopy(stock), quiet=True), stock)
