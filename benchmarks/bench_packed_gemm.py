"""Prompt benchmark: a layer's products of many rows with quantized weights, beside products with unquantized weights.

    python benchmarks/bench_packed_gemm.py --model mistral-7b --dtype fp16 bf16 --rows 17 64 256 1024 4096 --csv
    python benchmarks/bench_packed_gemm.py --whole --dtype fp16 bf16 --rows 512 1024 2048 --formats int8

Method. Each of the four products of a layer with a gated MLP (q, k, v; output; gate and up; down) is timed by itself.
``linear`` is what the unquantized model runs: ``F.linear``, and on the CPU ``gemm``. The other columns are
``packed_gemm`` in each format. Copies of the arguments, which together no cache holds, are taken in turn, as in
``bench_ops.py``. Columns alternate, every second round in reverse order, because a GPU that gets warm gets slower. The
table has sums over the four products and, in brackets, per cent of ``linear``; the file has each product's median with
half the distance between the 20th and 80th percentile. ``--whole`` does the same for ``generate()`` reading prompts of
so many tokens, with patched models in one process: one with unquantized weights and one for each format.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
from collections.abc import Callable

import bench_ops
import torch
from torch.nn import functional
from transformers import PreTrainedModel

import hf_fastpath
from hf_fastpath import arguments, ops, traffic
from hf_fastpath.bench import measure, shapes
from hf_fastpath.bench.measure import DTYPES, Spread
from hf_fastpath.native import loader
from hf_fastpath.ops.packed_gemv import random_weight
from hf_fastpath.quantization import FORMATS
from hf_fastpath.registry import Sample

LINEAR = "linear"


def products(model: str) -> list[tuple[int, int]]:
    """Return (in_features, out_features) of a layer's products."""
    config = shapes.shape(model).build_config()
    hidden = config.hidden_size
    width, kv_width, inner = traffic.layer_widths(config)
    return [(hidden, width + 2 * kv_width), (width, hidden), (hidden, 2 * inner), (inner, hidden)]


def times(
    k: int, n: int, rows: int, dtype: torch.dtype, formats: list[str], rounds: int, device: torch.device
) -> dict[str, Spread]:
    """Return column -> seconds of one product."""
    x = torch.randn(rows, k, device=device, dtype=dtype)
    samples = {LINEAR: Sample(x, torch.randn(n, k, device=device, dtype=dtype))}
    samples |= {name: Sample(x, *random_weight(FORMATS[name], n, k, device), None) for name in formats}
    timers = {}
    for way, sample in samples.items():
        unquantized = ops.gemm.overload if device.type == "cpu" else functional.linear
        product = unquantized if way == LINEAR else ops.packed_gemm.overload
        sets = bench_ops.argument_sets(sample, device)
        timers[way] = bench_ops.timer(lambda each, product=product: product(*each.args), sets, len(sets))
    return measure.alternate(timers, rounds)


def whole_models(name: str, dtype: torch.dtype, formats: list[str], device: torch.device) -> dict[str, PreTrainedModel]:
    """Return column -> a patched model, all of the same weights, made by all threads of the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or threads)
    model = shapes.build_model(name, device, dtype)
    models = {}
    for way in formats:
        models[way] = hf_fastpath.patch(copy.deepcopy(model), quiet=True, weights=way, keep_original=False)
    torch.set_num_threads(threads)
    return {LINEAR: hf_fastpath.patch(model, quiet=True), **models}


def prompt_times(
    models: dict[str, PreTrainedModel], tokens: int, rounds: int, device: torch.device
) -> dict[str, Spread]:
    """Return column -> seconds of a prompt and the token behind it."""

    def reading(model: PreTrainedModel) -> Callable[[], float]:
        ids = shapes.prompt(model, 1, tokens)
        options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0)
        return functools.partial(measure.seconds, lambda: model.generate(ids, **options), device)

    timers = {way: reading(model) for way, model in models.items()}
    measure.alternate(timers, 2)
    return measure.alternate(timers, rounds)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mistral-7b", choices=list(shapes.MODELS))
    parser.add_argument("--device", type=arguments.device, help="cuda, cuda:1, cpu; default: cuda if there is one")
    parser.add_argument("--dtype", nargs="+", default=["fp16"], choices=list(DTYPES))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument(
        "--rows", nargs="+", type=arguments.count, default=[17, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    )
    parser.add_argument("--rounds", type=arguments.count, default=7)
    parser.add_argument("--whole", action="store_true", help="prompts of whole models instead of products")
    measure.add_csv_argument(parser)
    chosen = parser.parse_args(given)
    if not chosen.whole and not hasattr(shapes.shape(chosen.model).build_config(), "num_attention_heads"):
        parser.error(f"{chosen.model} has no attention, of which the products would be: give --whole")
    device = torch.device(chosen.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    print(loader.status()[device.type])
    path = measure.chosen_csv(chosen.csv, "packed_gemm", device)
    for dtype in chosen.dtype:
        given_as = DTYPES[dtype], chosen.formats
        models = whole_models(chosen.model, *given_as, device) if chosen.whole else None
        for rows in chosen.rows:
            if models is None:
                with torch.inference_mode():
                    sizes = products(chosen.model)
                    found = {size: times(*size, rows, *given_as, chosen.rounds, device) for size in sizes}
            else:
                found = {("", ""): prompt_times(models, rows, chosen.rounds, device)}
            sums = {way: 1e6 * sum(of[way].p50 for of in found.values()) for way in (LINEAR, *chosen.formats)}
            line = (f"{way} {us:.0f} ({100 * us / sums[LINEAR]:.0f})" for way, us in sums.items())
            print(f"{chosen.model} {dtype} {rows:>5} rows, us:", ", ".join(line), flush=True)
            same = measure.environment(device) | {"model": chosen.model, "dtype": dtype, "rows": rows}
            table = [
                same
                | {"in_features": k, "out_features": n, "way": way, "us": round(1e6 * spread.p50, 2)}
                | {"spread_percent": spread.percent}
                for (k, n), of in found.items()
                for way, spread in of.items()
            ]
            if path:
                measure.append_csv(path, table)
        models = None  # frees them before the next models are made


if __name__ == "__main__":
    main()
