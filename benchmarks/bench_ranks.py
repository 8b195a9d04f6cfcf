"""Tensor parallel decoding: a model spread over the GPUs of one host, ours beside transformers' own ``tp_plan``.

    torchrun --nproc-per-node 2 benchmarks/bench_ranks.py --models llama-3.1-8b llama-3.1-70b:bf16:64
    torchrun --nproc-per-node 8 benchmarks/bench_ranks.py --csv
    torchrun --nproc-per-node 2 benchmarks/bench_ranks.py --models qwen3-30b-a3b --context 128 --whole-experts

A model is ``name``, ``name:weights`` or ``name:weights:layers``, the first layers alone; weights are ``bf16`` or a
format of ``patch(weights=)``. Its weights are random. ``% of N R`` is the share of the time that it would take all GPUs
to read their weights and their part of the cache once, at the bandwidth R that is measured first; of a mixture's
experts, the chosen ones, as if all ranks had equally many. All ranks have to choose equal tokens. Before each model, a
small one of its type in float32 has to give the tokens of one GPU. NVLink multicast is off.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_sum_ranks import join_ranks, sum_times
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

import hf_fastpath
from hf_fastpath import compat, traffic
from hf_fastpath.bandwidth import measure_read_bandwidth, read_buffer
from hf_fastpath.bench import measure, shapes
from hf_fastpath.check import several_gpus
from hf_fastpath.linears.packed_linear import PackedLinear
from hf_fastpath.patching.selftest import twin_config

MODELS = ("llama-3.1-8b", "llama-3.1-70b:bf16", "llama-3.1-70b:int4_g32")
CONTEXTS = (128, 4096)
#: what is changed in the small model, so that up to eight ranks can share its heads and its vocabulary
SMALL = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 96}
#: tokens that ours and stock make in a timed call, and timed calls of ours
NEW, STOCK_NEW, ROUNDS = 128, 16, 3


def read_bytes(model: nn.Module) -> int:
    """Return the bytes of weights that a rank reads for a token, on average over ranks."""
    total = 0
    chosen = getattr(model.config, "num_experts_per_tok", None) or 0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        for parameter in module._parameters.values():
            if parameter is not None:
                count = compat.local_tensor(parameter).nbytes
                total += count * chosen // len(parameter) if parameter.dim() == 3 else count
        if isinstance(module, PackedLinear):
            total += sum(buffer.nbytes for buffer in module._buffers.values() if buffer is not None)
    return total


def on_all(value: float, device: torch.device, op: Any) -> float:
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, op)
    return found.item()


def check_alike(tokens: torch.Tensor) -> None:
    """Raise an AssertionError if ranks have other tokens than the first rank."""
    first = tokens.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, tokens), "ranks have chosen other tokens than rank 0"


def check_small(config: PreTrainedConfig, device: torch.device, has_whole_experts: bool) -> None:
    """Compare a small model of a config's type in float32 with itself on one GPU."""
    small = twin_config(config)
    for name, value in SMALL.items():
        if hasattr(small, name):
            setattr(small, name, value)
    spread = shapes.build_spread_model(small, device, torch.float32, has_whole_experts=has_whole_experts)
    whole = AutoModelForCausalLM.from_config(small, dtype=torch.float32).to(device).eval()
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            other = spread.get_parameter(name)
            parameter.copy_(other.full_tensor() if compat.is_sharded(other) else other)
        for name, buffer in whole.named_buffers():
            buffer.copy_(spread.get_buffer(name))
    ids = shapes.prompt(whole, 1, 20)
    wanted = whole.generate(ids, max_new_tokens=64, do_sample=False)
    hf_fastpath.patch(spread, quiet=True)
    found = spread.generate(ids, max_new_tokens=64, do_sample=False)
    assert hf_fastpath.report(spread).stats["fast_tokens"] == 64, hf_fastpath.report(spread)
    check_alike(found)
    assert torch.equal(found, wanted), "tokens differ from those of one GPU"


