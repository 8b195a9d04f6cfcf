"""Models whose weights are spread over two processes, over gloo on the CPU."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed
from models import CPU, assert_same_instances, build, instances, prompt
from processes import SIZES, run
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import hf_fastpath
from hf_fastpath import UnsupportedModelError


def by_layers(folder: Path) -> tuple[nn.Module, nn.Module]:
    model = build("llama", **SIZES)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model), model


def flat(folder: Path, **options) -> tuple[nn.Module, nn.Module]:
    model = build("llama", **SIZES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(model, device_id=CPU, **options), model


def flat_but_in_name(folder: Path) -> tuple[nn.Module, nn.Module]:
    return flat(folder, use_orig_params=True)


def refused(model: nn.Module) -> None:
    """Assert that no part of the model is touched, whatever the options, and that the error's first line says why."""
    before = instances(model)
    for options in ({}, dict(strict=True), dict(ops="norm")):
        with pytest.raises(UnsupportedModelError) as caught:
            hf_fastpath.patch(model, quiet=True, **options)
        first = str(caught.value).splitlines()[0]
        assert type(model).__name__ in first and "spread over processes" in first, first
        assert_same_instances(instances(model), before)
    with pytest.raises(ValueError, match="not patched"):
        hf_fastpath.report(model)


def compare(rank: int, folder: Path, make) -> None:
    """Compare what a process computes before and behind patch(), which refuses."""
    outer, model = make(folder)

    def compute() -> torch.Tensor:
        ids = prompt(CPU, length=9) % SIZES["vocab_size"]
        if not isinstance(outer, FullyShardedDataParallel):
            return model.generate(ids, max_new_tokens=6, do_sample=False)
        with torch.no_grad():
            return outer(ids, use_cache=False).logits

    expected = compute()
    for each in {id(each): each for each in (outer, model)}.values():
        refused(each)
    assert torch.equal(compute(), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU these processes would use it")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are made by fork")
@pytest.mark.parametrize("make", (by_layers, flat, flat_but_in_name), ids=lambda make: make.__name__)
def test_a_model_spread_over_processes_is_left_alone(make, tmp_path):
    """After patch() has refused it, the model works as stock; each process compares, and fails the test."""
    build("llama", **SIZES).save_pretrained(tmp_path / "model")
    run(compare, tmp_path, make)
