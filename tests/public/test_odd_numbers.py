"""Every number that a module or the config of a model holds may be None, 0, negative, of another type: stock's tokens,
or stock's error, and never a kernel that takes the number for something else."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import causal_lm_types
import pytest
import torch
from models import CPU, build, counting, prompt, require_native
from transformers import PreTrainedModel

import hf_fastpath
from hf_fastpath.architecture import architectures

VALUES: tuple[Any, ...] = (None, 0, 0.0, -1.5, 2, torch.tensor(1.5), float("inf"), float("nan"), 1e-30)
USUAL = ("gemma2", "granite", "cohere2", "gpt_oss", "falcon", "opt")
LISTED = tuple(each.name for each in architectures())
RECORDED = ("granitemoe", "vaultgemma", "glm4", "falcon_h1", "deepseek_v3", "olmo")
#: names of sizes and bookkeeping, which say what shape a module has; a model with another shape is another model
_OTHERS = re.compile(
    "size|intermediate|num_.*(heads|layers|groups)|num_(experts|local_experts|ln_in_parallel_attn)$|dim|vocab|layer_idx|"
    "_ids?$|pad|token|training|n_embd|n_head|n_inner|features|num_heads|max_position|max_seq|ndims|n_positions|n_layer|"
    "original_|initializer|init_|problem|chunk|return|output_|use_|tie|is_|version|drop|^p$|shape|^n[xf]$|norm_type|"
    "architectures|dtype|no_rope"
)


def small(name: str) -> PreTrainedModel:
    require_native(CPU)
    model = build(name) if name in LISTED else causal_lm_types.small_model(name)
    model.generation_config.eos_token_id = None
    return model


def numbers(model: PreTrainedModel) -> Iterator[tuple[str | None, str]]:
    """Yield where numbers are: the name of the last module of each class, or None for the config; and the attribute."""
    last = {type(module): name for name, module in model.named_modules()}
    for name in last.values():
        yield from ((name, each) for each, value in vars(model.get_submodule(name)).items() if is_number(each, value))
    yield from ((None, each) for each, value in model.config.to_dict().items() if is_number(each, value))


def is_number(name: str, value: Any) -> bool:
    is_plain = value is None or type(value) in (int, float)
    return is_plain and not name.startswith("_") and _OTHERS.search(name) is None


def exchange(model: PreTrainedModel, place: tuple[str | None, str], value: Any) -> Any:
    """Put a value in a place, past any check of its type, and return what was there."""
    holder = model.config if place[0] is None else model.get_submodule(place[0])
    before = getattr(holder, place[1])
    object.__setattr__(holder, place[1], value)
    return before


def answer(model: PreTrainedModel, length: int = 7) -> Any:
    try:
        return model.generate(prompt(CPU, 1, length) % 150 + 3, max_new_tokens=4, do_sample=False).tolist()
    except Exception as error:  # stock code may end in any
        return type(error)


def over(names: tuple[str, ...]) -> Any:
    full = [() if name in USUAL or name in RECORDED[:2] else (pytest.mark.full,) for name in names]
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in zip(names, full)])


@pytest.mark.every(2)
@over((*LISTED, *RECORDED))
def test_numbers_that_change(name, request):
    """Each place gets every second value, neighbors the others; all of them with ``--full``."""
    apart = 1 if request.config.getoption("--full") else 2
    stock = small(name)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    weights = copy.deepcopy(stock.state_dict())  # an embedding with a max_norm changes its weights
    places, values = list(numbers(stock)), VALUES if name in LISTED else VALUES[:5]
    assert len(places) >= 5
    wrong = []
    for number, place in enumerate(places):
        for value in values[number % apart :: apart]:
            before = [exchange(model, place, value) for model in (stock, ours)]
            found, expected = answer(ours), answer(stock)
            if found != expected:
                wrong.append((place, value, found, expected))
            for model, each in zip((stock, ours), before):
                exchange(model, place, each)
                if place[1] == "max_norm":
                    model.load_state_dict(weights)
    assert not wrong


#: entries of configs that are factors, caps or windows
FACTORS = (
    *(("gemma2", "final_logit_softcapping"), ("gemma2", "attn_logit_softcapping"), ("gemma2", "sliding_window")),
    *(("gemma3_text", "final_logit_softcapping"), ("gemma3_text", "attn_logit_softcapping")),
    *(("granite", "embedding_multiplier"), ("granite", "residual_multiplier"), ("granite", "attention_multiplier")),
    *(("granite", "logits_scaling"), ("cohere", "logit_scale"), ("cohere2", "sliding_window"), ("olmoe", "clip_qkv")),
    *(("gpt_oss", "swiglu_limit"), ("llama", "rms_norm_eps"), ("mistral", "sliding_window")),
    *(("vaultgemma", "final_logit_softcapping"), ("granitemoe", "logits_scaling"), ("olmo", "clip_qkv")),
    *(("granitemoe", "residual_multiplier"), ("granitemoe", "attention_multiplier"), ("falcon_h1", "key_multiplier")),
)


@pytest.mark.each_value
@pytest.mark.parametrize("implementation", ("sdpa", "eager"))
@pytest.mark.parametrize("value", (None, 0, 0.0, -1.5, 2, 3.0), ids=repr)
@pytest.mark.parametrize(("name", "entry"), FACTORS)
def test_models_that_are_made_so(name, entry, value, implementation):
    first = small(name)
    config = copy.deepcopy(first.config)
    config._attn_implementation = implementation
    try:
        setattr(config, entry, value)
        stock = type(first)(config).eval()
    except Exception as error:
        pytest.skip(f"transformers makes no such model: {type(error).__name__}")
    stock.load_state_dict(first.state_dict(), strict=False)
    stock.generation_config = first.generation_config
    expected = [answer(stock, length) for length in (7, 20)]
    try:
        ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    except (hf_fastpath.errors.UnsupportedModelError, TypeError) as error:
        # no file says what the numbers of a recorded model are: one that is not recorded stays as it is
        assert name in RECORDED or expected == [type(error)] * 2
        return
    assert [answer(ours, length) for length in (7, 20)] == expected


@pytest.mark.each_value
@pytest.mark.parametrize("value", (0.0, 0, -30.0, float("nan"), torch.tensor(30.0), True), ids=repr)
@pytest.mark.parametrize("name", ("gemma2", "gemma3_text"))
def test_a_soft_cap_that_is_none(name, value):
    """No file knows it; the recorder does, unless stock code fails as well."""
    stock = small(name)
    stock.config.final_logit_softcapping = None
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    assert hf_fastpath.report(ours).loop == "fast"
    for model in (stock, ours):
        exchange(model, (None, "final_logit_softcapping"), value)
    with counting(ours) as counts:
        found = answer(ours)
    assert found == answer(stock)
    assert set(counts.reasons) <= {"unsupported_config", "nonfinite_logits"}
    assert counts.fast == 4 or (counts.fallback == 4 and counts.reasons["unsupported_config"])


def test_a_factor_that_a_module_ignores():
    """Falcon's factor is one over the root of a head's size, whatever ``inv_norm_factor`` says: only ALiBi reads it."""
    stock = small("falcon")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    for model in (stock, ours):
        for module in model.modules():
            if hasattr(module, "inv_norm_factor"):
                module.inv_norm_factor = 3.0
    with counting(ours) as counts:
        assert answer(ours) == answer(stock)
    assert counts.fast == 4 and not counts.reasons


def test_an_embedding_that_changes_its_weights():
    """The tokens that it is asked for are cut to a length in place."""
    stock = small("llama")
    stock.get_input_embeddings().max_norm = 0.5
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    before = stock.get_input_embeddings().weight.clone()
    assert answer(ours) == answer(stock)
    assert torch.equal(ours.get_input_embeddings().weight, stock.get_input_embeddings().weight)
    assert not torch.equal(before, stock.get_input_embeddings().weight)
