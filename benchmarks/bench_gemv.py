"""Chain benchmark: every product of a model's decode step, one after the other, without attention.

    python benchmarks/bench_gemv.py --model mistral-7b tinyllama-1.1b gpt2-124m --dtype fp16 --csv
    python benchmarks/bench_gemv.py --device cpu --model tinyllama-1.1b --dtype fp16 bf16 fp32

Method. A chain holds the weights of all layers, more than any cache holds, and each product takes the one before as
its input, as in a decode step. Attention is left out: its output projection takes the queries. All of a chain is in
one CUDA graph, and events time the graph's replay. Chains: ``hf_fastpath`` has norms, activations and residuals inside
the products, and asks for weights before the kernel in front is complete; ``no overlap`` is the same without
programmatic launch; ``F.linear`` is the same in PyTorch calls; ``read`` is one plain read of the same bytes for each
product: what a product without any exchange would take. On a CPU the calls themselves are timed, without
``no overlap``, which would be the same. Chains alternate; rows give the median with the 20th and 80th percentile.
``% of R`` is the weights' bytes over the time, over the read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional
from transformers import PreTrainedConfig

from hf_fastpath import ops, traffic
from hf_fastpath.bandwidth import measure_read_bandwidth
from hf_fastpath.bench import measure, shapes
from hf_fastpath.bench.measure import DTYPE_NAMES, DTYPES
from hf_fastpath.choices import Activation, NormKind
from hf_fastpath.native import loader

Step = Callable[[], object]


#: types of which :class:`Chain` knows the products
TYPES = ("gpt2", "llama", "mistral")


class Chain:
    """Weights and calls of one model's products.

    Args:
        config: config of a GPT-2, Llama or Mistral.
        batch: rows of x, 1 to 16.

    Attributes:
        weight_bytes: bytes that one pass reads.
        sizes: bytes of every product's weights, in order.
    """

    def __init__(self, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, batch: int):
        self.gpt2 = config.model_type == "gpt2"
        self.device, self.dtype = device, dtype
        hidden = config.hidden_size
        self.width, kv_width, inner = traffic.layer_widths(config)
        self.x = self._randn(batch, hidden)
        self.norm = self._randn(hidden)
        self.layers = [
            (
                self._weight(hidden, self.width + 2 * kv_width),
                self._weight(self.width, hidden),
                [self._weight(hidden, inner) for _ in range(1 if self.gpt2 else 2)],
                self._weight(inner, hidden),
            )
            for _ in range(config.num_hidden_layers)
        ]
        self.head = self._randn(config.vocab_size, hidden, std=hidden**-0.5)
        products = [w for qkv, out, up, down in self.layers for w in ([qkv], [out], up, [down])] + [[self.head]]
        self.sizes = [sum(weight.nbytes for weight in weights) for weights in products]
        self.weight_bytes = sum(self.sizes)

    def _randn(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype) * std

    def _weight(self, k: int, n: int) -> torch.Tensor:
        """Make a weight as the model stores it: [in, out] in a GPT-2, else [out, in]."""
        return self._randn(*((k, n) if self.gpt2 else (n, k)), std=k**-0.5)

    def fused(self, programmatic_launch: bool) -> torch.Tensor:
        """Make one pass through the ops as a decode plan calls them."""
        gemv, swiglu = ops.gemv.overload, ops.gemv_swiglu.overload
        kind, bias = (NormKind.LAYER, self.norm) if self.gpt2 else (NormKind.RMS, None)
        norm = (kind, self.norm, bias, 1e-5, programmatic_launch)
        plain = (NormKind.NONE, None, None, 0.0, programmatic_launch)
        x = self.x
        for qkv, out, up, down in self.layers:
            queries = gemv(x, qkv, None, None, Activation.NONE, self.gpt2, *norm)[:, : self.width].contiguous()
            x = gemv(queries, out, None, x, Activation.NONE, self.gpt2, *plain)
            if self.gpt2:
                inner = gemv(x, up[0], None, None, Activation.GELU_TANH, True, *norm)
            else:
                inner = swiglu(x, *up, Activation.SILU, *norm)
            x = gemv(inner, down, None, x, Activation.NONE, self.gpt2, *plain)
        return gemv(x, self.head, None, None, Activation.NONE, False, *norm)

    def torch_calls(self) -> torch.Tensor:
        """Make the same pass in PyTorch calls."""

        def linear(x, weight):
            return x @ weight if self.gpt2 else functional.linear(x, weight)

        def normed(x):
            if self.gpt2:
                return functional.layer_norm(x, x.shape[-1:], self.norm, self.norm)
            return functional.rms_norm(x, x.shape[-1:], self.norm, 1e-5)

        x = self.x
        for qkv, out, up, down in self.layers:
            x = x + linear(linear(normed(x), qkv)[:, : self.width], out)
            inner = [linear(normed(x), weight) for weight in up]
            gate = functional.gelu(inner[0], approximate="tanh") if self.gpt2 else functional.silu(inner[0]) * inner[1]
            x = x + linear(gate, down)
        return functional.linear(normed(x), self.head)

    def read(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Read the bytes of every product, at rotating places of ``buffer``."""
        seen, at, count = [], 0, buffer.numel()
        for size in self.sizes:
            elements = size // buffer.element_size()
            if at + elements > count:
                at = 0
            seen.append(ops.read_stream.overload(buffer[at : at + elements], 0))
            at += elements
        return seen


