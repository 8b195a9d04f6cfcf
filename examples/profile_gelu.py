"""Before and after: the effect of one fused GELU kernel on GPT-2's forward of a 1000-token prompt.

    python examples/profile_gelu.py [--device cpu] [--dtype fp32 fp16] [--length 1000]

GPT-2's activation (``NewGELUActivation``) is eight elementwise kernels, each a pass over memory;
``fused_gelu`` is one. The script patches only that op. For GPT-2 124M with random weights it prints the
kernels of one forward (torch.profiler), those of its GELU and their time, the time of a forward launched
as usual (eager), and on a GPU the time of the forward as a CUDA graph, in which the host cannot be the
bottleneck. The row "no GELU" replaces the activation by the identity: no kernel can do better. GELU's own
kernels are found and timed by themselves, on an input of a layer's size, times the number of layers.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

import hf_fastpath

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Forward = Callable[[], torch.Tensor]


@contextlib.contextmanager
def stock(model: GPT2LMHeadModel) -> Iterator[None]:
    yield


@contextlib.contextmanager
def patched(model: GPT2LMHeadModel) -> Iterator[None]:
    hf_fastpath.patch(model, ops=["mlp"], quiet=True)
    try:
        yield
    finally:
        hf_fastpath.unpatch(model)


@contextlib.contextmanager
def no_gelu(model: GPT2LMHeadModel) -> Iterator[None]:
    blocks = model.transformer.h
    saved = [block.mlp.act for block in blocks]
    for block in blocks:
        block.mlp.act = torch.nn.Identity()
    try:
        yield
    finally:
        for block, activation in zip(blocks, saved):
            block.mlp.act = activation


VARIANTS = {"stock": stock, "patched": patched, "no GELU": no_gelu}


@dataclass
class Result:
    """One variant: kernels (operators on a CPU) of a forward, its GELU's kernels by name, their seconds, and the
    seconds of a forward."""

    count: int
    gelu: dict[str, int]
    gelu_seconds: float
    eager: float = 0.0
    graph: float | None = None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def profile_forward(forward: Forward, device: torch.device) -> tuple[dict[str, int], float]:
    """Return the kernels (on a CPU: operators that do work themselves) of one forward by name, and their seconds."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as trace:
        forward()
        synchronize(device)
    counts: dict[str, int] = {}
    microseconds = 0.0
    for event in trace.events():
        if device.type == "cuda":
            if event.device_type != torch.autograd.DeviceType.CUDA or event.name.startswith(("Memcpy", "Memset")):
                continue
            took = event.time_range.elapsed_us()
        else:
            took = event.self_cpu_time_total
            if not took or event.name.startswith("["):
                continue
        counts[event.name] = counts.get(event.name, 0) + 1
        microseconds += took
    return counts, microseconds / 1e6


def median_seconds(forward: Forward, device: torch.device, repeats: int) -> float:
    """Return the wall-clock time of one forward, from launch to the end of the device's work."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        forward()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def graph_seconds(forward: Forward, repeats: int) -> float:
    """Return the time of one forward that is captured in a CUDA graph and replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward()  # the output lives as long as the graph that writes it
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    del output
    return statistics.median(times)


def profile_gelu(model: GPT2LMHeadModel, name: str, x: torch.Tensor) -> tuple[dict[str, int], float]:
    """Return the kernels by name, and their seconds, of the GELU of all layers; ``x`` is the input of one layer's."""
    gelus: dict[str, Forward] = {
        "stock": lambda: model.transformer.h[0].mlp.act(x),
        "patched": lambda: hf_fastpath.ops.fused_gelu(x, "tanh"),
    }
    if name not in gelus:
        return {}, 0.0
    for _ in range(2):
        gelus[name]()  # the first call sets things up, so the second is timed
    profiles = [profile_forward(gelus[name], x.device) for _ in range(5)]
    layers = len(model.transformer.h)
    counts = {kernel: layers * count for kernel, count in profiles[0][0].items()}
    return counts, layers * min(seconds for _, seconds in profiles)


def measure(dtype: torch.dtype, device: torch.device, length: int, repeats: int) -> dict[str, Result]:
    """Measure every variant on the same weights and prompt; timings alternate over the variants three times."""
    with torch.device(device):
        model = GPT2LMHeadModel(GPT2Config()).to(dtype).eval()
        prompt = torch.randint(0, model.config.vocab_size, (1, length))
        x = torch.randn(1, length, 4 * model.config.n_embd, dtype=dtype)

    def forward() -> torch.Tensor:
        return model(prompt, use_cache=False, logits_to_keep=1).logits  # generate() runs a prompt so

    results: dict[str, Result] = {}
    times: dict[str, list[tuple[float, float | None]]] = {name: [] for name in VARIANTS}
    with torch.no_grad():
        for name, variant in VARIANTS.items():
            with variant(model):
                forward()
                forward()  # the first call sets things up, so the second is timed
                count = sum(profile_forward(forward, device)[0].values())
                results[name] = Result(count, *profile_gelu(model, name, x))
        for turn in range(3):
            for name in list(VARIANTS) if turn % 2 == 0 else reversed(VARIANTS):
                with VARIANTS[name](model):
                    forward()
                    eager = median_seconds(forward, device, repeats)
                    graph = graph_seconds(forward, repeats) if device.type == "cuda" else None
                    times[name].append((eager, graph))
    for name, result in results.items():
        result.eager = statistics.median(eager for eager, _ in times[name])
        if device.type == "cuda":
            result.graph = statistics.median(graph for _, graph in times[name])
    return results


def show(results: dict[str, Result], dtype: str, length: int, device: torch.device) -> None:
    unit = "kernels" if device.type == "cuda" else "operators"
    print(f"\nGPT-2 124M, {dtype}, {length} tokens")
    print(f"{'':10}{unit:>10}{'of GELU':>10}{'in GELU ms':>12}{'eager ms':>11}{'graph ms':>11}{'speed-up':>10}")
    for name, result in results.items():
        best = result.graph or result.eager
        speed_up = (results["stock"].graph or results["stock"].eager) / best
        print(
            f"{name:10}{result.count:>10}{sum(result.gelu.values()):>10}"
            f"{1e3 * result.gelu_seconds:>12.3f}{1e3 * result.eager:>11.3f}"
            f"{f'{1e3 * result.graph:.3f}' if result.graph else '-':>11}{speed_up:>9.2f}x"
        )
    for name in ("stock", "patched"):
        ranked = sorted(results[name].gelu.items(), key=lambda item: -item[1])
        print(f"  GELU of {name}: {'; '.join(f'{count} x {kernel[:110]}' for kernel, count in ranked)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", nargs="+", default=["fp32", "fp16"], choices=list(DTYPES))
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--repeats", type=int, help="timed forwards a turn; default 50 on a GPU, 3 on a CPU")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    repeats = arguments.repeats or (50 if device.type == "cuda" else 3)
    print(f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}")
    for dtype in arguments.dtype:
        show(measure(DTYPES[dtype], device, arguments.length, repeats), dtype, arguments.length, device)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
