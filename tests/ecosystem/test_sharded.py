"""Models whose weights are spread over two processes, over gloo on the CPU."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed
from models import CPU, assert_same_instances, build, instances, prompt
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.multiprocessing import start_processes

import hf_fastpath
from hf_fastpath import UnsupportedModelError

#: heads and widths that two processes can share
SIZES = dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=128, intermediate_size=96, vocab_size=128)
SECONDS = 120


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


def run(rank: int, make, folder: Path) -> None:
    """Run what each of the processes does."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
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
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU these processes would use it")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are made by fork")
@pytest.mark.parametrize("make", (by_layers, flat, flat_but_in_name), ids=lambda make: make.__name__)
def test_a_model_spread_over_processes_is_left_alone(make, tmp_path):
    """After patch() has refused it, the model works as stock; each process compares, and fails the test."""
    build("llama", **SIZES).save_pretrained(tmp_path / "model")
    processes = start_processes(run, (make, tmp_path), nprocs=2, join=False, start_method="fork")
    try:
        deadline = time.monotonic() + SECONDS
        while not processes.join(timeout=1):
            assert time.monotonic() < deadline, f"the processes have not ended after {SECONDS} s"
    finally:
        for process in processes.processes:
            process.kill()
