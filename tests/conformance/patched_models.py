"""A pytest plugin for transformers' own tests: models are patched when they are made, and outcomes are noted.

``test_transformers.py`` loads the plugin into a separate pytest, which runs in a checkout of transformers.
``--outcomes`` says where outcomes go; ``--stock`` runs the same tests on stock models.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from transformers import EncoderDecoderCache, PreTrainedModel

import hf_fastpath

#: head_dim for the models in transformers' tests, whose own heads are too small for the kernels
HEAD_DIM = 32


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", metavar="JSON", help="note the outcome of every test in this file")
    parser.addoption("--stock", action="store_true", help="patch nothing")


def pytest_configure(config: pytest.Config) -> None:
    patched = PatchedModels()
    config.pluginmanager.register(Outcomes(Path(config.getoption("--outcomes")), patched))
    if not config.getoption("--stock"):
        patched.install()


class PatchedModels:
    """Patches the models that transformers' tests make, and keeps count.

    Attributes:
        stats: statistics of every model that was patched; they outlive the model.
        loops: value of ``report(model).loop`` -> how often it came.
        refused: errors of ``patch()``.
    """

    def __init__(self) -> None:
        self.stats: list = []
        self.loops: Counter = Counter()
        self.refused: Counter = Counter()
        self.is_patching = False

    def install(self) -> None:
        """Patch models from now on at the end of ``__init__``, or once ``from_pretrained`` has their weights."""
        post_init, from_pretrained = PreTrainedModel.post_init, PreTrainedModel.from_pretrained.__func__

        @functools.wraps(post_init)
        def patched_init(model):
            post_init(model)
            self.patch(model)

        @functools.wraps(from_pretrained)
        def patched_loading(cls, *args, **kwargs):
            result = from_pretrained(cls, *args, **kwargs)
            self.patch(result[0] if isinstance(result, tuple) else result)
            return result

        PreTrainedModel.post_init = patched_init
        PreTrainedModel.from_pretrained = classmethod(patched_loading)

    def patch(self, model: PreTrainedModel) -> None:
        """Patch a model that generates and has its weights, unless ``patch()`` itself has made it as a twin."""
        if self.is_patching or not model.can_generate() or any(each.is_meta for each in model.parameters()):
            return
        for part in model.modules():
            hf_fastpath.unpatch(part)  # the base model was a whole model when it was made
        self.is_patching = True
        try:
            hf_fastpath.patch(model, quiet=True)
        except hf_fastpath.UnsupportedModelError as error:
            self.refused[str(error)] += 1
            return
        finally:
            self.is_patching = False
        self.stats.append(hf_fastpath.patching.state.state_of(model).stats)
        self.loops[hf_fastpath.report(model).loop] += 1

    def to_dict(self) -> dict:
        """Return the counts as plain data."""
        return {
            "models": len(self.stats),
            "loops": self.loops,
            "refused": self.refused,
            "fast_tokens": sum(stats.fast_tokens for stats in self.stats),
            "fallback_tokens": sum(stats.fallback_tokens for stats in self.stats),
            "reasons": sum((stats.reasons for stats in self.stats), Counter()),
        }


class Outcomes:
    """Makes tests the same in every run, and notes how they end."""

    def __init__(self, path: Path, patched: PatchedModels):
        self.path, self.patched = path, patched
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for cls in {item.cls for item in items if item.cls is not None}:
            for name, change in _CHANGES.items():
                if hasattr(cls, name):
                    setattr(cls, name, change(getattr(cls, name)))

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        seed = zlib.crc32(item.nodeid.encode())
        common = sys.modules.get("tests.test_modeling_common")
        generators = [random, numpy.random] + ([common.global_rng] if common else [])
        for generator in generators:
            generator.seed(seed)
        torch.manual_seed(seed)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test passes if its setup, its call, all its subtests and its teardown do."""
        before = self.outcomes.setdefault(report.nodeid, ("passed", ""))[0]
        if report.failed or (report.skipped and before == "passed"):
            self.outcomes[report.nodeid] = (report.outcome, str(report.longrepr)[-4000:])

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps({"outcomes": self.outcomes, **self.patched.to_dict()}, indent=1))


def with_wide_heads(set_up: Callable) -> Callable:
    """Wrap the ``setUp`` of a class of tests, so that its models get heads that the kernels take."""

    @functools.wraps(set_up)
    def widened(self):
        set_up(self)
        tester = getattr(self, "model_tester", None)
        heads = getattr(tester, "num_attention_heads", None)
        if heads is None:
            return
        wide = HEAD_DIM * heads
        sizes = {"hidden_size": wide, "embed_dim": wide, "word_embed_proj_dim": wide, "head_dim": HEAD_DIM}
        for name, size in sizes.items():
            if hasattr(tester, name):
                setattr(tester, name, size)

    return widened


def padded_on_the_left(prepare: Callable) -> Callable:
    """Wrap the inputs of tests of ``generate()``, so that padding is on the left, where generation wants it."""

    @functools.wraps(prepare)
    def prepared(self, *args, **kwargs):
        config, inputs = prepare(self, *args, **kwargs)
        mask = inputs.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            inputs["attention_mask"] = mask.sort(dim=1).values
        return config, inputs

    return prepared


def over_transformers_layers(check: Callable) -> Callable:
    """Wrap a check of caches that asks for transformers' own classes of layers with states."""

    def as_transformers(cache):
        if isinstance(cache, EncoderDecoderCache):
            parts = cache.self_attention_cache, cache.cross_attention_cache
            return EncoderDecoderCache(*map(as_transformers, parts))
        has_states = isinstance(cache, hf_fastpath.FastpathCache) and cache.state_layers
        return cache.to_dynamic() if has_states else cache

    @functools.wraps(check)
    def checked(self, *args, **kwargs):
        named = {name: as_transformers(value) for name, value in kwargs.items()}
        return check(self, *map(as_transformers, args), **named)

    return checked


#: methods of classes of tests -> the function that wraps them
_CHANGES = {
    "setUp": with_wide_heads,
    "prepare_config_and_inputs_for_generate": padded_on_the_left,
    "_check_past_key_values_for_generate": over_transformers_layers,
    "_check_caches_are_equal": over_transformers_layers,
}
