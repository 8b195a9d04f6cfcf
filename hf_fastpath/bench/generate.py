"""Whole-model benchmark: prefill and decode speed of stock transformers and of the patched model.

    hf-fastpath bench --model mistral-7b --dtype fp16 --context 128 4096

These engines run on the same weights: ``stock`` (transformers as it is), ``static``
(``cache_implementation="static"``, which transformers compiles by itself on CUDA) and ``ours``
(``hf_fastpath.patch``). ``ours-sampled`` is ``ours`` with temperature, top-k and top-p, ``ours-streamed`` is
``ours`` with a ``TextIteratorStreamer`` (batch 1), ``ours-int8-kv`` and ``ours-fp8-kv`` have a quantized KV
cache. With ``--gguf`` there is also ``llama.cpp``: its ``llama-bench``, found on PATH, runs on a GGUF file of
the same sizes, which ``benchmarks/write_gguf.py`` of the source checkout writes (batch 1, decode only).

Method. All times are of ``model.generate()``, greedy unless named otherwise, with random prompts and no end
token, so every length is exact. Prefill is the time of one call that makes one token. Decode is ``(t2 - t1) /
(n2 - n1)`` for two calls that differ only in the number of new tokens, n1 and n2: prefill, set-up and all
other costs of a call cancel out. With ``--filled`` a prompt is not read; its keys and values, all but the
last, are drawn at random, so that long contexts cost no long prompts. There is no prefill then. After an
engine is switched on, it makes untimed calls: one of the longest kind, and where a prompt is read two more for
one token, in which a graph or a recording for prompts is made. Engines alternate, every second round in reverse
order; tables give medians and, of several rounds, half the distance between the 20th and 80th percentile.
``% of R`` is the share of the measured read bandwidth that it would take to read the weights
once, and the KV cache up to the mean position or recurrent states. On a CPU, whose bandwidth drifts, the
bandwidth is measured in every round, and each round's share refers to that round's bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import hf_fastpath

from .. import arguments, traffic
from ..bandwidth import measure_read_bandwidth
from ..native import loader
from ..options import HEADS
from ..progress import announced
from ..quantization import FORMATS
from ..tables import table
from . import measure, shapes
from .engines import ENGINES, KV_DTYPES, LlamaBench, first_sentence, is_ours, random_cache
from .measure import DTYPE_NAMES, DTYPES, Spread, plus_minus
from .rounds import Timings, Workload, run_workload

DEFAULT_ENGINES = ("stock", "static", "ours")


def _row(
    model: PreTrainedModel, label: str, name: str, work: Workload, seen: Timings, bandwidth: float
) -> dict[str, object]:
    batch, context = work.prompt.shape
    prefill, token = Spread.of(seen.prefill) if seen.prefill else None, Spread.of(seen.token)
    rounds = seen.bandwidth or [bandwidth] * len(seen.token)
    bandwidth = statistics.median(rounds)
    kv = traffic.kv_bytes(model.config, work.mean_context, KV_DTYPES.get(name, model.dtype), batch) + work.state_bytes
    moved = traffic.weight_bytes(model, batch) + kv
    return {
        "model": label,
        "dtype": DTYPE_NAMES[model.dtype],
        "context": context,
        "batch": batch,
        "engine": name,
        "prefill_tok_s": round(batch * context / prefill.p50, 1) if prefill else None,
        "prefill_spread_percent": prefill.percent if prefill else None,
        "decode_tok_s": round(batch / token.p50, 2),
        "decode_spread_percent": token.percent,
        "ms_per_token": round(1000 * token.p50, 4),
        "gb_s": round(moved / token.p50 / 1e9, 1),
        "percent_of_r": round(statistics.median(100 * moved / t / r for t, r in zip(seen.token, rounds)), 1),
        "r_gb_s": round(bandwidth / 1e9, 1),
        "limit_tok_s": round(batch * bandwidth / moved, 1),
        "bytes_per_token": moved,
        "kv_bytes_per_token": kv,
        "peak_memory_bytes": seen.peak_memory,
        "first_call_s": round(seen.first_call, 2),
        "new_tokens": work.new_tokens,
        "repeats": len(seen.token),
        "note": seen.note,
    }


#: heading -> function that prints a row's cell
TABLE: dict[str, Callable[[dict[str, Any]], str]] = {
    "engine": lambda r: r["engine"],
    "prefill tok/s": lambda r: (
        f"{r['prefill_tok_s']:,.0f}{plus_minus(r['prefill_spread_percent'])}" if r["prefill_tok_s"] else ""
    ),
    "decode tok/s": lambda r: f"{r['decode_tok_s']:,.1f}{plus_minus(r['decode_spread_percent'])}",
    "ms/token": lambda r: f"{r['ms_per_token']:.3f}",
    "GB/s": lambda r: f"{r['gb_s']:.0f}" if r["gb_s"] >= 100 else f"{r['gb_s']:.1f}",
    "% of R": lambda r: f"{r['percent_of_r']:.1f}",
    "KV MB": lambda r: f"{r['kv_bytes_per_token'] / 1e6:.1f}",
    "peak GB": lambda r: f"{r['peak_memory_bytes'] / 1e9:.2f}" if r["peak_memory_bytes"] else "",
    "1st call s": lambda r: f"{r['first_call_s']:.1f}",
}


def _shown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of one workload, below its heading."""
    first = rows[0]
    head = f"\n{first['model']} {first['dtype']}, context {first['context']}, batch {first['batch']}"
    notes = [f"  {row['engine']}: {row['note']}" for row in rows if row["note"]]
    cells = [[show(row) for show in TABLE.values()] for row in rows]
    return "\n".join([head, table(list(TABLE), cells, left=("engine",), indent=2), *notes])


