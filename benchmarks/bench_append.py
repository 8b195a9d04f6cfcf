"""Append benchmark: several new tokens at once behind a filled cache, stock and ours in every type, and llama.cpp.

    python benchmarks/bench_append.py --model tinyllama-1.1b --context 512 --tokens 2 4 8 16 32
    python benchmarks/bench_append.py --device cuda --model llama-3.1-8b --dtype fp16 --context 16384 --microbatches

Ways: ``turn`` is a conversation that goes on: ``generate()`` with the cache reads the new tokens and makes one.
``forward`` calls the model with the new tokens and the cache, for logits of all of them. ``drafts`` is what greedy
search with drafts does to verify drafts, which for stock is ``forward``. Engine ``flash`` is stock that calls PyTorch's
fused attention without masks. With ``--microbatches`` the tokens do not stand behind the context: the context itself is
read in pieces of so many tokens. Tokens a second are then those of the whole context, of which up to eight pieces,
evenly spread, are timed. With ``--gguf`` there is also llama.cpp's prompt speed at that depth: its ``llama-bench``,
found on PATH, runs on a GGUF file of the same sizes, which ``benchmarks/write_gguf.py`` writes.

Method. There is a model with random weights for each type, and caches have random keys and values. Every round takes
all engines, every second round in reverse order. An engine is switched on and makes each call twice untimed and
``--calls`` times timed; the cache is cropped after every call. The table gives medians with half the distance between
the 20th and 80th percentile. ``% of R`` is the share of the read bandwidth, measured in every round, that it would take
to read the weights and the cache once.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_fastpath import arguments, traffic
from hf_fastpath.bandwidth import measure_read_bandwidth, read_buffer
from hf_fastpath.bench import measure, shapes
from hf_fastpath.bench.engines import LLAMA_CPP, LlamaBench, NoSuchEngine, copied_cache, engine, random_cache
from hf_fastpath.bench.measure import DTYPES, Spread
from hf_fastpath.compat import CACHE, layer_kinds
from hf_fastpath.decode.plans.draft_plan import WIDTHS
from hf_fastpath.native import loader
from hf_fastpath.patching.state import state_of
from hf_fastpath.progress import announced

ENGINES = ("stock", "flash", "ours")
WAYS = ("turn", "forward", "drafts")
#: number of pieces of a context that are timed, at most
PLACES = 8
#: number of untimed calls first: if steps are captured, the first call makes them and the second captures them
UNTIMED = 2


def appends(model: PreTrainedModel, generate: Callable, cache: Any, text: torch.Tensor) -> dict[str, Callable]:
    """Return way -> a call that appends the last tokens of ``text``, those that ``cache`` does not hold."""
    new = text[:, cache.get_seq_length() :]
    calls = {"turn": lambda: generate(text, 1, cache), "forward": lambda: model(new, **{CACHE: cache})}
    state = state_of(model)
    if state is not None:
        part, tokens = state.plans.part_of(model), new[0].tolist()
        pieces = [tokens[at : at + WIDTHS[-1]] for at in range(0, len(tokens), WIDTHS[-1])]
        widths = [next(width for width in WIDTHS if width >= len(piece)) for piece in pieces]

        def drafts() -> None:
            for piece, width in zip(pieces, widths):
                plan = state.plans.draft_plan(part, cache, width)
                plan.begin(cache, torch.tensor([cache.get_seq_length()], device=model.device), None)
                plan.read(piece)
                plan.end()

        calls["drafts"] = drafts
    return calls


def piece_starts(context: int, count: int) -> list[int]:
    """Return where the timed pieces of ``count`` tokens begin in a context."""
    pieces = max(1, context // count)
    chosen = min(pieces, PLACES)
    return [(2 * place + 1) * pieces // (2 * chosen) * count for place in range(chosen)]


def timed(call: Callable[[], object], cache: Any, length: int, calls: int, device: torch.device) -> list[float]:
    """Return the seconds of ``calls`` calls after UNTIMED others; each call leaves ``cache`` as long as it was."""
    seconds = []
    for _ in range(UNTIMED + calls):
        seconds.append(measure.seconds(call, device))
        cache.crop(length - cache.get_seq_length())
    return seconds[UNTIMED:]


def run_round(
    name: str,
    model: PreTrainedModel,
    context: int,
    counts: Sequence[int],
    ways: Sequence[str],
    calls: int,
    microbatches: bool,
) -> dict[tuple[int, str], list[float]]:
    """Return (new tokens, way) -> seconds of one round of one engine; for microbatches the mean over their places."""
    seen = {}
    filled = random_cache(model, 1, context)
    with engine(name, model) as generate, torch.inference_mode():
        for count in counts:
            cache = copied_cache(name, filled)
            if hasattr(cache, "activate_past_recording"):
                cache.activate_past_recording()
            places: dict[str, list[list[float]]] = {}
            for start in reversed(piece_starts(context, count) if microbatches else [context]):
                cache.crop(start - cache.get_seq_length())
                text = shapes.prompt(model, 1, start + count)
                for way, call in appends(model, generate, cache, text).items():
                    if way in ways:
                        places.setdefault(way, []).append(timed(call, cache, start, calls, model.device))
            for way, lists in places.items():
                seen[count, way] = [statistics.mean(seconds) for seconds in zip(*lists)]
    return seen


def why_not(model: str, length: int, microbatches: bool) -> str | None:
    """Return why tokens cannot be taken off a cache of the model again after they were appended, or None.

    Args:
        length: positions of the context and the tokens.
    """
    kinds = layer_kinds(shapes.shape(model).build_config().get_text_config(decoder=True)) or []
    if any(kind.states for kind in kinds):
        return f"{model} keeps states, which no token can be taken back from: choose a model whose cache has none"
    narrow = [kind.window for kind in kinds if kind.window is not None and kind.window < length]
    if narrow and microbatches:
        return f"--microbatches takes a context apart; {model} has windows of {narrow[0]}: stay within one"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    options = dict(prog=Path(__file__).name, description=__doc__)
    parser = argparse.ArgumentParser(**options, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tinyllama-1.1b", choices=list(shapes.MODELS))
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--device", default="cpu", type=arguments.device, help="cuda, cuda:1, cpu")
    parser.add_argument("--context", default=512, type=arguments.count)
    parser.add_argument("--tokens", nargs="+", type=arguments.count, default=[2, 4, 8, 16, 32])
    parser.add_argument("--microbatches", action="store_true", help="read the context itself in pieces of TOKENS")
    parser.add_argument("--engines", nargs="+", default=["stock", "ours"], choices=ENGINES)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rounds", type=arguments.count, default=5)
    parser.add_argument("--calls", type=arguments.count, default=1, help="timed calls of a way in a round")
    parser.add_argument("--gguf", type=Path, help="also run llama-bench on this file")
    measure.add_csv_argument(parser)
    given = parser.parse_args(argv)
    if (reason := why_not(given.model, given.context + max(given.tokens), given.microbatches)) is not None:
        parser.error(reason)
    device = torch.device(given.device)
    path = measure.chosen_csv(given.csv, "append", device)
    llama = LlamaBench(given.gguf) if given.gguf is not None else None
    status = loader.ensure(device.type)
    with announced(f"making a random {given.model} of each type"):
        models = {name: shapes.build_model(given.model, device, DTYPES[name]) for name in given.dtype}
        buffer = read_buffer(device)
    known = measure.environment(device) | {"isa": os.environ.get("HF_FASTPATH_CPU", "")}
    print(f"{known['device']}: torch {torch.__version__}; kernels {status}", flush=True)

    seen: dict[tuple[str, str, int, str], list[float]] = {}
    left_out: set[tuple[str, str]] = set()
    bandwidths: list[float] = []
    runs = [(name, dtype) for dtype in models for name in given.engines]
    if llama is not None:
        runs.append((LLAMA_CPP, "fp16"))
    for turn in range(given.rounds):
        bandwidths.append(measure_read_bandwidth(device, repeats=3, buffer=buffer))
        for name, dtype in runs if turn % 2 == 0 else reversed(runs):
            if (name, dtype) in left_out:
                continue
            if name == LLAMA_CPP:
                found = {(n, "turn"): [llama.seconds_of_prompt(given.context, n)] for n in given.tokens}
            else:
                settings = given.context, given.tokens, given.ways, given.calls, given.microbatches
                try:
                    found = run_round(name, models[dtype], *settings)
                except NoSuchEngine as error:
                    print(f"{given.model} {dtype}: engine {name} left out, {error}")
                    left_out.add((name, dtype))
                    continue
            for (count, way), seconds in found.items():
                seen.setdefault((name, dtype, count, way), []).extend(seconds)

    bandwidth = statistics.median(bandwidths)
    print(f"R = {bandwidth / 1e9:.1f} GB/s; {given.model}, context {given.context}")
    for name, dtype, count, way in sorted(seen, key=lambda key: (key[2], WAYS.index(key[3]), key[:2])):
        spread = Spread.of(times := seen[name, dtype, count, way])
        like = models.get(dtype, next(iter(models.values())))
        moved = traffic.weight_bytes(like, count) * DTYPES[dtype].itemsize // like.dtype.itemsize
        moved += traffic.kv_bytes(like.config, given.context + count, DTYPES[dtype])
        row = {"model": shapes.shape(given.model).label, "dtype": dtype, "engine": name, "way": way}
        row |= {"context": given.context, "new_tokens": count, "ms": round(1e3 * spread.p50, 4)}
        row |= {"tok_s": round(count / spread.p50, 1), "spread_percent": spread.percent}
        row |= {"percent_of_r": round(100 * moved / spread.p50 / bandwidth, 1), "r_gb_s": round(bandwidth / 1e9, 1)}
        row |= {"timings": len(times)}
        print(
            f"{count:4} {way:8} {name:10} {dtype:5} {row['ms']:10.1f} ms{measure.plus_minus(row['spread_percent'])}"
            f"{row['tok_s']:9.1f} tok/s {row['percent_of_r']:6.1f} % of R",
            flush=True,
        )
        if path is not None:
            measure.append_csv(path, [known | row])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
