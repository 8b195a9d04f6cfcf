"""Decoding with a LoRA adapter of PEFT on all projections of a layer, unmerged and merged in place, beside the same
model without one.

    python benchmarks/bench_adapters.py --model llama-3.1-8b --rank 16

A listed family's step is recorded with its adapters. Weights are random. "first call" is the whole of the first
``generate()`` behind a change of the adapter, for one token: the step is recorded and proven in it.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

import hf_fastpath
from hf_fastpath.bench import measure, shapes
from hf_fastpath.bench.measure import DTYPES

NEW, STOCK_NEW, ROUNDS = 128, 16, 5


def our_speed(model: Any, patched: Any, ids: torch.Tensor) -> float:
    """Return the median tokens a second of our loop behind the first token."""
    speeds, before = [], hf_fastpath.report(patched).stats["fallback_tokens"]
    for _ in range(1 + ROUNDS):
        model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)
        speeds.append(hf_fastpath.report(patched).stats["last_tokens_per_second"])
    assert hf_fastpath.report(patched).stats["fallback_tokens"] == before, hf_fastpath.report(patched)
    return statistics.median(speeds[1:])


def seconds(model: Any, ids: torch.Tensor, count: int) -> float:
    started = time.perf_counter()
    model.generate(input_ids=ids, max_new_tokens=count, do_sample=False).cpu()
    return time.perf_counter() - started


def stock_speed(model: Any, ids: torch.Tensor) -> float:
    """Return the tokens a second of transformers' loop behind the first token."""
    seconds(model, ids, 2)
    return STOCK_NEW / (seconds(model, ids, STOCK_NEW + 1) - seconds(model, ids, 1))


def main(argv: Sequence[str] | None = None) -> int:
    options = dict(prog=Path(__file__).name, description=__doc__)
    parser = argparse.ArgumentParser(**options, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(shapes.MODELS))
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    measure.add_csv_argument(parser)
    given = parser.parse_args(argv)
    device = torch.device(given.device)
    path = measure.chosen_csv(given.csv, "adapters", device)
    model = shapes.build_model(given.model, device, DTYPES[given.dtype])
    ids = shapes.prompt(model, 1, given.context)
    hf_fastpath.patch(model, quiet=True)
    speeds = {"ours, no adapter": our_speed(model, model, ids)}
    hf_fastpath.unpatch(model)
    speeds["stock, no adapter"] = stock_speed(model, ids)
    linears = {type(each): name for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    assert list(linears) == [nn.Linear], f"layers of other classes: {linears}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=given.rank, target_modules="all-linear", init_lora_weights=False)
        adapted = peft.PeftModel(model, config).to(DTYPES[given.dtype]).eval()
    speeds["stock, adapter"] = stock_speed(adapted, ids)
    hf_fastpath.patch(adapted, quiet=True)
    first = {"adapter": seconds(adapted, ids, 1)}
    speeds["ours, adapter"] = our_speed(adapted, model, ids)
    adapted.merge_adapter()
    first["adapter merged in place"] = seconds(adapted, ids, 1)
    speeds["ours, adapter merged in place"] = our_speed(adapted, model, ids)
    adapted.unmerge_adapter()
    first["adapter again"] = seconds(adapted, ids, 1)
    print(hf_fastpath.report(model))
    for name, speed in speeds.items():
        print(f"{given.model} {given.dtype}, rank {given.rank}, context {given.context}, {name}: {speed:.1f} tok/s")
        if path is not None:
            row = {"model": given.model, "dtype": given.dtype, "rank": given.rank, "context": given.context}
            row |= {"what": name, "tok_s": round(speed, 1)}
            measure.append_csv(path, [measure.environment(device) | row])
    for name, took in first.items():
        print(f"first call, {name}: {took:.2f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