def bench(
    models: Sequence[str] | PreTrainedModel,
    *,
    dtype: str = "fp16",
    device: str | None = None,
    contexts: Sequence[int] = (128, 4096),
    batches: Sequence[int] = (1,),
    engines: Sequence[str] = DEFAULT_ENGINES,
    new_tokens: int = 128,
    repeats: int = 5,
    filled: bool = False,
    weights: str | None = None,
    lm_head: str = HEADS[0],
    gguf: Path | None = None,
    csv: Path | None = None,
    echo: Callable[[str], None] = print,
) -> list[dict[str, object]]:
    """Run the benchmark, and print a table for every model, context and batch as soon as it is measured.

    Args:
        models: names that :func:`shapes.shape` knows, which are built with random weights; or a model that is ready.
        dtype, device: of the models that are built.
        contexts, batches: prompt lengths and batch sizes; a length that a model has no positions for is left out, and a
            line says so.
        engines: names in :data:`ENGINES`; one that a model does not have is left out, and a line says so.
        new_tokens: tokens timed by one decode measurement.
        repeats: timed rounds.
        filled: take prompts from random caches instead of reading them.
        weights: format that the model's weights are quantized to, for our engines; or None.
        lm_head: with weights, the head's.
        gguf: file for llama.cpp, with the sizes of the one model.
        csv: file that the rows are appended to.
        echo: receives what is printed.

    Returns:
        One row for each model, context, batch and engine, as in the CSV.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if isinstance(models, PreTrainedModel):
        where = models.device
    llama = LlamaBench(gguf) if gguf is not None else None
    status = loader.ensure(where.type)
    with announced(f"measuring the read bandwidth of {where}"):
        bandwidth = measure_read_bandwidth(where)
    known = measure.environment(where)
    echo(f"{known['device']}, torch {torch.__version__}, transformers {transformers.__version__}")
    echo(f"R = {bandwidth / 1e9:.1f} GB/s, the read bandwidth; kernels {status}")
    rows: list[dict[str, object]] = []
    for entry in [models] if isinstance(models, PreTrainedModel) else models:
        if isinstance(entry, str):
            with announced(f"making a random {entry}"):
                model, label = shapes.build_model(entry, where, DTYPES[dtype]), shapes.shape(entry).label
        else:
            model, label = entry, entry.config.model_type
        if weights is not None:
            try:
                hf_fastpath.patch(model, weights=weights, lm_head=lm_head, keep_original=False)
            except ValueError as error:  # an UnsupportedModelError is one
                echo(f"{label}: left out, {first_sentence(error)}")
                continue
            label = f"{label} {weights}" + ("" if lm_head == HEADS[0] else f", {lm_head} head")
        # Short contexts come first: transformers keeps the longest static cache that it ever made, and would read
        # all of it.
        for context in sorted(contexts):
            for batch in sorted(batches):
                prompt, states = shapes.prompt(model, batch, context), traffic.state_bytes(model, batch)
                work = Workload(prompt, max(2, min(16, new_tokens // 4)), new_tokens, state_bytes=states)
                length = context + work.warm_tokens + new_tokens
                limit = getattr(model.config.get_text_config(), "max_position_embeddings", length)
                if length > limit:
                    echo(f"{label}: context {context} left out, {length} positions are more than its {limit}")
                    continue
                if filled and context > 1:
                    work.cache = random_cache(model, batch, context - 1)
                found = run_workload(model, work, engines, repeats, llama if batch == 1 else None, label)
                for name, seen in found.items():
                    if seen.left_out:
                        echo(f"{label}: engine {name} left out, {seen.left_out}")
                measured = {name: seen for name, seen in found.items() if not seen.left_out}
                made = [{**known, **_row(model, label, name, work, seen, bandwidth)} for name, seen in measured.items()]
                rows += made
                if csv is not None:
                    measure.append_csv(csv, made)
                if made:
                    echo(_shown(made))
        del model
    return rows


def _model(text: str) -> str:
    """Parse a name that :func:`shapes.shape` knows."""
    try:
        shapes.shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="hf-fastpath bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(shapes.MODELS) + "; mistral-7b:8 has the first 8 layers alone"
    parser.add_argument("--model", nargs="+", default=["mistral-7b"], type=_model, metavar="MODEL", help=known)
    parser.add_argument("--dtype", default="fp16", choices=list(DTYPES))
    parser.add_argument("--device", type=arguments.device, help="cuda, cuda:1, cpu; default: cuda if there is one")
    parser.add_argument("--context", nargs="+", type=arguments.count, default=[128, 4096])
    parser.add_argument("--batch", nargs="+", type=arguments.count, default=[1])
    parser.add_argument(
        "--engines", default=",".join(DEFAULT_ENGINES), help="comma-separated, of: " + ", ".join(ENGINES)
    )
    parser.add_argument("--new-tokens", type=arguments.count, default=128)
    parser.add_argument("--repeats", type=arguments.count, default=5)
    parser.add_argument("--filled", action="store_true", help="random keys and values instead of reading the prompt")
    parser.add_argument("--weights", choices=list(FORMATS), help="quantize the model's weights; engines: ours alone")
    parser.add_argument("--lm-head", default=HEADS[0], choices=HEADS, help="with --weights, the head's")
    parser.add_argument("--gguf", type=Path, help="also run llama-bench on this file")
    measure.add_csv_argument(parser)
    measure.add_json_argument(parser)
    given = parser.parse_args(argv)
    engines = given.engines.split(",")
    if unknown := set(engines) - set(ENGINES):
        parser.error(f"unknown engine {', '.join(sorted(unknown))}, expected {', '.join(ENGINES)}")
    if given.filled and "static" in engines:
        parser.error("engine static makes its own cache: leave it out with --filled")
    if given.weights and not all(map(is_ours, engines)):
        parser.error(f"--weights leaves nothing for {given.engines} to run on: --engines ours")
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    path = measure.chosen_csv(given.csv, "generate", torch.device(device))
    rows = bench(
        given.model,
        dtype=given.dtype,
        device=device,
        contexts=given.context,
        batches=given.batch,
        engines=engines,
        new_tokens=given.new_tokens,
        repeats=given.repeats,
        filled=given.filled,
        weights=given.weights,
        lm_head=given.lm_head,
        gguf=given.gguf,
        csv=path,
        echo=measure.no_echo if given.json else print,
    )
    if given.json:
        print(json.dumps(rows, indent=1))
    return 0 if rows else 1


if __name__ == "__main__":
    raise SystemExit(main())
