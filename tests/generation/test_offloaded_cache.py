"""A cache lies in host memory: layers that are brought back wait for copies that are on their way out.

transformers 5.17 does not wait, so that a fast model would read data that have not arrived.
"""

from __future__ import annotations

import pytest
import torch
from models import SHORT, fresh, pair, prompt
from parity import assert_same_tokens
from transformers import DynamicCache

import hf_fastpath
from hf_fastpath import compat
from hf_fastpath.compat import CACHE

#: parts of a model that are patched
OPS = ("all", ("layer",), ("attention",))


class Stream:
    """A stand-in for the stream on which layers come back."""

    def __init__(self, log: list):
        self.log = log

    def wait_stream(self, other) -> None:
        self.log.append(("waits for", other))


class OffloadingCache(DynamicCache):
    """Notes in ``log`` when each layer would start to bring back the next one; no layer is moved."""

    def __init__(self, config):
        super().__init__(config=config)
        self.log: list = []
        self.offloading, self.prefetch_stream = True, Stream(self.log)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.log.append(("brings back", layer_idx))
        return self.layers[layer_idx].update(key_states, value_states)


@pytest.fixture
def not_awaited(monkeypatch):
    """Behave as transformers 5.17, on a machine that may have no GPU."""
    monkeypatch.setattr(compat.caches, "_PREFETCH_WAITS", False)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "the default stream")


def assert_waits(log: list, layers: int) -> None:
    """Assert that every layer of every forward waits before it brings anything back."""
    updates = [place for place, (what, _) in enumerate(log) if what == "brings back"]
    assert [log[place][1] for place in updates] == [*range(layers)] * (len(updates) // layers) and updates
    assert all(log[place - 1] == ("waits for", "the default stream") for place in updates), log


@pytest.mark.parametrize("ops", OPS, ids=str)
@pytest.mark.parametrize("architecture", ("gpt2", "llama", "falcon"))
def test_every_layer_waits(architecture, ops, not_awaited, device):
    """Layers wait in the prompt, in a step, and in a prompt over a cache that is not empty."""
    stock, ours = fresh(architecture, device)
    hf_fastpath.unpatch(ours)
    hf_fastpath.patch(ours, ops=ops, quiet=True)
    cache, ids = OffloadingCache(ours.config), prompt(device, 2, 12)
    with torch.no_grad():
        for part in ids.split((7, 1, 1, 3), dim=1):
            logits = ours(part, **{CACHE: cache}, use_cache=True).logits
        expected = stock(ids).logits[:, -3:]
    torch.testing.assert_close(logits, expected)
    assert_waits(cache.log, layers=2)
    assert sum(what == "brings back" for what, _ in cache.log) == 4 * 2


def test_generate_waits(not_awaited, device):
    stock, ours = pair("llama", device)
    cache = OffloadingCache(ours.config)
    found = ours.generate(prompt(device, 2), **{CACHE: cache}, **SHORT)
    assert_same_tokens(found, stock.generate(prompt(device, 2), **SHORT), stock)
    assert_waits(cache.log, layers=2)


def test_nothing_waits_where_transformers_does(monkeypatch, device):
    """Our code does not wait if transformers waits, nor for a cache that stays on the device."""
    _, ours = pair("llama", device)
    monkeypatch.setattr(compat.caches, "_PREFETCH_WAITS", True)
    cache = OffloadingCache(ours.config)
    ours.generate(prompt(device), **{CACHE: cache}, **SHORT)
    assert {what for what, _ in cache.log} == {"brings back"}
    monkeypatch.setattr(compat.caches, "_PREFETCH_WAITS", False)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: pytest.fail("a stream was asked for"))
    ours.generate(prompt(device), **{CACHE: DynamicCache(config=ours.config)}, **SHORT)


def test_it_is_known_which_versions_wait():
    """The first tested version does not wait, the second does."""
    version = compat.transformers_version()
    if version not in compat.TESTED_TRANSFORMERS:
        pytest.skip(f"transformers {version} is not among {compat.TESTED_TRANSFORMERS}")
    assert compat.caches._PREFETCH_WAITS == (version != compat.TESTED_TRANSFORMERS[0])
