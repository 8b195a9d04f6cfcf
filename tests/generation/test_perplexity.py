"""Perplexity of the trained model over held-out text, token by token."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from models import heldout_tokens, trained

import hf_fastpath


def nll(logits: torch.Tensor, text: torch.Tensor) -> float:
    """Return the mean negative log likelihood of ``text`` [1, n] under logits [1, n - 1 or n, vocab_size]."""
    return torch.nn.functional.cross_entropy(logits[0, : text.shape[1] - 1].double(), text[0, 1:]).item()


def perplexity(logits: torch.Tensor, text: torch.Tensor) -> float:
    return float(torch.tensor(nll(logits, text), dtype=torch.float64).exp())


@pytest.fixture(scope="module")
def stock_perplexity():
    """Stock's perplexity of a text in one pass, by device and tokens; the next test compares it token by token."""

    @functools.cache
    def of(device: torch.device, count: int) -> float:
        text = heldout_tokens(count).to(device)
        with torch.no_grad():
            return perplexity(trained(device)[0](text, use_cache=False).logits, text)

    return of


@pytest.fixture
def count(request) -> int:
    """Number of tokens over which other types of caches are compared."""
    return 4000 if request.config.getoption("--full") else 1500


def decoded_perplexity(model, device: torch.device, count: int, fast: bool) -> float:
    from hf_fastpath.parity.comparison import decode_logits

    text = heldout_tokens(count).to(device)
    return perplexity(decode_logits(model, text, 1, fast), text)


def test_stock_perplexity_token_by_token_equals_one_pass(device):
    """400 tokens, past the window, are computed both ways; so one pass can be the reference of the next test."""
    stock, _ = trained(device)
    text = heldout_tokens(400).to(device)
    with torch.no_grad():
        one_pass = perplexity(stock(text, use_cache=False).logits, text)
    assert abs(decoded_perplexity(stock, device, 400, fast=False) - one_pass) < 0.001


def test_perplexity_of_the_trained_model(device, stock_perplexity):
    """4,000 tokens of held-out text are decoded token by token through the cache."""
    _, ours = trained(device)
    reference = stock_perplexity(device, 4000)
    assert reference < 60, "the trained model should know its language"
    assert abs(decoded_perplexity(ours, device, 4000, fast=True) - reference) < 0.001


def test_perplexity_with_float16_kv_cache(device, count, stock_perplexity):
    """The perplexity is within 0.1 % of that with the float32 KV cache."""
    with hf_fastpath.patched(copy.deepcopy(trained(device)[0]), kv_dtype="float16", quiet=True) as ours:
        found = decoded_perplexity(ours, device, count, fast=True)
    reference = stock_perplexity(device, count)
    assert abs(found - reference) < 0.001 * reference


@pytest.mark.parametrize(("name", "share"), (("int8", 0.002), ("fp8", 0.01)))
def test_perplexity_with_quantized_kv_cache(name, share, device, count, stock_perplexity):
    with hf_fastpath.patched(copy.deepcopy(trained(device)[0]), kv_dtype=name, quiet=True) as ours:
        found = decoded_perplexity(ours, device, count, fast=True)
    reference = stock_perplexity(device, count)
    assert abs(found - reference) < share * reference
