"""generate() over caches in pages beside caches of one buffer a layer: texts, sequences of one prompt, beams, copies.

    python benchmarks/bench_pages.py --model mistral-7b --page-size 16 64 --csv

Method. Every kind of generation runs once untimed; then caches alternate, every second round in reverse order. Times
are of whole calls, prompts included, except for ``decode tok/s``, which is what ``report()`` says about the last call.
Peak memory is what a call took on top of the model. In ``copies``, each of eight short texts goes on from a copy of the
cache of one long prompt, which is made before. The columns of pages are the numbers at the time when most pages were
used.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

import hf_fastpath
from hf_fastpath import FastpathCache, arguments
from hf_fastpath.bench import measure, shapes
from hf_fastpath.bench.measure import DTYPES
from hf_fastpath.compat import CACHE

#: kind of generation -> batch, and options of generate()
WAYS: dict[str, tuple[int, dict]] = {
    "1 text": (1, {}),
    "8 texts": (8, {}),
    "8 sequences of a prompt": (1, {"do_sample": True, "num_return_sequences": 8}),
    "4 beams": (1, {"num_beams": 4}),
}
COPIES = "8 copies of a prefix"


def texts(model: PreTrainedModel, way: str, context: int, new_tokens: int, page_size: int | None) -> Callable[[], None]:
    """Make the function of one call."""
    options = dict(do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0)
    if way != COPIES:
        batch, own = WAYS[way]
        ids = shapes.prompt(model, batch, context)
        return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options | own)
    ids, prefix = shapes.prompt(model, 1, context), FastpathCache(model.config, page_size=page_size)
    model.generate(ids, **{CACHE: prefix}, **options | dict(max_new_tokens=1))

    def copies() -> None:
        held = [copy.deepcopy(prefix) for _ in range(8)]
        for seed, cache in enumerate(held):
            turn = torch.cat((ids, shapes.prompt(model, 1, 16, seed=seed)), dim=1)
            model.generate(turn, **{CACHE: cache}, **options)

    return copies


class Timer:
    """Times calls of one kind over one kind of cache, and keeps the last call's numbers."""

    def __init__(self, model: PreTrainedModel, way: str, context: int, new_tokens: int, page_size: int | None):
        self.model, self.page_size, self.peak = model, page_size, 0
        self.arguments = way, context, new_tokens, page_size
        self.stats: dict = {}

    def __call__(self) -> float:
        device = self.model.device
        with hf_fastpath.patched(self.model, page_size=self.page_size, quiet=True):
            call = texts(self.model, *self.arguments)
            call()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            seconds = measure.seconds(call, device)
            if device.type == "cuda":
                self.peak = torch.cuda.max_memory_allocated(device) - before
            self.stats = hf_fastpath.report(self.model).stats
        return seconds


def main(argv: Sequence[str] | None = None) -> int:
    options = dict(prog=Path(__file__).name, description=__doc__)
    parser = argparse.ArgumentParser(**options, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mistral-7b", choices=list(shapes.MODELS))
    parser.add_argument("--dtype", default="fp16", choices=list(DTYPES))
    parser.add_argument("--device", type=arguments.device, help="cuda, cuda:1, cpu; default: cuda if there is one")
    parser.add_argument("--context", type=arguments.count, default=2000)
    parser.add_argument("--new-tokens", type=arguments.count, default=64)
    parser.add_argument("--page-size", nargs="+", type=arguments.count, default=[64])
    parser.add_argument("--ways", nargs="+", default=[*WAYS, COPIES], choices=[*WAYS, COPIES])
    parser.add_argument("--repeats", type=arguments.count, default=3)
    measure.add_csv_argument(parser)
    given = parser.parse_args(argv)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    path = measure.chosen_csv(given.csv, "pages", device)
    model = shapes.build_model(given.model, device, DTYPES[given.dtype])
    known = measure.environment(device)
    print(f"{known['device']}: {given.model} {given.dtype}, context {given.context}, {given.new_tokens} new tokens")
    for way in given.ways:
        sizes = {"buffers": None} | {f"pages of {size}": size for size in given.page_size}
        timers = {name: Timer(model, way, given.context, given.new_tokens, size) for name, size in sizes.items()}
        for name, spread in measure.alternate(timers, given.repeats).items():
            found, pages = timers[name], timers[name].stats["pages"] or {}
            row = dict(
                model=given.model,
                dtype=given.dtype,
                context=given.context,
                new_tokens=given.new_tokens,
                way=way,
                cache=name,
                ms=round(1e3 * spread.p50, 1),
                decode_tok_s=round(found.stats["last_tokens_per_second"] or 0, 1),
                peak_mb=round(found.peak / 1e6),
                pages_used=pages.get("most_used", ""),
                pages_unshared=pages.get("most_unshared", ""),
            )
            print(
                f"{way:24} {name:14} {row['ms']:9.1f} ms {row['decode_tok_s']:8.1f} tok/s "
                f"{row['peak_mb']:6} MB {row['pages_used']!s:>6} of {row['pages_unshared']!s:>6} pages",
                flush=True,
            )
            if path is not None:
                measure.append_csv(path, [{**known, **row}])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
