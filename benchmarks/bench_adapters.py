"""Decoding with an adapter of PEFT on all projections of a layer beside the same model without one; LoRA's also merged
in place, and taken out for another one.

    python benchmarks/bench_adapters.py --model llama-3.1-8b --rank 16
    python benchmarks/bench_adapters.py --model tinyllama-1.1b --device cpu --kinds lora dora ia3 vera loha
    python benchmarks/bench_adapters.py --model llama-3.1-8b --rank 16 --kinds --adapters 8

A listed family's step is recorded with its adapters. Weights are random. "first call" is the whole of the first
``generate()`` behind a change of the adapter, for one token: the step is recorded and proven in it, unless another
adapter of the same kind was there before. With ``--adapters``, a batch has an adapter for each row
(``adapter_names=``), beside the same batch without adapters.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

import hf_fastpath
from hf_fastpath.bench import measure, shapes
from hf_fastpath.bench.measure import DTYPES

NEW, STOCK_NEW, ROUNDS = 128, 16, 5
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: kind -> the configuration of an adapter of a rank
KINDS: dict[str, Callable[[int], Any]] = {
    "lora": lambda rank: peft.LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False),
    "dora": lambda rank: peft.LoraConfig(r=rank, target_modules=ALL, use_dora=True),
    "ia3": lambda rank: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=ALL[-1:]),
    "vera": lambda rank: peft.VeraConfig(r=rank, target_modules=ALL[:1]),
    "loha": lambda rank: peft.LoHaConfig(r=rank, target_modules=ALL),
    "lokr": lambda rank: peft.LoKrConfig(r=rank, target_modules=ALL),
    "adalora": lambda rank: peft.AdaLoraConfig(init_r=rank, r=rank, total_step=9, target_modules=ALL),
}


def our_speed(model: Any, patched: Any, ids: torch.Tensor, **how: Any) -> float:
    """Return the median tokens a second of our loop behind the first token."""
    speeds, before = [], hf_fastpath.report(patched).stats["fallback_tokens"]
    for _ in range(1 + ROUNDS):
        model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False, **how)
        speeds.append(hf_fastpath.report(patched).stats["last_tokens_per_second"])
    assert hf_fastpath.report(patched).stats["fallback_tokens"] == before, hf_fastpath.report(patched)
    return statistics.median(speeds[1:])


def seconds(model: Any, ids: torch.Tensor, count: int, **how: Any) -> float:
    started = time.perf_counter()
    model.generate(input_ids=ids, max_new_tokens=count, do_sample=False, **how).cpu()
    return time.perf_counter() - started


def stock_speed(model: Any, ids: torch.Tensor, **how: Any) -> float:
    """Return the steps a second of transformers' loop behind the first token."""
    seconds(model, ids, 2, **how)
    return STOCK_NEW / (seconds(model, ids, STOCK_NEW + 1, **how) - seconds(model, ids, 1, **how))


def speeds_with(kind: str, model: nn.Module, given: argparse.Namespace, ids: torch.Tensor) -> tuple[dict, dict]:
    """Return tokens a second, and seconds of first calls, with an adapter of a kind, which is taken off again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, KINDS[kind](given.rank)).to(DTYPES[given.dtype]).eval()
    name = "adapter" if kind == "lora" else kind
    speeds, first = {f"stock, {name}": stock_speed(adapted, ids)}, {}
    hf_fastpath.patch(adapted, quiet=True)
    first[name] = seconds(adapted, ids, 1)
    speeds[f"ours, {name}"] = our_speed(adapted, model, ids)
    if kind == "lora":
        adapted.merge_adapter()
        first["adapter merged in place"] = seconds(adapted, ids, 1)
        speeds["ours, adapter merged in place"] = our_speed(adapted, model, ids)
        adapted.unmerge_adapter()
        first["adapter again"] = seconds(adapted, ids, 1)
        adapted.add_adapter("another", KINDS[kind](given.rank))
        adapted.to(DTYPES[given.dtype]).eval().set_adapter("another")
        first["another adapter"] = seconds(adapted, ids, 1)
    print(hf_fastpath.report(model))
    hf_fastpath.unpatch(model)
    adapted.unload()
    return speeds, first


def speeds_of_rows(model: nn.Module, given: argparse.Namespace, device: torch.device) -> dict:
    """Return tokens a second of a batch whose rows have adapters of their own, and of the batch without adapters."""
    names = [f"adapter {number}" for number in range(given.adapters)]
    ids = shapes.prompt(model, given.adapters, given.context)
    speeds = {f"ours, batch {given.adapters}, no adapter": our_speed(model, model, ids)}
    hf_fastpath.unpatch(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, KINDS["lora"](given.rank), adapter_name=names[0])
        for name in names[1:]:
            adapted.add_adapter(name, KINDS["lora"](given.rank))
    adapted.to(DTYPES[given.dtype]).eval()
    what = f"batch {given.adapters}, an adapter for each row"
    speeds[f"stock, {what}"] = given.adapters * stock_speed(adapted, ids, adapter_names=names)
    hf_fastpath.patch(adapted, quiet=True)
    speeds[f"ours, {what}"] = our_speed(adapted, model, ids, adapter_names=names)
    print(hf_fastpath.report(model))
    hf_fastpath.unpatch(model)
    adapted.unload()
    return speeds


def main(argv: Sequence[str] | None = None) -> int:
    options = dict(prog=Path(__file__).name, description=__doc__)
    parser = argparse.ArgumentParser(**options, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(shapes.MODELS))
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--adapters", type=int, default=0, help="rows of a batch, with an adapter each")
    parser.add_argument("--kinds", nargs="*", default=["lora"], choices=list(KINDS))
    measure.add_csv_argument(parser)
    given = parser.parse_args(argv)
    device = torch.device(given.device)
    path = measure.chosen_csv(given.csv, "adapters", device)
    model = shapes.build_model(given.model, device, DTYPES[given.dtype])
    ids = shapes.prompt(model, 1, given.context)
    hf_fastpath.patch(model, quiet=True)
    speeds, first = {"ours, no adapter": our_speed(model, model, ids)}, {}
    hf_fastpath.unpatch(model)
    speeds["stock, no adapter"] = stock_speed(model, ids)
    linears = {type(each): name for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    assert list(linears) == [nn.Linear], f"layers of other classes: {linears}"
    for kind in given.kinds:
        more, took = speeds_with(kind, model, given, ids)
        speeds, first = speeds | more, first | took
    if given.adapters:
        hf_fastpath.patch(model, quiet=True)
        speeds |= speeds_of_rows(model, given, device)
    for name, speed in speeds.items():
        print(f"{given.model} {given.dtype}, rank {given.rank}, context {given.context}, {name}: {speed:.1f} tok/s")
        if path is not None:
            row = {"model": given.model, "dtype": given.dtype, "rank": given.rank, "context": given.context}
            row |= {"what": name, "tok_s": round(speed, 1)}
            measure.append_csv(path, [measure.environment(device) | row])
    for name, duration in first.items():
        print(f"first call, {name}: {duration:.2f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
