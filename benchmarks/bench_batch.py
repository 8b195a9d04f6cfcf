"""Many requests at once: one thread, several threads, ``batch()``, and transformers' ways, beside what is possible.

    python benchmarks/bench_batch.py --csv
    python benchmarks/bench_batch.py --size 32x4096 --dtype bf16 --device cuda --requests 256 --prompt 512 \\
        --tokens 512 --slots 64 --threads 4 16 --csv

A size is layers x features of a Llama; the weights are random. Every way generates so many tokens for so many prompts,
whose lengths are drawn from half to three halves of ``--prompt``. Rows:

- ``one``: a single call at a time, on the patched model;
- ``threads N``: N threads, each of which makes calls one after another, with ``patch(share_steps=True)``;
- ``first of 2``: tokens a second of one thread's calls while another thread makes calls as well;
- ``beside N``: tokens a second of one call while another call's prompt of N tokens is read, from that call's beginning
  to its first token; ``longest_wait_ms`` is the longest time between two tokens then;
- ``batch``: ``hf_fastpath.batch`` with so many slots;
- ``generate_batch``: transformers' continuous batching on the unpatched model;
- ``padded``: ``generate()`` of the patched model for as many prompts as there are slots, sorted by length;
- ``bound``: tokens a second if each step takes the longer of reading weights, keys and values at the speed R of memory,
  and of its multiplications at the speed of a large product. Prompts cost nothing there.
"""

from __future__ import annotations

import contextlib
import copy
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from bench_first_token import VOCAB, model_of
from transformers import ContinuousBatchingConfig, GenerationConfig

import hf_fastpath
from hf_fastpath.bandwidth import measure_read_bandwidth
from hf_fastpath.batching.slots import text_bytes
from hf_fastpath.bench import measure
from hf_fastpath.compat import BaseStreamer
from hf_fastpath.options import USUAL_BATCH
from hf_fastpath.patching.state import state_of

#: side of the square matrices whose product tells the speed of multiplications
_SIDE = {"cuda": 8192, "cpu": 1024}


def flops_per_second(dtype: torch.dtype, device: torch.device) -> float:
    """Return the multiplications and additions a second of a large product of PyTorch's."""
    side = _SIDE[device.type]
    one, other = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    torch.mm(one, other)
    return 2 * side**3 / min(measure.seconds(lambda: torch.mm(one, other), device) for _ in range(5))


def bound(model: Any, prompts: list[list[int]], given: Any, device: torch.device) -> float:
    """Return tokens a second, see the top."""
    part = state_of(model).plans.part_of(model)
    parameters = [each for name, each in model.named_parameters() if "embed" not in name]
    weights = sum(each.nbytes for each in parameters)
    dtype = measure.DTYPES[given.dtype]
    context = sum(map(len, prompts)) / len(prompts) + given.tokens / 2
    rows = min(given.slots, len(prompts))
    moved = weights + rows * text_bytes(part, None, int(context))
    flops = 2 * rows * sum(each.numel() for each in parameters)
    return rows / max(moved / measure_read_bandwidth(device), flops / flops_per_second(dtype, device))


