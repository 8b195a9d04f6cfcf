"""What a step makes of weights alone (DoRA's norms, scaled vectors, products of small matrices) is computed when a call
begins, and anew whenever the caller's code may have changed a weight."""

from __future__ import annotations

import copy

import pytest
import torch
from causal_lm_types import small_model
from models import CPU, build, require_native
from torch import nn
from transformers import StoppingCriteria, StoppingCriteriaList

import hf_fastpath
from hf_fastpath.decode.calls.named_calls import tensors_in
from hf_fastpath.patching.state import state_of

peft = pytest.importorskip("peft")
NAMES = dict(llama=["q_proj", "k_proj", "v_proj", "down_proj"], gpt2=["c_attn", "c_proj"], glm4=["q_proj", "down_proj"])
KINDS = {
    "dora": lambda targets: peft.LoraConfig(r=4, target_modules=targets, use_dora=True),
    "ia3": lambda targets: peft.IA3Config(target_modules=targets, feedforward_modules=targets[-1:]),
    "vera": lambda targets: peft.VeraConfig(r=4, target_modules=targets[:1]),
    "loha": lambda targets: peft.LoHaConfig(r=3, target_modules=targets),
    "adalora": lambda targets: peft.AdaLoraConfig(r=4, init_r=4, total_step=9, target_modules=targets),
    "oft": lambda targets: peft.OFTConfig(r=0, oft_block_size=16, target_modules=targets[:1]),
}


def change(model: nn.Module, seed: int) -> None:
    """Change the adapters' weights."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def pair_of(kind: str, name: str = "llama") -> tuple[nn.Module, nn.Module]:
    """Return a model with an adapter, stock and patched."""
    require_native(CPU)
    torch.manual_seed(3)
    base = build(name) if name in ("llama", "gpt2") else small_model(name)
    stock = peft.get_peft_model(base, KINDS[kind](NAMES[name])).eval()
    change(stock, 0)
    ours = copy.deepcopy(stock)
    hf_fastpath.patch(ours, quiet=True)
    return stock, ours


def tokens(model: nn.Module, batch: int = 1, **options) -> torch.Tensor:
    ids = torch.arange(3, 12).expand(batch, -1) + torch.arange(batch)[:, None]
    return model.generate(input_ids=ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)


def values_of(model: nn.Module) -> list:
    plan = next(iter(state_of(model.get_base_model()).plans))
    return plan._values


@pytest.mark.each_value
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_all_kinds(kind, name):
    """Tokens are stock's, of one and of several sequences, by prompts of modules and of lists, behind edits too."""
    try:
        stock, ours = pair_of(kind, name)
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        pytest.skip(f"PEFT has no {kind} for {name}: {error}")
    seen = []
    for batch in (1, 2, 1):
        seen.append(tokens(stock, batch))
        assert torch.equal(seen[-1], tokens(ours, batch))
    for seed in (1, 2):
        for model in (stock, ours):
            change(model, seed)
        seen.append(tokens(stock))
        assert torch.equal(seen[-1], tokens(ours))
    assert not torch.equal(seen[-1], seen[-2]), "weights of the adapter change nothing"
    stats = state_of(ours.get_base_model()).stats
    assert not stats.fallback_tokens and not stats.reasons, dict(stats.reasons)


@pytest.mark.parametrize("kind", ("dora", "ia3"))
def test_adapters_in_float32_of_a_model_in_bfloat16(kind):
    """Casts between such an adapter and heads stay, so that the step is the model's but for rounding."""
    require_native(CPU)
    torch.manual_seed(3)
    model = peft.get_peft_model(build("llama").bfloat16(), KINDS[kind](NAMES["llama"])).eval()
    change(model, 0)
    assert {each.dtype for each in model.parameters() if each.requires_grad} == {torch.float32}
    hf_fastpath.patch(model, quiet=True)
    for _ in range(2):
        tokens(model)
    stats = state_of(model.get_base_model()).stats
    assert not stats.fallback_tokens and not stats.reasons, dict(stats.reasons)


def test_base_weights_count():
    """DoRA's norms are of the base model's weights as well."""
    stock, ours = pair_of("dora")
    before = tokens(ours)
    for model in (stock, ours):
        for path, parameter in model.named_parameters():
            if "q_proj.base_layer" in path or "v_proj.base_layer" in path:
                parameter.data[::2] *= -2
    after = tokens(ours)
    assert torch.equal(tokens(stock), after) and not torch.equal(before, after)
    assert values_of(ours)


@pytest.mark.parametrize("what", ("lora_A", "base_layer", "magnitude"))
def test_edits_by_a_callback(what):
    """A weight that a callback changes between two tokens counts from the next token on, also through ``.data``."""

    class Edit(StoppingCriteria):
        def __init__(self, model):
            self.model, self.calls = model, 0

        def __call__(self, input_ids, scores, **others):
            self.calls += 1
            if self.calls == 3:
                for path, parameter in self.model.named_parameters():
                    if what in path:
                        parameter.data[::2] *= -3
            return torch.zeros(len(input_ids), dtype=torch.bool)

    stock, ours = pair_of("dora")
    unedited = tokens(ours)
    found = [tokens(model, stopping_criteria=StoppingCriteriaList([Edit(model)])) for model in (stock, ours)]
    assert torch.equal(*found) and not torch.equal(found[0], unedited)
    assert torch.equal(*map(tokens, (stock, ours)))


def test_own_loops():
    """Forwards over a cache are stock's, as no call begins where values could be computed."""
    stock, ours = pair_of("dora")
    tokens(ours)
    found = []
    for model in (stock, ours):
        ids, cache, seen = torch.arange(3, 12)[None], None, []
        with torch.no_grad():
            for step in range(5):
                out = model(input_ids=ids, past_key_values=cache, use_cache=True)
                cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
                seen.append(ids)
                if step == 2:
                    change(model, 5)
        found.append(torch.cat(seen, dim=1))
    assert torch.equal(*found)


def test_what_is_kept_is_small():
    """A difference of whole weights (LoHa's) stays in the step; what is kept is a small part of the model."""
    for kind in ("dora", "loha"):
        _, ours = pair_of(kind)
        tokens(ours)
        kept = sum(memory.nbytes for _, memory in values_of(ours))
        whole = sum(each.nbytes for each in ours.parameters())
        assert kept < whole / 4, kind
        calls = next(iter(state_of(ours.get_base_model()).plans)).program.calls
        read = {id(each) for call in calls for each in tensors_in(call.arguments)}
        assert all(id(memory) in read for _, memory in values_of(ours)), "a value that no call reads"


def test_drafts():
    """Several tokens at once have a recording of their own, and values of their own."""
    stock, ours = pair_of("dora")
    found = [tokens(model, prompt_lookup_num_tokens=3) for model in (stock, ours)]
    assert torch.equal(*found) and torch.equal(found[0], tokens(ours))
    for model in (stock, ours):
        change(model, 4)
    assert torch.equal(*[tokens(model, prompt_lookup_num_tokens=3) for model in (stock, ours)])
    assert not state_of(ours.get_base_model()).stats.fallback_tokens
