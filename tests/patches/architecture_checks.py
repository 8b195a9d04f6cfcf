"""The checks that every architecture goes through, written once.

``architecture_tests("gpt2")`` makes the ``test_gpt2_...`` functions, which ``test_families.py`` has of every family.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
from models import VOCAB, WINDOW, build, counting, fresh, left_padded, pair, prompt, require_native
from parity import LogitRule, RoundingCache, assert_same_tokens, float64_copy, forced_logits, walk
from said import logged
from transformers import DynamicCache, PreTrainedModel

import hf_fastpath
from hf_fastpath.architecture import architectures
from hf_fastpath.compat import CACHE
from hf_fastpath.registry import FLOAT_DTYPES

#: number of positions that the logit rule compares, over all random models of a case
POSITIONS = 256
#: families unlike each other; without --full the others are checked in fewer types and batches
CORE = ("gemma2", "gpt2", "llama", "mistral", "phi3", "qwen3")

#: families whose forward makes a mask for every token, which runs stock outside of the decode plan
ALWAYS_MASKED = ("falcon",)


def text_of(device: torch.device, batch: int, length: int, seed: int) -> torch.Tensor:
    """Return [batch, length] random tokens that are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator).to(device)


class Golden:
    """The model of one seed three times: stock, patched and float64.

    Args:
        positions: number of positions that a case is to compare on this model, in batches of 4 sequences for each 64.
    """

    def __init__(self, architecture: str, seed: int, device: torch.device, dtype: torch.dtype, positions: int):
        require_native(device)
        self.device, self.dtype, self.seed, self.batch = device, dtype, seed, positions // 16
        self.stock = build(architecture, seed).to(device, dtype)
        self.ours = hf_fastpath.patch(copy.deepcopy(self.stock), quiet=True)
        self.ref = float64_copy(self.stock)

    def text(self, length: int, batch: int | None = None) -> torch.Tensor:
        return text_of(self.device, batch or self.batch, length, self.seed)

    def rounding_cache(self) -> RoundingCache:
        return RoundingCache(self.ref.config, self.dtype)


#: cases change none of the three models and share them
shared_golden = functools.lru_cache(maxsize=4)(Golden)