def by_threads(model: Any, prompts: list[list[int]], count: int, options: dict) -> None:
    """Make a call for each prompt, in so many threads."""
    waiting, threads = iter(prompts), torch.get_num_threads()
    lock = threading.Lock()

    def work() -> None:
        torch.set_num_threads(threads)
        while True:
            with lock:
                prompt = next(waiting, None)
            if prompt is None:
                return
            model.generate(torch.tensor([prompt], device=model.device), **options)

    workers = [threading.Thread(target=work) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def with_a_neighbor(model: Any, prompts: list[list[int]], options: dict) -> float:
    """Return the seconds of calls for some prompts, while another thread makes the same calls until they have ended."""
    over = threading.Event()

    def neighbor() -> None:
        while not over.is_set():
            by_threads(model, prompts[:1], 1, options)

    beside = threading.Thread(target=neighbor)
    beside.start()
    started = time.perf_counter()
    by_threads(model, prompts, 1, options)
    spent = time.perf_counter() - started
    over.set()
    beside.join()
    return spent


class _Clock(BaseStreamer):
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def beside_a_prompt(model: Any, prompt: list[int], length: int, options: dict) -> tuple[float, float, float]:
    """Return tokens a second of a call while another call's prompt of so many tokens is read, the longest time between
    two tokens in milliseconds, and the seconds from that call's beginning to its first token."""
    clock, newcomer, chosen = _Clock(), _Clock(), random.Random(length)
    ids = torch.tensor([prompt], device=model.device)
    long = torch.tensor([[chosen.randrange(3, VOCAB) for _ in range(length)]], device=model.device)
    over, threads = threading.Event(), torch.get_num_threads()

    def first() -> None:
        torch.set_num_threads(threads)
        with contextlib.suppress(_Over):
            model.generate(
                ids, streamer=clock, stopping_criteria=[_ends_at(over)], **options | {"max_new_tokens": 8192}
            )

    beside = threading.Thread(target=first)
    beside.start()
    while len(clock.times) < 24:
        time.sleep(0.001)
    begun = time.perf_counter()
    model.generate(long, streamer=newcomer, **options | {"max_new_tokens": 2})
    over.set()
    beside.join()
    ended = newcomer.times[1]
    times = [each for each in clock.times if begun <= each <= ended]
    waits = [after - before for before, after in zip([begun, *times], [*times, ended])]
    return len(times) / (ended - begun), 1000 * max(waits), ended - begun


class _Over(Exception):
    """Ends a call."""


def _ends_at(over: threading.Event) -> Any:
    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if over.is_set():
            raise _Over
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    return criterion


def padded(model: Any, prompts: list[list[int]], rows: int, options: dict) -> None:
    """Call ``generate()`` for so many prompts at a time, sorted by length."""
    ordered = sorted(prompts, key=len)
    for first in range(0, len(ordered), rows):
        some = ordered[first : first + rows]
        longest = max(map(len, some))
        ids = torch.tensor([[0] * (longest - len(each)) + each for each in some], device=model.device)
        model.generate(ids, attention_mask=(ids != 0).long(), **options)


def rows_of(given: Any) -> list[dict]:
    device, dtype = torch.device(given.device), measure.DTYPES[given.dtype]
    layers, width = map(int, given.size.split("x"))
    stock = model_of("llama", layers, width, dtype, device)
    stock.generation_config.eos_token_id = stock.config.eos_token_id = None  # every text has as many tokens
    shares = dict(share_steps=True, max_batch_size=max(USUAL_BATCH, given.slots))
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True, **shares)
    chosen = random.Random(0)
    lengths = [chosen.randint(given.prompt // 2, given.prompt + given.prompt // 2) for _ in range(given.requests)]
    prompts = [[chosen.randrange(3, VOCAB) for _ in range(max(1, length))] for length in lengths]
    options = dict(max_new_tokens=given.tokens, do_sample=False, pad_token_id=0)
    config = GenerationConfig(**options)
    few = prompts[: max(2, given.requests // 8)]

    def batch() -> None:
        for result in hf_fastpath.batch(ours, prompts, slots=given.slots, **options):
            assert result.error is None and len(result.tokens) == given.tokens, result

    def generate_batch() -> None:
        settings = ContinuousBatchingConfig(**({} if device.type == "cuda" else dict(num_blocks=64)))
        found = stock.generate_batch(prompts, generation_config=config, continuous_batching_config=settings)
        assert all(len(each.generated_tokens) == given.tokens for each in found.values())

    ways: dict[str, tuple[Any, int]] = {"one": (lambda: by_threads(ours, few, 1, options), len(few))}
    for count in given.threads:
        ways[f"threads {count}"] = (lambda count=count: by_threads(ours, prompts, count, options)), len(prompts)
    ways["first of 2"] = (lambda: with_a_neighbor(ours, few, options)), len(few)
    ways["batch"] = batch, len(prompts)
    ways["padded"] = (lambda: padded(ours, prompts, given.slots, options)), len(prompts)
    if not given.without_stock:
        ways["generate_batch"] = generate_batch, len(prompts)
    most = bound(ours, prompts, given, device)
    made = []
    for name, (run, count) in ways.items():
        run()
        before = dict(hf_fastpath.report(ours).stats["shared_steps"])
        timed = [_timed(run, device) for _ in range(given.rounds)]
        spread = measure.Spread.of([count * given.tokens / each for each in timed])
        after = hf_fastpath.report(ours).stats["shared_steps"]
        steps = {rows: number - before.get(rows, 0) for rows, number in after.items()}
        shared = sum(steps.values())
        facts: dict[str, Any] = {"way": name, "size": given.size, "dtype": given.dtype, "requests": count}
        facts |= {"prompt": given.prompt, "tokens": given.tokens, "slots": given.slots}
        facts |= {"tokens_per_second": round(spread.p50, 2), "spread_percent": spread.percent}
        facts["rows_a_step"] = round(sum(r * n for r, n in steps.items()) / shared, 2) if shared else None
        facts["percent_of_bound"] = round(100 * spread.p50 / most, 1)
        made.append(facts | dict.fromkeys(("longest_wait_ms", "first_token_ms")))
    for length in given.beside:
        beside_a_prompt(ours, prompts[0], length, options)
        found = [beside_a_prompt(ours, prompts[0], length, options) for _ in range(given.rounds)]
        spread = measure.Spread.of([speed for speed, _, _ in found])
        facts = dict(made[0], way=f"beside {length}", requests=1, tokens_per_second=round(spread.p50, 2))
        facts |= dict(spread_percent=spread.percent, rows_a_step=None, percent_of_bound=None)
        facts["longest_wait_ms"] = round(max(wait for _, wait, _ in found), 1)
        made.append(facts | {"first_token_ms": round(1000 * min(seconds for _, _, seconds in found), 1)})
    bounds = dict(made[0], way="bound", requests=len(prompts), tokens_per_second=round(most, 2))
    return [*made, bounds | {"spread_percent": None, "rows_a_step": None, "percent_of_bound": 100.0}]


def _timed(run: Any, device: torch.device) -> float:
    """Return the seconds of a run; those that the run itself gives, if it gives any."""
    started = time.perf_counter()
    found = run()
    measure.synchronize(device)
    return found if isinstance(found, float) else time.perf_counter() - started


def text_of(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        shared = "" if row["rows_a_step"] is None else f", {row['rows_a_step']:.1f} rows a step"
        speed = f"{row['tokens_per_second']:10.1f} tok/s{measure.plus_minus(row['spread_percent'])}"
        if row["longest_wait_ms"] is not None:
            waits = (
                f"waits {row['longest_wait_ms']:.1f} ms at most; the other's first token {row['first_token_ms']:.1f} ms"
            )
            lines.append(f"{row['way']:16} {row['size']:8} {speed}, {waits}")
            continue
        lines.append(f"{row['way']:16} {row['size']:8} {speed}, {row['percent_of_bound']:5.1f} % of the bound{shared}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser_of(__file__, __doc__, rounds=3)
    parser.add_argument("--size", default="4x512")
    parser.add_argument("--dtype", choices=measure.DTYPES, default="fp32")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--threads", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--beside", nargs="*", type=int, default=[1024], help="tokens of prompts beside a call")
    parser.add_argument("--without-stock", action="store_true", help="leave generate_batch() out")
    given = parser.parse_args(argv)
    measure.print_groups([rows_of(given)], text_of, given, "batch")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
