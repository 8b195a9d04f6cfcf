"""Two processes over which a small model is spread: on GPUs over NCCL if there are two, else on the CPU over gloo."""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from models import build, left_padded, prompt
from torch import nn
from torch.multiprocessing import ProcessRaisedException, start_processes
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_fastpath

#: heads and widths that two processes can share
SIZES = dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=128, intermediate_size=96, vocab_size=128)
COUNT = 2
NEW = 12
GREEDY = dict(max_new_tokens=NEW, do_sample=False)
#: seconds for the processes of a test
SECONDS = 120
#: what gloo says if the processes did not find each other, for which a loaded machine is enough
NOT_MET = "connectFullMesh failed"
#: environment variable of the processes: how many times such a test was started before
ATTEMPT = "HF_FASTPATH_TESTS_ATTEMPT"

#: with a single GPU, transformers would have all processes use it
needs_processes = pytest.mark.skipif(
    not hasattr(os, "fork") or torch.cuda.device_count() == 1, reason="no fork, or not a GPU for each process"
)


def on_gpus() -> bool:
    """Whether the processes use GPUs."""
    return torch.cuda.device_count() >= COUNT


def device(rank: int) -> torch.device:
    return torch.device("cuda", rank) if on_gpus() else torch.device("cpu")


def spread(folder: Path, **options: Any) -> nn.Module:
    """Load the model in ``folder`` over all processes, as ``tp_plan="auto"`` or a ``distributed_config`` says."""
    options = dict(dtype=torch.float32) | ({} if "distributed_config" in options else {"tp_plan": "auto"}) | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def attention_config(others: dict[str, str], queries: dict[str, str]) -> DistributedConfig:
    """Return a config that spreads attention in part: rules change the model's plan or, in old releases, are it."""
    changes = "ep_size" in DistributedConfig.__dataclass_fields__
    rules = others | queries if changes else queries
    plan = {f"model.layers.*.self_attn.{name}": style for name, style in rules.items()}
    return DistributedConfig(tp_size=COUNT, tp_plan=plan)


def with_whole_kv() -> DistributedConfig:
    """Return a config that leaves keys and values whole on every rank."""
    return attention_config(dict(k_proj="replicate", v_proj="replicate"), dict(q_proj="colwise", o_proj="rowwise"))


def save(folder: Path, architecture: str = "llama", **sizes: Any) -> Path:
    """Save a random model of the shared sizes."""
    build(architecture, **SIZES | sizes).save_pretrained(folder)
    return folder


def some_prompt(here: torch.device, batch: int = 1, length: int = 11) -> torch.Tensor:
    return prompt(here, batch, length) % (SIZES["vocab_size"] - 1) + 1  # 0 is the pad token


def tokens_of(model: nn.Module, inputs: dict, seed: int = 0, **options: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    return model.generate(**inputs, **GREEDY | options)


def assert_fast(model: nn.Module) -> None:
    stats = hf_fastpath.report(model).stats
    assert stats["fast_tokens"] and not stats["fallback_tokens"] and not stats["reasons"], stats


def assert_tokens(rank: int, model: nn.Module, whole: nn.Module) -> None:
    """Compare tokens of our loop with those that stock code gives of a spread model, and of the same model whole."""
    here = device(rank)
    whole = whole.to(here)
    one, padded = {"input_ids": some_prompt(here)}, left_padded(here, 3)
    padded["input_ids"] = padded["input_ids"] % (SIZES["vocab_size"] - 1) + 1
    last = whole.generate(**one, **GREEDY)[0, -4].item()
    cases = [(one, {}), (padded, {}), (one, dict(eos_token_id=last, pad_token_id=0))]
    cases += [(padded, dict(do_sample=True, top_k=20, temperature=1.5))]
    cases += [(one, dict(repetition_penalty=1.3))]
    expected = [tokens_of(model, inputs, **options) for inputs, options in cases]
    hf_fastpath.patch(model, quiet=True)
    report = hf_fastpath.report(model)
    family = model.config.model_type
    assert report.loop == "fast" and report.ranks.startswith(f"rank {rank} of {COUNT}"), (family, report)
    for (inputs, options), wanted in zip(cases, expected):
        found = tokens_of(model, inputs, **options)
        assert torch.equal(found, wanted), (family, options, found, wanted)
    assert_fast(model)
    assert torch.equal(tokens_of(model, one), whole.generate(**one, **GREEDY)), family


def assert_half_types(rank: int, folder: Path, whole: nn.Module, **options: Any) -> None:
    """Compare logits in 16 bits with exact ones: their error has to be near that of the same model whole."""
    whole = whole.to(device(rank))
    for dtype in (torch.bfloat16, torch.float16):
        model = spread(folder, dtype=dtype, **options)
        hf_fastpath.patch(model, quiet=True)
        inputs = {"input_ids": some_prompt(device(rank), 2)}
        found = tokens_of(model, inputs, return_dict_in_generate=True, output_logits=True)
        assert_fast(model)
        rounded = copy.deepcopy(whole).to(dtype)
        stock = rounded(found.sequences[:, :-1]).logits[:, -NEW:]
        logits = rounded.float()(found.sequences[:, :-1]).logits[:, -NEW:]
        error = (torch.stack(found.logits, 1).float() - logits).norm() / logits.norm()
        assert error <= 2 * (stock.float() - logits).norm() / logits.norm() + 1e-3, (dtype, error)


def meet(rank: int, folder: Path, backend: str, group: str = "all") -> None:
    """Make a process group, and wait until all have met; each attempt and ``group`` has a store of its own."""
    store = f"file://{folder}/store of {group}, {os.environ[ATTEMPT]}"
    torch.distributed.init_process_group(backend, init_method=store, rank=rank, world_size=COUNT)
    torch.distributed.barrier()


def _process(rank: int, function: Callable[..., None], folder: Path, arguments: tuple, attempt: int) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(COUNT), ATTEMPT: str(attempt)})
    torch.set_num_threads(1)
    if on_gpus():
        torch.cuda.set_device(rank)
    meet(rank, folder, "nccl" if on_gpus() else "gloo")
    function(rank, folder, *arguments)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run(function: Callable[..., None], folder: Path, *arguments: Any, seconds: float = SECONDS) -> None:
    """Run ``function(rank, folder, *arguments)`` in each process; an exception in one of them fails the test.

    Processes that did not even meet are started again, twice at most.
    """
    for attempt in range(3):
        try:
            return _run_once((function, folder, arguments, attempt), seconds)
        except ProcessRaisedException as error:
            if NOT_MET not in str(error) or attempt == 2:
                raise


def _run_once(given: tuple, seconds: float) -> None:
    method = "spawn" if on_gpus() else "fork"
    processes = start_processes(_process, given, nprocs=COUNT, join=False, start_method=method)
    try:
        deadline = time.monotonic() + seconds
        while not processes.join(timeout=1):
            assert time.monotonic() < deadline, f"the processes have not ended after {seconds} s"
    finally:
        for process in processes.processes:
            process.kill()