def stock_speed(model: nn.Module, ids: torch.Tensor) -> float:
    """Return the tokens a second of transformers' own loop, behind the first token."""

    def seconds(count: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    seconds(2)
    return STOCK_NEW / (seconds(STOCK_NEW + 1) - seconds(1))


def run_model(
    wanted: str,
    contexts: Sequence[int],
    stock: bool,
    bandwidth: float,
    device: torch.device,
    has_whole_experts: bool = False,
) -> list[dict]:
    """Return the rows of one model."""
    name, weights, layers, *_ = (*wanted.split(":"), "", "")
    cut = f"{name}:{layers}" if layers else name
    config = shapes.shape(cut).build_config()
    check_small(config, device, has_whole_experts)
    model = shapes.build_spread_model(config, device, torch.bfloat16, has_whole_experts=has_whole_experts)
    prompts = {context: shapes.prompt(model, 1, context) for context in contexts}
    stocks = {context: stock_speed(model, ids) if stock else None for context, ids in prompts.items()}
    quantized = weights if weights not in ("", "bf16") else None
    hf_fastpath.patch(model, weights=quantized, keep_original=quantized is None, quiet=True)
    gc.collect()
    torch.cuda.empty_cache()
    rows = []
    for context, ids in prompts.items():
        speeds = []
        for _ in range(1 + ROUNDS):
            before = hf_fastpath.report(model).stats["fast_tokens"]
            tokens = model.generate(ids, max_new_tokens=NEW, do_sample=False)
            stats = hf_fastpath.report(model).stats
            assert stats["fast_tokens"] == before + NEW, hf_fastpath.report(model)
            speeds.append(stats["last_tokens_per_second"])
        check_alike(tokens)
        speed = on_all(statistics.median(speeds[1:]), device, dist.ReduceOp.MIN)
        kv = several_gpus.spread(model, dist.get_world_size()).kv_bytes(
            traffic.kv_bytes(model.config, context + NEW / 2, torch.bfloat16)
        )
        share = speed * (read_bytes(model) + kv) / bandwidth
        rows.append(
            {
                "model": shapes.shape(name).label + (", whole experts" if has_whole_experts else ""),
                "layers": model.config.num_hidden_layers,
                "weights": quantized or "bf16",
                "ranks": dist.get_world_size(),
                "context": context,
                "tok_s": round(speed, 1),
                "percent_of_nr": round(100 * share, 1),
                "r_gb_s": round(bandwidth / 1e9, 1),
                "stock_tok_s": None if stocks[context] is None else round(stocks[context], 1),
                "sums": hf_fastpath.report(model).ranks.partition("through ")[2],
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    options = dict(prog=Path(__file__).name, description=__doc__)
    parser = argparse.ArgumentParser(**options, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--context", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--no-stock", action="store_true", help="do not time transformers' own loop")
    parser.add_argument("--whole-experts", action="store_true", help="spread mixtures by expert, not by width")
    measure.add_csv_argument(parser)
    given = parser.parse_args(argv)
    device = join_ranks()
    rank = device.index
    path = measure.chosen_csv(given.csv, "ranks", device)
    buffer = read_buffer(device)
    bandwidth = on_all(measure_read_bandwidth(device, repeats=5, buffer=buffer), device, dist.ReduceOp.MIN)
    del buffer
    torch.cuda.empty_cache()
    say = print if rank == 0 else measure.no_echo
    say(f"{dist.get_world_size()} x {torch.cuda.get_device_name()}, R = {bandwidth / 1e9:.1f} GB/s", flush=True)
    for what, time_ in sum_times(8, device).items():
        say(f"one sum of 8 KB in a graph, {what}: {time_:.2f} us", flush=True)
    for wanted in given.models:
        for row in run_model(wanted, given.context, not given.no_stock, bandwidth, device, given.whole_experts):
            say(
                f"{row['model']:30} {row['layers']:3} layers {row['weights']:9} context {row['context']:5} "
                f"{row['tok_s']:7.1f} tok/s, {row['percent_of_nr']:5.1f} % of N R, stock {row['stock_tok_s']}, "
                f"sums through {row['sums']}",
                flush=True,
            )
            if rank == 0 and path is not None:
                measure.append_csv(path, [measure.environment(device) | row])
        gc.collect()
        torch.cuda.empty_cache()
    dist.barrier(device_ids=[device.index])
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
