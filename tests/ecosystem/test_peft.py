"""PEFT over a patched model: adapters are switched, merged and disabled; virtual tokens."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from models import CPU, SHORT, build, counting, fresh, left_padded, prompt, require_native
from parity import assert_same_tokens

import hf_fastpath

peft = pytest.importorskip("peft", reason="PEFT is not installed")

TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_fc"]}


def wrapped(architecture: str, device: torch.device, make) -> tuple:
    """Return (patched model, stock under PEFT, patched under PEFT) with the same adapter."""
    stock, ours = fresh(architecture, device)
    made = []
    for model in (stock, ours):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns about Conv1D
            made.append(make(model).eval())
    return ours, *made


def lora(targets: list[str], rank: int):
    return peft.LoraConfig(
        r=rank,
        lora_alpha=8 * rank,
        target_modules=targets,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        fan_in_fan_out="c_attn" in targets,
    )


def tokens(patched, stock_peft, ours_peft, fast: bool) -> list:
    """Return stock's tokens; assert that ours are the same, and which loop made them."""
    inputs = left_padded(patched.device, 2)
    expected = stock_peft.generate(**inputs, **SHORT)
    with counting(patched) as counts:
        found = ours_peft.generate(**inputs, **SHORT)
    assert_same_tokens(found, expected)
    assert bool(counts.fast) == fast, counts.reasons
    assert fast is not bool(counts.reasons), counts.reasons
    return expected.tolist()


@pytest.mark.parametrize("architecture", TARGETS)
def test_lora_adapters(architecture, device):
    """Two adapters are switched on and off in every way: the step is recorded as the model then is."""
    first, second = lora(TARGETS[architecture], 4), lora(TARGETS[architecture], 2)

    def make(model):
        made = peft.get_peft_model(model, first)
        made.add_adapter("second", second)
        return made

    models = wrapped(architecture, device, make)
    seen = [tokens(*models, fast=True)]
    for model in models[1:]:
        model.set_adapter("second")
    seen.append(tokens(*models, fast=True))
    with models[1].disable_adapter(), models[2].disable_adapter():
        seen.append(tokens(*models, fast=True))
    for model in models[1:]:
        model.merge_adapter()
    assert tokens(*models, fast=True) == seen[1]
    for model in models[1:]:
        model.unmerge_adapter()
    assert tokens(*models, fast=True) == seen[1]
    unloaded = [model.merge_and_unload() for model in models[1:]]
    assert tokens(models[0], *unloaded, fast=True) == seen[1]
    assert seen[0] != seen[1] != seen[2] != seen[0], "an adapter changes nothing, so the test shows nothing"


def test_lora_on_a_patched_model_trains(device):
    """The adapters get stock's gradients, and the next tokens are those of the trained adapter."""
    models = wrapped("llama", device, lambda model: peft.get_peft_model(model, lora(TARGETS["llama"], 4)))
    before, losses = tokens(*models, fast=True), []
    for model in models[1:]:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
        ids = left_padded(device, 2)["input_ids"]
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    models[2].load_state_dict(models[1].state_dict())  # removes rounding differences, so that tokens are comparable
    assert tokens(*models, fast=True) != before


VIRTUAL = {
    "prompt_tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "prefix_tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "p_tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("name", VIRTUAL)
def test_virtual_tokens(name, device):
    """PEFT is asked what each token is given: stock's forward takes over where that is more than a plan reads, as it is
    in a padded row; without PEFT all is as it was."""
    stock, plain = fresh("llama", device)
    models = wrapped("llama", device, lambda model: peft.get_peft_model(model, VIRTUAL[name]()))
    with torch.no_grad():
        for model in models[1:]:
            for parameter in model.prompt_encoder.parameters():
                parameter.mul_(3)  # so that the virtual tokens matter
    patched, stock_peft, ours_peft = models
    inputs = left_padded(device, 2)
    row = {"input_ids": inputs["input_ids"][:1]}
    found = []
    for given in (inputs, row):
        with counting(patched) as counts:
            found.append(ours_peft.generate(**given, **SHORT))
        assert_same_tokens(found[-1], stock_peft.generate(**given, **SHORT))
        rows, new_tokens = len(found[-1]), SHORT["max_new_tokens"]
        assert counts.fast + counts.fallback == rows * new_tokens
        assert bool(counts.fallback) == bool(counts.reasons["generation_method"])
        assert given is row or counts.fast == rows
    with_prompt = found[0].tolist()
    with counting(plain) as counts:
        without = plain.generate(**inputs, **SHORT)
    assert counts.fast and without.tolist() != with_prompt
    with counting(models[0]) as counts:
        assert_same_tokens(models[0].generate(**inputs, **SHORT), stock.generate(**inputs, **SHORT), stock)
    assert counts.fast == 24


def test_ia3(device):
    config = peft.IA3Config(
        task_type="CAUSAL_LM",
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    )
    models = wrapped("llama", device, lambda model: peft.get_peft_model(model, config))
    tokens(*models, fast=True)


def test_a_wrapper_is_copied_whole():
    """PEFT's models hand on attributes that they lack; ``copy.deepcopy`` of one copies it, not the model inside."""
    require_native(CPU)
    inside = build("llama")
    stock = peft.get_peft_model(inside, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).eval()
    expected = stock.generate(input_ids=prompt(CPU), **SHORT)
    ours = hf_fastpath.patch(stock, quiet=True)
    twin = copy.deepcopy(ours)
    assert type(twin) is type(ours) and twin is not ours and twin.get_base_model() is not ours.get_base_model()
    assert torch.equal(twin.generate(input_ids=prompt(CPU), **SHORT), expected)
    assert hf_fastpath.report(twin).stats["fast_tokens"] and not hf_fastpath.report(ours).stats["fast_tokens"]
    assert type(copy.deepcopy([ours])[0]) is type(ours)
    hf_fastpath.unpatch(twin)
    assert torch.equal(ours.generate(input_ids=prompt(CPU), **SHORT), expected)