@torch.no_grad()
def prefill(golden: Golden, rule: LogitRule) -> None:
    """Compare the logits of a whole prompt, without a cache."""
    text = golden.text(64, golden.batch // 4)
    rule.add(*(model(text, use_cache=False).logits for model in (golden.ours, golden.stock, golden.ref)))


def decode(golden: Golden, rule: LogitRule) -> None:
    """Compare token by token, below the window."""
    steps, first = 16, 5
    text = golden.text(first + steps)
    ref = walk(golden.ref, text, [first] + [1] * steps, golden.rounding_cache())[:, first - 1 :]
    with counting(golden.ours) as counts:
        ours = forced_logits(golden.ours, text, first)
    assert counts.fast == golden.batch * (steps + 1) and not counts.fallback, counts.reasons
    rule.add(ours, forced_logits(golden.stock, text, first), ref)


def padded(golden: Golden, rule: LogitRule, first: int = 12, pad: int = 3) -> None:
    """Compare sequences with left padding, ``pad`` more in each of four rows."""
    steps = 16
    text = golden.text(first + steps)
    mask = torch.ones_like(text)
    for row in range(golden.batch):
        mask[row, : pad * (row % 4)] = 0
    ref = walk(golden.ref, text, [first] + [1] * steps, golden.rounding_cache(), mask)[:, first - 1 :]
    with counting(golden.ours) as counts:
        ours = forced_logits(golden.ours, text, first, attention_mask=mask[:, :first])
    assert counts.fast == golden.batch * (steps + 1) and not counts.fallback, counts.reasons
    rule.add(ours, forced_logits(golden.stock, text, first, attention_mask=mask[:, :first]), ref)


def long_prompt(golden: Golden, rule: LogitRule) -> None:
    """Compare more than a tile of attention's kernels, with up to 57 tokens of padding."""
    padded(golden, rule, first=150, pad=19)


def window_edge(golden: Golden, rule: LogitRule) -> None:
    """Compare from one token before the window's end to two windows past it."""
    first, steps = WINDOW - 1, 2 * WINDOW
    text = golden.text(first + steps, golden.batch // 2)
    ref = walk(golden.ref, text, [first] + [1] * steps, golden.rounding_cache())[:, first - 1 :]
    rule.add(forced_logits(golden.ours, text, first), forced_logits(golden.stock, text, first), ref)


def chunked(golden: Golden, rule: LogitRule) -> None:
    """Compare a prompt in chunks, some tokens, then a second prompt over the same cache and more tokens."""
    chunk, first, second = 7, 21, 6
    steps = 8
    text = golden.text(first + steps + second + steps)
    turn = first + steps + second
    lengths = [chunk] * (first // chunk) + [1] * steps + [second] + [1] * steps
    ref = walk(golden.ref, text, lengths, golden.rounding_cache())
    found = []
    for model in (golden.ours, golden.stock):
        cache = hf_fastpath.FastpathCache(model.config) if model is golden.ours else DynamicCache(config=model.config)
        once = forced_logits(model, text[:, : first + steps], first, **{CACHE: cache}, prefill_chunk_size=chunk)
        # generate() has not read the token that it chose last, so the cache ends where the forced text does
        assert cache.get_seq_length() == first + steps
        again = forced_logits(model, text, turn, **{CACHE: cache})
        found.append(torch.cat((once, again), dim=1))
    expected = (ref[:, first - 1 : first + steps], ref[:, turn - 1 :])
    rule.add(*found, torch.cat(expected, dim=1))


GOLDEN: dict[str, Callable[[Golden, LogitRule], None]] = {
    "prefill": prefill,
    "decode": decode,
    "left_padded": padded,
    "long_prompt": long_prompt,
    "window_edge": window_edge,
    "chunked_continuation": chunked,
}


def architecture_tests(architecture: str) -> dict[str, Callable]:
    """Make the test functions of one architecture, by name."""
    is_core = architecture in CORE

    def over(name: str, usual: Sequence, full: Sequence):
        """Parametrize by ``full``; without --full, a family that is not in the core only by ``usual``."""
        values = [pytest.param(each, marks=[] if is_core or each in usual else pytest.mark.full) for each in full]
        return pytest.mark.parametrize(name, values, ids=lambda each: str(each).removeprefix("torch."))

    over_dtypes = over("dtype", (torch.float32, torch.bfloat16), FLOAT_DTYPES)
    #: cases in bfloat16 of a family that is not in the core: two, which are others for the next family
    place = [each.name for each in architectures()].index(architecture) % len(GOLDEN)
    in_bfloat16 = [name for number, name in enumerate(GOLDEN) if (number - place) % (len(GOLDEN) // 2) == 0]

    @pytest.mark.parametrize(
        ("case", "dtype"),
        [
            pytest.param(
                case,
                dtype,
                id=f"{case}-{str(dtype).removeprefix('torch.')}",
                marks=()
                if is_core or dtype == torch.float32 or (dtype == torch.bfloat16 and case in in_bfloat16)
                else pytest.mark.full,
            )
            for dtype in FLOAT_DTYPES
            for case in GOLDEN
        ],
    )
    def golden_matrix(case, dtype, device, golden_figures, request):
        """On every golden case, logits are as near to float64 as stock's."""
        rule = LogitRule()
        num_models = 4 if request.config.getoption("--full") else 1
        for seed in range(num_models):
            GOLDEN[case](shared_golden(architecture, seed, device, dtype, POSITIONS // num_models), rule)
        rule.check(f"{architecture} {case} {dtype} {device}", POSITIONS)
        golden_figures(architecture, device, dtype, case, *rule.means())

    @over_dtypes
    def decodes_deterministically(dtype, device):
        """The same call twice gives the same bits."""
        _, ours = pair(architecture, device, dtype)
        text = text_of(device, 2, 40, 5)
        assert torch.equal(forced_logits(ours, text, 9), forced_logits(ours, text, 9))

    @over("batch", (1, 5), (1, 2, 5, 16))
    def greedy_tokens_equal(batch, device):
        stock, ours = pair(architecture, device)
        ids = prompt(device, batch)
        options = dict(max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(ids))
        with counting(ours) as counts:
            found = ours.generate(ids, **options)
        assert (counts.fast, counts.fallback) == (24 * batch, 0), counts.reasons
        assert_same_tokens(found, stock.generate(ids, **options), stock)

    def left_padded_tokens_equal(device):
        stock, ours = pair(architecture, device)
        inputs = left_padded(device, 5, 13)
        options = dict(max_new_tokens=24, do_sample=False)
        with counting(ours) as counts:
            found = ours.generate(**inputs, **options)
        assert counts.fallback == 0 and counts.fast == 5 * 24, counts.reasons
        assert_same_tokens(found, stock.generate(**inputs, **options), stock, inputs["attention_mask"])

    def handwritten_loop_tokens_equal(device):
        """A user's own forward loop over a FastpathCache takes the fused layers, and equals stock's."""
        stock, ours = pair(architecture, device)
        text = text_of(device, 2, 30, 3)
        lengths = [9] + [1] * 21
        cache = hf_fastpath.FastpathCache(ours.config)
        with counting(ours) as counts:
            found = walk(ours, text, lengths, cache).argmax(-1)
        expected = walk(stock, text, lengths, DynamicCache(config=stock.config)).argmax(-1)
        assert cache.get_seq_length() == 30
        assert torch.equal(found, expected)
        # transformers passes a mask once a window is full, and some models' code always does
        if getattr(ours.config, "sliding_window", None) is None and architecture not in ALWAYS_MASKED:
            assert not counts.reasons, counts.reasons

    def everything_is_patched(device):
        _, ours = pair(architecture, device)
        report = hf_fastpath.report(ours)
        assert report.architecture == architecture and report.loop == "fast" and not report.declined
        declared = next(found for found in architectures() if found.name == architecture)
        expected = {"layer": 2, "attention": 2}
        if declared.mlp.class_name is not None:
            expected["mlp"] = 2
        if not declared.norm.is_torchs:
            expected["norm"] = 1 + 2 * len((*declared.layer.norms, *(declared.attention.head_norms or ())))
        assert report.patched == expected

    tests = (
        *(golden_matrix, decodes_deterministically, greedy_tokens_equal, left_padded_tokens_equal),
        *(handwritten_loop_tokens_equal, everything_is_patched),
    )
    return {f"test_{architecture}_{test.__name__}": test for test in tests}


def assert_variant_right(
    architecture: str, device: torch.device, fast: bool = True, reason: str | None = None, **changes
) -> PreTrainedModel:
    """Assert that a config that differs in ``changes`` gives stock's tokens and logits, and by which loop.

    Returns:
        The patched model.
    """
    require_native(device)
    stock = build(architecture, **changes).to(device)
    with logged("keep stock code") if reason == "declined" else nullcontext():
        ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    inputs = left_padded(device)
    options = dict(max_new_tokens=20, do_sample=False)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **options)
    assert bool(counts.fast) == fast, counts.reasons
    assert reason in (None, "declined") or reason in counts.reasons, counts.reasons
    assert_same_tokens(found, stock.generate(**inputs, **options), stock, inputs["attention_mask"])
    rule = LogitRule()
    ref, first, steps = float64_copy(stock), 5, 16
    text = text_of(device, POSITIONS // steps, first + steps, 0)
    expected = walk(ref, text, [first] + [1] * steps, RoundingCache(ref.config, torch.float32))[:, first - 1 :]
    rule.add(forced_logits(ours, text, first), forced_logits(stock, text, first), expected)
    rule.check(f"{architecture} {changes}", POSITIONS)
    return ours


def assert_same_gradients(architecture: str, device: torch.device) -> None:
    """Assert that a patched model has stock's gradients of every parameter."""
    stock, ours = fresh(architecture, device)
    ids = prompt(device, 1, 7)
    for model in (stock, ours):
        model(ids, labels=ids).loss.backward()
    for mine, expected in zip(ours.parameters(), stock.parameters()):
        torch.testing.assert_close(mine.grad, expected.grad)
