"""generate() is broken off anywhere: the model, the cache and the next call are as good as before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from faults import GENERATE, Fault, places
from models import counting, left_padded, over_architectures, pair, prompt
from parity import assert_same_tokens

from hf_fastpath import FastpathCache
from hf_fastpath.compat import CACHE

FEW = dict(max_new_tokens=5, do_sample=False)
POINTS = 30


def broken_off(model, make_options: Callable[[], dict]) -> Iterator[tuple[dict, str]]:
    """Interrupt generate() with ``make_options()`` at up to POINTS places, from its first line to its last.

    Yields:
        The options and the place, after each interrupt.
    """
    state = vars(model)["_hf_fastpath"]

    def forget() -> None:
        """Forget plans, so that making plans is broken off as well."""
        state.plans.clear()

    model.generate(**make_options())  # so that one-time work of the process is done
    forget()
    options = make_options()
    with Fault(GENERATE) as whole:
        model.generate(**options)
    assert whole.lines > 100
    for at in places(whole.lines, POINTS):
        forget()
        options = make_options()
        with Fault(GENERATE, at) as fault, pytest.raises(KeyboardInterrupt):
            model.generate(**options)
        yield options, fault.where


@over_architectures
def test_interrupted_generate(architecture):
    """Wherever the interrupt lands, the next call gives stock's tokens by the fast loop."""
    stock, ours = pair(architecture, torch.device("cpu"))
    inputs = left_padded(stock.device, 2)
    expected = stock.generate(**inputs, **FEW)
    for _, where in broken_off(ours, lambda: dict(**inputs, **FEW)):
        with counting(ours) as counts:
            found = ours.generate(**inputs, **FEW)
        assert counts.fast == 10 and not counts.reasons, f"{where}: {counts.reasons}"
        assert_same_tokens(found, expected, stock, inputs["attention_mask"])


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("length", "with_config", "page_size"), ((5, False, None), (40, True, None), (45, True, 16), (5, False, 16))
)
@over_architectures
def test_users_cache_after_an_interrupt(architecture, length, with_config, page_size):
    """The layers of the user's cache agree on a length, and the text goes on from there as in stock."""
    stock, ours = pair(architecture, torch.device("cpu"))
    ids = prompt(stock.device, 1, length)
    text = stock.generate(ids, **FEW)
    expected = stock.generate(torch.cat((text, ids[:, :3]), dim=1), **FEW)

    def options() -> dict:
        cache = FastpathCache(ours.config if with_config else None, page_size=page_size)
        return dict(input_ids=ids, **{CACHE: cache}, **FEW)

    for given, where in broken_off(ours, options):
        kept = given[CACHE]
        lengths = {layer.get_seq_length() for layer in kept.layers}
        assert len(lengths) <= 1 and max(lengths, default=0) < text.shape[1], f"{where}: {lengths}"
        found = ours.generate(torch.cat((text, ids[:, :3]), dim=1), **{CACHE: kept}, **FEW)
        assert_same_tokens(found, expected, stock)


def test_interrupted_stock_loop_leaves_the_model_usable():
    """The same holds if transformers' loop runs over our modules."""
    stock, ours = pair("llama", torch.device("cpu"))
    options = dict(num_beams=2, **FEW)
    expected = stock.generate(prompt(stock.device), **options)
    for _ in broken_off(ours, lambda: dict(input_ids=prompt(stock.device), **options)):
        assert_same_tokens(ours.generate(prompt(stock.device), **options), expected, stock)


def test_copies_of_a_prefix_after_an_interrupt():
    """One of two caches that share pages is broken off: both go on as in stock."""
    stock, ours = pair("llama", torch.device("cpu"))
    ids, turn = prompt(stock.device, 1, 45), prompt(stock.device, 1, 3, seed=1)
    first = stock.generate(ids, **FEW)
    text = torch.cat((first, turn), dim=1)
    expected = stock.generate(text, **FEW)
    kept: list[FastpathCache] = []

    def options() -> dict:
        kept[:] = [FastpathCache(ours.config, page_size=16)]
        ours.generate(ids, **{CACHE: kept[0]}, **FEW)
        kept.append(copy.deepcopy(kept[0]))
        return dict(input_ids=text, **{CACHE: kept[1]}, **FEW)

    for _, where in broken_off(ours, options):
        for cache in kept:
            length = cache.get_seq_length()
            cache.crop(min(0, first.shape[1] - 1 - length))
            assert_same_tokens(ours.generate(text, **{CACHE: cache}, **FEW), expected, stock), where
