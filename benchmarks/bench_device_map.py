"""Decoding with a ``device_map``, beside the same model on one GPU: over several GPUs of one process, or with the last
layers in host memory.

    python benchmarks/bench_device_map.py --model llama-3.1-8b --gpus 2
    python benchmarks/bench_device_map.py --model llama-3.1-8b --offload 8

Over GPUs, layers are spread evenly, as ``device_map="balanced"`` does. For layers in host memory, the row "limit" is
what the bus allows: the speed at which page-locked memory comes to the GPU, over the bytes of the layers. Weights are
random.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model

import hf_fastpath
from hf_fastpath.bench import measure, shapes
from hf_fastpath.bench.measure import DTYPES
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.placed import page_lock

NEW, STOCK_NEW, ROUNDS = 128, 16, 5
#: bytes that are copied to measure the bus
BUS_BYTES = 1 << 30


def places(model: Any, gpus: int, offload: int) -> dict[str, int | str]:
    """Return a device map that spreads layers evenly, except for the last ``offload``, which stay on the CPU.

    Head and final norm are on the last GPU; a head that is tied to the embeddings is beside them.
    """
    layers = len(model.model.layers) - offload
    found: dict[str, int | str] = {f"model.layers.{number}": number * gpus // layers for number in range(layers)}
    found |= {f"model.layers.{layers + number}": "cpu" for number in range(offload)}
    head = 0 if model.config.tie_word_embeddings else gpus - 1
    return found | {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": gpus - 1, "lm_head": head}


def our_speed(model: Any, ids: torch.Tensor) -> float:
    """Return the median tokens a second of our loop behind the first token."""
    speeds = []
    for _ in range(1 + ROUNDS):
        model.generate(ids, max_new_tokens=NEW, do_sample=False)
        speeds.append(hf_fastpath.report(model).stats["last_tokens_per_second"])
    assert not hf_fastpath.report(model).stats["fallback_tokens"], hf_fastpath.report(model)
    return statistics.median(speeds[1:])


def stock_speed(model: Any, ids: torch.Tensor) -> float:
    """Return the tokens a second of transformers' loop behind the first token."""

    def seconds(count: int) -> float:
        started = time.perf_counter()
        model.generate(ids, max_new_tokens=count, do_sample=False).cpu()
        return time.perf_counter() - started

    seconds(2)
    return STOCK_NEW / (seconds(STOCK_NEW + 1) - seconds(1))


def bus_bandwidth(device: torch.device) -> float:
    """Return the bytes a second that come to a GPU from memory that is page-locked where it lies: the fastest copy."""
    source = torch.ones(BUS_BYTES, dtype=torch.uint8, device="cpu")
    pages = page_lock.lock([source], device)
    first, end = (each - source.data_ptr() for each in page_lock.whole_pages(source))
    source = source[first:end]  # copies that begin beside locked pages wait for the host
    target, seconds = torch.empty_like(source, device=device), []
    for _ in range(ROUNDS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        target.copy_(source, non_blocking=True)
        ended.record()
        ended.synchronize()
        seconds.append(began.elapsed_time(ended) / 1000)
    del pages
    return source.nbytes / min(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    options = dict(prog=Path(__file__).name, description=__doc__)
    parser = argparse.ArgumentParser(**options, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(shapes.MODELS))
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    spread = parser.add_mutually_exclusive_group()
    spread.add_argument("--gpus", type=int, default=2)
    spread.add_argument(
        "--offload", type=int, default=0, metavar="LAYERS", help="layers in host memory, beside one GPU"
    )
    parser.add_argument("--context", type=int, default=128)
    measure.add_csv_argument(parser)
    given = parser.parse_args(argv)
    device = torch.device("cuda", 0)
    path = measure.chosen_csv(given.csv, "device_map", device)
    model = shapes.build_model(given.model, device, DTYPES[given.dtype])
    ids = shapes.prompt(model, 1, given.context)
    speeds = {"stock, one GPU": stock_speed(model, ids)}
    hf_fastpath.patch(model, quiet=True)
    speeds["ours, one GPU"] = our_speed(model, ids)
    first = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    hf_fastpath.unpatch(model)
    gpus, where = given.gpus, f"{given.gpus} GPUs"
    if given.offload:
        gpus, where = 1, f"{given.offload} layers offloaded"
        model.to("cpu")  # what the map leaves on the CPU is kept where it lies
    dispatch_model(model, places(model, gpus, given.offload), main_device=0, skip_keys=CACHE)
    speeds[f"stock, {where}"] = stock_speed(model, ids)
    hf_fastpath.patch(model, quiet=True)
    speeds[f"ours, {where}"] = our_speed(model, ids)
    print(hf_fastpath.report(model))
    if given.offload:
        bus = bus_bandwidth(device)
        print(f"page-locked memory comes to the GPU at {bus / 1e9:.1f} GB/s")
        speeds[f"limit, {where}"] = bus / hf_fastpath.report(model).host_bytes
    equal = int((model.generate(ids, max_new_tokens=NEW, do_sample=False) == first).long().cumprod(1).sum())
    for name, speed in speeds.items():
        print(f"{given.model} {given.dtype}, context {given.context}, {name}: {speed:.1f} tok/s", flush=True)
        if path is not None:
            row = {"model": given.model, "dtype": given.dtype, "context": given.context, "what": name}
            measure.append_csv(path, [measure.environment(device) | row | {"tok_s": round(speed, 1)}])
    print(f"the first {equal - given.context} of {NEW} tokens are those of one GPU")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
