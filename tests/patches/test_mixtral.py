"""Mixtral: routers, gradients, and experts that the kernels do not take."""

import copy

import pytest
import torch
from architecture_checks import assert_same_gradients
from models import build, counting, fresh, prompt, require_native
from parity import assert_equal_generation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import hf_fastpath
from hf_fastpath import traffic


def test_mixtral_experts_of_another_class_are_recorded(device):
    """The file knows no other class of experts; what is around them is patched for the prompt."""

    class OtherExperts(MixtralExperts):
        pass

    require_native(device)
    stock = build("mixtral").to(device)
    for layer in stock.model.layers:
        layer.mlp.experts.__class__ = OtherExperts
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    with counting(ours) as counts:
        assert_equal_generation(ours, stock, fast=True)
    assert not counts.reasons and hf_fastpath.report(ours).patched["attention"] == 2


def test_mixtral_experts_function_of_the_users_own_runs(device, monkeypatch):
    def doubled(self, hidden_states, top_k_index, top_k_weights):
        return 2 * MixtralExperts.forward.__wrapped__(self, hidden_states, top_k_index, top_k_weights)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "doubled", doubled)
    stock, ours = fresh("mixtral", device)
    for model in (stock, ours):
        model.config._experts_implementation = "doubled"
    with counting(ours) as counts:
        assert_equal_generation(ours, stock, fast=False)
    assert counts.reasons["experts_function"]


@torch.no_grad()
def test_mixtral_router_logits(device):
    stock, ours = fresh("mixtral", device)
    ids = prompt(device, 1, 5)
    with counting(ours) as counts:
        found = ours(ids, output_router_logits=True).router_logits
    assert counts.reasons["attention_outputs"] and len(found) == 2
    for mine, expected in zip(found, stock(ids, output_router_logits=True).router_logits):
        torch.testing.assert_close(mine, expected)


def test_mixtral_gradients(device):
    assert_same_gradients("mixtral", device)


def test_mixtral_noise_in_training(device):
    losses = []
    for model in fresh("mixtral", device, router_jitter_noise=0.2):
        torch.manual_seed(5)
        ids = prompt(device, batch=1, length=9)
        with torch.no_grad():
            losses.append(model.train()(ids, labels=ids).loss)
    torch.testing.assert_close(losses[1], losses[0])


def test_mixtral_changed_experts_are_read(device):
    """The plan holds the stacks of all experts: changed values take effect, and so does a replaced stack."""
    stock, ours = fresh("mixtral", device)
    for change in ("values", "stack"):
        assert_equal_generation(ours, stock)
        for model in (stock, ours):
            experts = model.model.layers[1].mlp.experts
            if change == "values":
                experts.down_proj.data.mul_(-0.5)
            else:
                experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj.detach().flip(0))
    assert_equal_generation(ours, stock)


def test_mixtral_verify(device):
    """verify() uses higher precision, which only the experts' own code has; the config is as it was."""
    _, ours = fresh("mixtral", device)
    before = copy.deepcopy(ours.config)
    assert hf_fastpath.verify(ours, prompt(device, 1, 12), max_new_tokens=8).ok
    assert ours.config.to_dict() == before.to_dict()
    assert ours.config._experts_implementation == before._experts_implementation != "eager"


def test_mixtral_bytes_of_a_step():
    """Of five experts, two are read for one sequence and four for two."""
    model = build("mixtral")
    stacks = sum(p.nbytes for p in model.parameters() if p.dim() == 3)
    two, four, all_of_them = (traffic.weight_bytes(model, batch) for batch in (1, 2, 4))
    row = model.model.embed_tokens.weight[0].nbytes
    assert four - two == pytest.approx(stacks * 2 / 5 + row, abs=8)
    assert all_of_them - four == pytest.approx(stacks / 5 + 2 * row, abs=8)
