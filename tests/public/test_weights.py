"""A patched model whose weights or modules change: by training, loading, casting or by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from models import SHORT, build, counting, fresh, left_padded, over_architectures, prompt
from parity import LogitRule, assert_equal_generation, float64_copy, rng_state
from torch import nn


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    ids = prompt(next(model.parameters()).device, 2, 20)
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    return loss.item()


@over_architectures
def test_train_a_step_then_generate(architecture, device):
    """AdamW runs on the patched model before and between generate() calls, which use the present weights."""
    drop = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0) if architecture == "gpt2" else {}
    stock, ours = fresh(architecture, device, **drop)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.02)
    stock_optimizer = torch.optim.AdamW(stock.parameters(), lr=0.02)
    untrained = stock.generate(prompt(device), **SHORT)
    for _ in range(3):
        loss, expected = train_step(ours, optimizer), train_step(stock, stock_optimizer)
        assert loss == pytest.approx(expected, rel=1e-4)
        same_weights = copy.deepcopy(stock)
        same_weights.load_state_dict(ours.state_dict())
        assert_equal_generation(ours, same_weights)
    assert not torch.equal(same_weights.generate(prompt(device), **SHORT), untrained), "training changed nothing"


@over_architectures
@pytest.mark.parametrize("dropout", (0.0, 0.3))
@pytest.mark.parametrize("checkpointing", (False, True))
def test_gradients_within_rule(checkpointing, dropout, architecture, device):
    """Gradients are as near to float64 as stock's; with dropout they are made with the same random numbers."""
    if dropout:
        names = ("resid_pdrop", "embd_pdrop", "attn_pdrop") if architecture == "gpt2" else ("attention_dropout",)
        changes = dict.fromkeys(names, dropout)
    else:
        changes = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0) if architecture == "gpt2" else {}
    stock, ours = fresh(architecture, device, **changes)
    ids = prompt(device, 2, 20)
    models = [ours, stock] if dropout else [ours, stock, float64_copy(stock)]
    found, states = [], []
    for model in models:
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(3)
        model(ids, labels=ids).loss.backward()
        states.append(rng_state(device))
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert torch.equal(states[0], states[1]), "other random numbers were used"
    if dropout:
        for name, gradient in found[1].items():
            torch.testing.assert_close(found[0][name], gradient, rtol=1e-4, atol=1e-5)
        return
    mean = [sum((g[n].double() - found[2][n]).abs().mean().item() for n in found[2]) / len(found[2]) for g in found[:2]]
    assert 0 < mean[1] and mean[0] <= 1.1 * mean[1]


CHANGES = {
    "assign": lambda model, state: model.load_state_dict(state, assign=True),
    "load": lambda model, state: model.load_state_dict(state),
    "half": lambda model, state: model.half(),
    "bfloat16": lambda model, state: model.to(torch.bfloat16),
    "double": lambda model, state: model.double(),
    "half_and_back": lambda model, state: model.half().float(),
    "data": lambda model, state: [setattr(p, "data", p.data * 1.25) for p in model.parameters()],
    "in_place": lambda model, state: [p.data.mul_(0.8) for p in model.parameters()],
    "resize": lambda model, state: model.resize_token_embeddings(331, mean_resizing=False),
    "fewer_layers": lambda model, state: _drop_layer(model),
}


def _drop_layer(model: nn.Module) -> None:
    name, decoder = ("h", model.transformer) if hasattr(model, "transformer") else ("layers", model.model)
    setattr(decoder, name, getattr(decoder, name)[:1])
    model.config.num_hidden_layers = 1
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:1]


@pytest.mark.each_pair
@over_architectures
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("warm", (False, True), ids=("before_generate", "after_generate"))
def test_model_changed_after_patching(warm, change, architecture, device):
    """Whatever a user does to the model, the next generate() is that of the changed model."""
    stock, ours = fresh(architecture, device)
    state = {k: v.clone() for k, v in build(architecture, seed=1).to(device).state_dict().items()}
    if warm:
        ours.generate(**left_padded(device, 2), **SHORT)
    for model in (stock, ours):
        torch.manual_seed(0)
        CHANGES[change](model, {k: v.clone() for k, v in state.items()})
    if stock.dtype in (torch.float16, torch.bfloat16):  # ties are common, so the logits decide
        rule = LogitRule()
        reference = float64_copy(stock)
        with torch.no_grad():
            for seed in range(4):
                ids = prompt(device, 4, 20, seed=seed)
                rule.add(*(model(ids, use_cache=False).logits for model in (ours, stock, reference)))
        rule.check(f"{architecture} {change}")
        with counting(ours) as counts:
            ours.generate(**left_padded(device, 2), **SHORT)
        assert counts.fast, counts.reasons
        return
    assert_equal_generation(ours, stock, fast=None)


@over_architectures
def test_model_moved_after_patching(architecture, cuda):
    """The model goes to the GPU and back, with a plan for where it was."""
    stock, ours = fresh(architecture)
    for device in ("cpu", cuda, "cpu", cuda):
        stock.to(device), ours.to(device)
        assert_equal_generation(ours, stock)


@over_architectures
def test_new_head_after_patching(architecture, device):
    """A replaced output projection, norm or MLP is used."""
    for warm in (False, True):
        stock, ours = fresh(architecture, device)
        if warm:
            ours.generate(prompt(device), **SHORT)
        for model in (stock, ours):
            torch.manual_seed(5)
            head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False, device=device)
            model.lm_head = head
        assert_equal_generation(ours, stock, fast=None)
