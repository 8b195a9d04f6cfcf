"""Modes of torch around a patched model, and threads."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from models import CPU, SHORT, counting, fresh, left_padded, over_architectures, pair, prompt
from parity import assert_equal_generation, assert_same_tokens, rng_state
from transformers import StaticCache

import hf_fastpath
from hf_fastpath.compat import CACHE

# ---- modes -------------------------------------------------------------------------------------------------


@over_architectures
def test_dropout_in_train_mode(architecture, device):
    """In train mode dropout is active in stock's generate(), so stock runs, with the same random numbers."""
    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop") if architecture == "gpt2" else ("attention_dropout",)
    stock, ours = fresh(architecture, device, **dict.fromkeys(names, 0.2))
    results = []
    for model in (ours, stock):
        model.train()
        torch.manual_seed(11)
        results.append(model.generate(prompt(device, 2), **SHORT))
        results.append(rng_state(device))
        assert model.training
    assert_same_tokens(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert hf_fastpath.report(ours).stats["reasons"]["dropout"]
    for model in (ours, stock):
        model.eval()
    assert_equal_generation(ours, stock)


@over_architectures
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast_runs_stock(dtype, architecture, device):
    stock, ours = pair(architecture, device)
    with torch.autocast(device.type, dtype=dtype), counting(ours) as counts, torch.no_grad():
        ids = prompt(device, 2)
        assert torch.equal(ours(ids).logits, stock(ids).logits)
        assert torch.equal(ours.generate(ids, **SHORT), stock.generate(ids, **SHORT))
    assert counts.reasons["autocast"] and not counts.fast


@pytest.mark.parametrize(
    "architecture", ("llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt2", "mistral")))
)
def test_torch_compile_after_patching(architecture):
    """The compiler traces stock code, for whole prompts and for steps over a cache."""
    torch._dynamo.reset()
    layers = {"n_layer": 1} if architecture == "gpt2" else {"num_hidden_layers": 1}
    stock, ours = fresh(architecture, **layers)
    compiled = torch.compile(ours, backend="aot_eager")
    ids = prompt(CPU, 2)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, stock(ids, use_cache=False).logits)
    loss = compiled(ids, labels=ids, use_cache=False).loss
    loss.backward()
    expected = stock(ids, labels=ids, use_cache=False).loss
    expected.backward()
    for (name, a), b in zip(ours.named_parameters(), stock.parameters()):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}")
    torch._dynamo.reset()
    assert_equal_generation(ours, stock)


@pytest.mark.parametrize("architecture", ("llama", pytest.param("gpt2", marks=pytest.mark.full)))
def test_compiled_steps_over_a_static_cache_have_no_graph_break(architecture):
    """generate(cache_implementation="static") does so on a GPU: nobody reads the cache's length, which is a tensor."""
    torch._dynamo.reset()
    layers = {"n_layer": 1} if architecture == "gpt2" else {"num_hidden_layers": 1}
    stock, ours = fresh(architecture, **layers)
    ids, cache = prompt(CPU, 2), StaticCache(config=ours.config, max_cache_len=16)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    with torch.no_grad():
        ours(ids[:, :-1], **{CACHE: cache})
        positions = torch.tensor([[ids.shape[1] - 1]])
        found = compiled(ids[:, -1:], **{CACHE: cache}, position_ids=positions).logits
        torch.testing.assert_close(found[:, -1], stock(ids).logits[:, -1])
    torch._dynamo.reset()


def _compiled_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def _compiled_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


COMPILED = {
    "torch.compile": (lambda model: torch.compile(model, backend="eager"), True),
    "layer.compile": (_compiled_layers, True),
    "model.forward": (_compiled_forward, False),
}


@pytest.mark.parametrize("name", COMPILED)
def test_generate_of_a_compiled_model(name):
    """Users compile after patching; a forward on the instance is the user's, so that stock's loop runs."""
    make, fast = COMPILED[name]
    torch._dynamo.reset()
    stock, ours = fresh("llama", num_hidden_layers=1)
    options = dict(max_new_tokens=3, do_sample=False)  # few tokens, because the compiler looks at each length anew
    compiled = make(ours)
    with counting(ours) as counts:
        found = compiled.generate(prompt(CPU, 2), **options)
    assert bool(counts.fast) == fast and (fast or counts.reasons["model_forward"]), counts.reasons
    assert_same_tokens(found, stock.generate(prompt(CPU, 2), **options), stock)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
@over_architectures
def test_default_dtype_of_the_user(dtype, architecture, device):
    stock, ours = fresh(architecture, device)
    expected = stock.generate(**left_padded(device), **SHORT)
    torch.set_default_dtype(dtype)
    try:
        found = ours.generate(**left_padded(device), **SHORT)
        other = stock.generate(**left_padded(device), **SHORT)
        patched_then = hf_fastpath.patch(copy.deepcopy(stock), quiet=True).generate(**left_padded(device), **SHORT)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(other, expected)
    assert_same_tokens(found, expected, stock, left_padded(device)["attention_mask"])
    assert torch.equal(patched_then, found)


@over_architectures
def test_default_device_of_the_user(architecture, device):
    stock, ours = fresh(architecture, device)
    expected = stock.generate(**left_padded(device), **SHORT)
    inputs = left_padded(device)
    with torch.device(device), counting(ours) as counts:
        found = ours.generate(**inputs, **SHORT)
    assert counts.fast
    assert_same_tokens(found, expected, stock, inputs["attention_mask"])


# ---- threads -----------------------------------------------------------------------------------------------


def in_threads(*calls):
    """Run the calls at once; return their results, or raise what one of them raised."""
    results, errors = [None] * len(calls), []

    def run(index: int) -> None:
        try:
            torch.set_num_threads(1)
            results[index] = calls[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
    return results


def test_two_threads_on_one_model(device):
    stock, ours = fresh("mistral", device)
    inputs = [prompt(device, batch, 9, seed=batch) for batch in (1, 2, 1, 3)]
    expected = [stock.generate(ids, max_new_tokens=30, do_sample=False) for ids in inputs]
    with counting(ours) as counts:
        found = in_threads(*(lambda ids=ids: ours.generate(ids, max_new_tokens=30, do_sample=False) for ids in inputs))
    assert counts.fast == 7 * 30 and not counts.reasons
    for a, b in zip(found, expected):
        assert_same_tokens(a, b, stock)


def test_two_threads_on_two_models(device):
    pairs = [fresh(architecture, device) for architecture in ("gpt2", "llama")]
    ids = prompt(device, 2)
    found = in_threads(*(lambda m=ours: m.generate(ids, max_new_tokens=30, do_sample=False) for _, ours in pairs))
    for tokens, (stock, _) in zip(found, pairs):
        assert_same_tokens(tokens, stock.generate(ids, max_new_tokens=30, do_sample=False), stock)
