"""Training around generate(): policy loops, DDP and FSDP."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed
from models import SHORT, build, counting, fresh, over_architectures, prompt
from parity import assert_equal_generation, assert_same_tokens
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def policy_step(model: nn.Module, texts: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One step that makes the sampled texts likelier, as a policy gradient does."""
    model.train()
    logits = model(texts, use_cache=False).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, texts[:, 1:, None])
    (-logprobs.mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


@pytest.mark.each_value
@pytest.mark.parametrize("checkpointing", (False, True))
@over_architectures
def test_generate_train_generate(architecture, checkpointing, device):
    """A fused AdamW writes the weights in place: each round samples from the new weights, over the same plan."""
    _, ours = fresh(architecture, device, **(NO_DROPOUT if architecture == "gpt2" else {}))
    if checkpointing:
        ours.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01, fused=True)
    ids, seen, plans = prompt(device, 2), [], []
    for _ in range(4):
        with counting(ours) as counts:
            seen.append(ours.generate(ids, **SHORT))
        assert counts.fast == 24
        plans.append(list(vars(ours)["_hf_fastpath"].plans))
        stock = build(architecture).to(device)
        stock.load_state_dict(ours.state_dict())
        assert_same_tokens(seen[-1], stock.generate(ids, **SHORT), stock)
        policy_step(ours, prompt(device, 2, 20), optimizer)
    assert not torch.equal(seen[0], seen[-1]), "training changed nothing"
    assert all(len(made) == 1 and made[0] is plans[0][0] for made in plans), "a step made a new plan"


@over_architectures
def test_generate_under_checkpointing_in_train_mode(architecture, device):
    """transformers drops the KV cache in this mode, so that other tokens come out than in eval mode: stock's."""
    stock, ours = fresh(architecture, device, **(NO_DROPOUT if architecture == "gpt2" else {}))
    for model in (stock, ours):
        model.gradient_checkpointing_enable()
        model.train()
    with counting(ours) as counts:
        found = ours.generate(prompt(device, 2), **SHORT)
    assert counts.reasons["checkpointing"] and not counts.fast
    assert torch.equal(found, stock.generate(prompt(device, 2), **SHORT))
    for model in (stock, ours):
        model.eval()
    assert_equal_generation(ours, stock)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("architecture", ("gpt2", "llama", "gemma2", "mixtral"))
def test_log_probabilities_are_the_same_with_and_without_gradients(architecture, dtype, device):
    """Ratios of a policy begin at 1, and a preference loss at log 2: in training, and after it. Both are stock's."""
    stock, ours = fresh(architecture, device, **(NO_DROPOUT if architecture == "gpt2" else {}))
    stock, ours = stock.to(dtype), ours.to(dtype)
    texts = prompt(device, 2, 40), prompt(device, 1, 9)  # the kernels take the short one in evaluation
    for training in (True, False):
        for model in (stock, ours):
            model.train(training)
        for text in texts:
            with_gradients = ours(text, use_cache=False).logits
            with torch.no_grad():
                without, expected = (model(text, use_cache=False).logits for model in (ours, stock))
            assert with_gradients.requires_grad
            assert torch.equal(with_gradients, without) and torch.equal(without, expected)
    with counting(ours) as counts:
        found = ours.generate(prompt(device), **SHORT)
    assert counts.fast and not counts.reasons
    if dtype == torch.float32:
        assert_same_tokens(found, stock.generate(prompt(device), **SHORT), stock)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is nothing to shard over
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2(model: nn.Module) -> nn.Module:
    """Apply FSDP2, which changes the classes of the modules."""
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.parametrize(("wrap", "fast"), ((ddp, True), (fsdp, True), (fsdp2, False)), ids=("ddp", "fsdp", "fsdp2"))
def test_wrapped_training_step(wrap, fast, one_process):
    """The loss is stock's; then the inner model generates with the new weights."""
    stock, ours = fresh("llama")
    cpu, losses, wrappers = stock.device, [], []
    ids = prompt(cpu, 2, 20)
    untrained = stock.generate(prompt(cpu), **SHORT)
    for model in (ours, stock):
        wrapper = wrap(model)
        optimizer = torch.optim.AdamW(wrapper.parameters(), lr=0.05)
        for _ in range(2):
            loss = wrapper(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        wrappers.append(wrapper)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    with counting(ours) as counts:
        if wrap is fsdp:
            with FullyShardedDataParallel.summon_full_params(wrappers[0]):
                found = ours.generate(prompt(cpu), **SHORT)
        else:
            found = ours.generate(prompt(cpu), **SHORT)
    assert bool(counts.fast) == fast and (fast or counts.reasons["hooks"]), counts.reasons
    reference = build("llama")
    if wrap is fsdp:
        with FullyShardedDataParallel.summon_full_params(wrappers[0]):
            state = {name: p.detach().clone() for name, p in ours.state_dict().items()}
    else:
        state = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p) for n, p in ours.state_dict().items()}
    reference.load_state_dict(state)
    assert_same_tokens(found, reference.generate(prompt(cpu), **SHORT), reference)
    assert not torch.equal(found, untrained), "training changed nothing"


def test_reference_model_of_a_patched_policy(device):
    """Preference training keeps a frozen deep copy: each of the two generates with its own weights."""
    stock, ours = fresh("llama", device)
    frozen = copy.deepcopy(ours).requires_grad_(False)
    policy_step(ours, prompt(device, 2, 20), torch.optim.AdamW(ours.parameters(), lr=0.05))
    assert_equal_generation(frozen, stock)
    trained = copy.deepcopy(stock)
    trained.load_state_dict(ours.state_dict())
    assert_equal_generation(ours, trained)