def rows_of(name: str, dtype: torch.dtype, batch: int, rounds: int, device: torch.device) -> list[dict[str, object]]:
    """Time the chains of one model."""
    bandwidth = measure_read_bandwidth(device)
    chain = Chain(shapes.shape(name).build_config(), device, dtype, batch)
    largest = max(chain.sizes)
    buffer = chain._randn(min(chain.weight_bytes, max(4 * largest, 2**30)) // chain.head.element_size())
    ways: dict[str, Step] = {
        "hf_fastpath": lambda: chain.fused(True),
        "no overlap": lambda: chain.fused(False),
        "F.linear": chain.torch_calls,
        "read": lambda: chain.read(buffer),
    }
    with torch.inference_mode():
        if device.type == "cuda":
            timers = {way: measure.graph_timer(step, device) for way, step in ways.items()}
        else:
            del ways["no overlap"]
            timers = {way: functools.partial(measure.seconds, step, device) for way, step in ways.items()}
            measure.alternate(timers, 1)
        found = measure.alternate(timers, rounds)
    return [
        {
            **measure.environment(device),
            "model": shapes.shape(name).label,
            "dtype": DTYPE_NAMES[dtype],
            "batch": batch,
            "chain": way,
            "ms": round(1e3 * spread.p50, 4),
            "spread_percent": spread.percent,
            "percent_of_r": round(100 * chain.weight_bytes / spread.p50 / bandwidth, 1),
            "r_gb_s": round(bandwidth / 1e9, 1),
            "weight_bytes": chain.weight_bytes,
            "products": len(chain.sizes),
        }
        for way, spread in found.items()
    ]


def model(text: str) -> str:
    """Parse a name that :func:`shapes.shape` knows, of a type that :class:`Chain` knows."""
    try:
        kind = shapes.shape(text).model_type
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if kind not in TYPES:
        raise argparse.ArgumentTypeError(f"{text} is a {kind}, expected one of {', '.join(TYPES)}")
    return text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["mistral-7b", "tinyllama-1.1b", "gpt2-124m"], type=model)
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["fp16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=9)
    measure.add_csv_argument(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: give --device cpu")
    print(loader.status()[arguments.device])
    device = torch.device(arguments.device)
    path = measure.chosen_csv(arguments.csv, "gemv", device)
    for name in arguments.model:
        for dtype in arguments.dtype:
            for batch in arguments.batch:
                rows = rows_of(name, DTYPES[dtype], batch, arguments.rounds, device)
                for row in rows:
                    print(
                        f"{row['model']:15} {row['dtype']} x {row['batch']:<3}{row['chain']:12}{row['ms']:9.4f} ms"
                        f"{measure.plus_minus(row['spread_percent'], 1)} "
                        f"{row['percent_of_r']:6.1f} % of R = {row['r_gb_s']} GB/s",
                        flush=True,
                    )
                if path:
                    measure.append_csv(path, rows)


if __name__ == "__main__":
    main()
