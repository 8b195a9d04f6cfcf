"""exponential_race: the common tests; the tokens that transformers' warpers keep, and torch.multinomial's choice."""

from __future__ import annotations

import functools
import itertools
from unittest import mock

import pytest
import torch
from checks import assert_matches, common_tests, is_native, over_dtypes
from memory import same_bits
from transformers.generation import logits_process as warpers

from hf_fastpath.ops.exponential_race import SPEC
from hf_fastpath.registry import Sample

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def make(logits: torch.Tensor, noise: torch.Tensor | None = None, **settings) -> Sample:
    """Make a call; settings that are not given are neutral."""
    values = list((NEUTRAL | settings).values())
    noise = torch.empty(logits.shape, device=logits.device).exponential_() if noise is None else noise
    return Sample(logits, noise, torch.tensor(values, dtype=torch.float64, device=logits.device))


def race(logits: torch.Tensor, noise: torch.Tensor | None = None, **settings) -> torch.Tensor:
    return SPEC(*make(logits, noise, **settings).args)


def warped(scores: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """Apply transformers' warpers to ``scores``, with a stable sort, which defines the order of equals."""
    steps = [warpers.TemperatureLogitsWarper(temperature)]
    steps += [warpers.TopKLogitsWarper(top_k)] if top_k else []
    steps += [warpers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    steps += [warpers.MinPLogitsWarper(min_p)] if min_p else []
    with mock.patch("torch.sort", functools.partial(torch.sort, stable=True)):
        for step in steps:
            scores = step(None, scores)
    return scores


def assert_keeps(logits: torch.Tensor, **settings) -> None:
    """Assert that the op keeps the tokens that transformers keeps; if float32 and float64 differ, either is right.

    Nobody keeps tokens whose probability float32 cannot hold.
    """
    weights = race(logits, torch.ones_like(logits, dtype=torch.float32), **settings)
    scores = [warped(logits.to(dtype), **settings) for dtype in (torch.float32, torch.float64)]
    got, single, double = (
        p > 1e-30 for p in (weights / weights.sum(-1, keepdim=True), *(s.softmax(-1) for s in scores))
    )
    wrong = ((got != single) & (got != double)).nonzero()
    assert not len(wrong), f"{settings}, {tuple(logits.shape)}: {len(wrong)} tokens differ, first {wrong[0].tolist()}"


def odd_sizes(device, dtype):
    for rows, vocab_size in ((1, 2), (2, 7), (3, 33), (16, 1025), (5, 4097), (0, 10)):
        logits = torch.randn(rows, vocab_size, device=device).to(dtype)
        yield make(logits, temperature=0.9)
        yield make(logits, top_k=20, top_p=0.8, min_p=0.01)
    yield make(torch.randn(1, 128256, device=device).to(dtype), top_p=0.9)


globals().update(common_tests(SPEC, odd_sizes))


SETTINGS = [
    dict(zip(NEUTRAL, values))
    for values in itertools.product((0.1, 0.7, 1.0, 5.0), (0, 1, 50, 1500), (0.0, 0.5, 0.95, 1.0), (0.0, 0.1, 1.0))
]


@over_dtypes
@pytest.mark.parametrize(("rows", "vocab_size"), ((4, 1), (4, 7), (16, 307), (2, 5001)))
def test_exponential_race_keeps_what_the_warpers_keep(device, dtype, rows, vocab_size):
    """The half types have many equal logits: top-k keeps all equals of the last, top-p the last of them."""
    logits = (2 * torch.randn(rows, vocab_size, device=device)).to(dtype)
    for settings in SETTINGS:
        assert_keeps(logits, **settings)


@over_dtypes
@pytest.mark.parametrize("vocab_size", (32000, 50257))
def test_exponential_race_keeps_what_the_warpers_keep_of_a_real_vocabulary(device, dtype, vocab_size):
    logits = (3 * torch.randn(2, vocab_size, device=device)).to(dtype)
    for settings in SETTINGS[::13]:
        assert_keeps(logits, **settings)


@over_dtypes
def test_exponential_race_keeps_equals_as_a_stable_sort_orders_them(device, dtype):
    """There are few values and many equals, zeros of both signs and -inf among them."""
    for vocab_size, values in itertools.product((300, 3000), ((0.0, -0.0), (1.0, 0.0, -0.0), (-3.0, 2.0, -torch.inf))):
        values = torch.tensor(values, device=device).to(dtype)
        logits = values[torch.randint(len(values), (3, vocab_size), device=device)]
        for settings in (
            {"top_p": 0.7773},
            {"top_p": 0.1071},
            {"top_p": 0.0},
            {"top_k": 5, "top_p": 0.5533},
            {"top_k": 250},
        ):
            assert_keeps(logits, **settings)


@over_dtypes
def test_exponential_race_chooses_as_multinomial(device, dtype):
    """The same seed gives the same token and the same state of the generator."""
    logits = (2 * torch.randn(16, 3001, device=device)).to(dtype)
    for settings in SETTINGS[::7]:
        torch.manual_seed(3)
        found = race(logits, torch.empty(logits.shape, device=device).exponential_(), **settings).argmax(-1)
        after = torch.rand(1, device=device)
        torch.manual_seed(3)
        expected = torch.multinomial(warped(logits.float(), **settings).softmax(-1), 1)[:, 0]
        assert torch.equal(found, expected), settings
        assert torch.equal(after, torch.rand(1, device=device))


@over_dtypes
def test_exponential_race_never_chooses_a_removed_token(device, dtype):
    """Neither weights of zero nor noise of zero make a token win that has no chance."""
    logits = torch.full((1, 1000), -torch.inf, device=device, dtype=dtype)
    logits[0, 500:600] = torch.linspace(-200, 0, 100, device=device).to(dtype)
    for noise in (0.0, 1e-45, 1.0, 80.0):
        for settings in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"temperature": 0.05}):
            result = race(logits, torch.full(logits.shape, noise, device=device), **settings)
            assert result.amax() > 0 and not result.isnan().any()
            removed = warped(logits.float(), **settings).isneginf()
            assert not result[removed].any() and not removed[0, result.argmax(-1)]


def test_exponential_race_is_reproducible(device):
    """Tokens that top-k keeps reach their threads in any order; the result has one order."""
    sample = make((2 * torch.randn(16, 32000, device=device)).half(), top_k=900, top_p=0.9)
    first = assert_matches(SPEC, sample)
    assert all(same_bits(first, SPEC(*sample.args)) for _ in range(20))


@pytest.mark.parametrize("value", (torch.inf, torch.nan, -torch.nan, -torch.inf))
def test_exponential_race_refuses_undefined_rows(value):
    """torch.multinomial refuses such rows as well; on CUDA both are assertions that end the process."""
    logits = torch.full((3, 9), -torch.inf) if value == -torch.inf else torch.zeros(3, 9)
    logits[1, 4] = value
    functions = [SPEC.reference, SPEC.overload] if is_native(SPEC, logits.device) else [SPEC.reference]
    for function, settings in itertools.product(functions, ({}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1})):
        with pytest.raises(RuntimeError, match="a row of logits holds inf or nan"):
            function(*make(logits, **settings).args)
