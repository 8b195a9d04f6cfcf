"""A GGUF file in its own bits, beside the file dequantized: tokens a second of ``generate()``, batch 1.

    python benchmarks/bench_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf --device cpu --dtype fp32 bf16 --csv

Method. ``stock`` is the model that transformers makes of the file, whose weights it dequantizes; ``dequantized`` is
that model, patched; ``packed`` is what ``from_gguf()`` loads. The three take turns in one process. A time is that of
``generate()`` with ``--tokens`` more tokens, less that without them, divided by the tokens; the table has the median of
``--rounds``. ``bytes`` are those of the model's tensors, each counted once.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

import hf_fastpath
from hf_fastpath import arguments
from hf_fastpath.bench import measure
from hf_fastpath.bench.measure import DTYPES, Spread
from hf_fastpath.native import loader


def models_of(file: Path, dtype: torch.dtype, device: torch.device) -> dict[str, nn.Module]:
    """Return column -> model."""

    def dequantized() -> nn.Module:
        loaded = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=dtype)
        return loaded.to(device).eval()

    return {
        "stock": dequantized(),
        "dequantized": hf_fastpath.patch(dequantized(), quiet=True),
        "packed": hf_fastpath.from_gguf(file, dtype=dtype, device=device, quiet=True),
    }


def nbytes(model: nn.Module) -> int:
    """Return the bytes of a model's tensors."""
    tensors = {each.data_ptr(): each.nbytes for each in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


def speeds(
    models: dict[str, nn.Module], context: int, tokens: int, rounds: int, device: torch.device
) -> dict[str, Spread]:
    """Return column -> seconds of a token."""

    def timer(model: nn.Module) -> Callable[[], float]:
        ids = torch.arange(1, context + 1, device=device)[None]
        options = dict(attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, eos_token_id=None)

        def call(count: int) -> object:
            return model.generate(ids, min_new_tokens=count, max_new_tokens=count, **options)

        return functools.partial(measure.seconds_per_token, call, tokens, device)

    timers = {way: timer(model) for way, model in models.items()}
    measure.alternate(timers, 1)
    return measure.alternate(timers, rounds)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", type=arguments.device, help="cuda, cuda:1, cpu; default: cuda if there is one")
    parser.add_argument("--dtype", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument("--context", type=arguments.count, default=32)
    parser.add_argument("--tokens", type=arguments.count, default=32)
    parser.add_argument("--rounds", type=arguments.count, default=5)
    measure.add_csv_argument(parser)
    chosen = parser.parse_args(given)
    device = torch.device(chosen.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    loader.ensure(device.type, None)
    path = measure.chosen_csv(chosen.csv, "gguf", device)
    for dtype in chosen.dtype:
        models = models_of(chosen.file, DTYPES[dtype], device)
        found = speeds(models, chosen.context, chosen.tokens, chosen.rounds, device)
        rows = [
            measure.environment(device)
            | {"file": chosen.file.name, "dtype": dtype, "context": chosen.context, "way": way}
            | {"tokens_per_second": round(1 / spread.p50, 2), "spread_percent": spread.percent}
            | {"bytes": nbytes(models[way])}
            for way, spread in found.items()
        ]
        for row in rows:
            size = row["bytes"] / 1e6
            print(
                f"{row['file']} {dtype} {row['way']:>11}: {row['tokens_per_second']:.1f} tok/s, {size:.0f} MB",
                flush=True,
            )
        if path:
            measure.append_csv(path, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
