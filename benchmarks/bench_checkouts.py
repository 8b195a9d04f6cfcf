"""Two checkouts of hf_fastpath beside each other: short calls of ``generate()`` in turns, each in a process of its own.

    python benchmarks/bench_checkouts.py /path/to/another/checkout
    python benchmarks/bench_checkouts.py /path/to/another/checkout --weights none int4_g32 --dtype fp16 --size 22x2048

Both processes hold the same random Llama, and the calls alternate so fast that what other guests of a machine do meets
both; every second turn is in reverse order. "speed" is the median of the other checkout's time by this one's of each
turn, with the 20th and the 80th percentile: above 1, this one is faster. Both checkouts need their libraries.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from operator import truediv
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_fastpath
from hf_fastpath.bench import measure

HERE = Path(__file__).resolve().parents[1]
PROMPT = 4


def serve(size: str, dtype: str, weights: str, device: str) -> None:
    """Make a model, patch it, and answer each number of tokens on standard input with the seconds of a call."""
    torch.manual_seed(0)
    layers, width = map(int, size.split("x"))
    heads = dict(num_attention_heads=width // 64, num_key_value_heads=max(1, width // 512), head_dim=64)
    sizes = dict(hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers, vocab_size=32000)
    config = LlamaConfig(**sizes, **heads, pad_token_id=0, eos_token_id=None)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=measure.DTYPES[dtype]).eval()
    hf_fastpath.patch(model, quiet=True, **({} if weights == "none" else {"weights": weights}))
    measure.wait_for_pages(model)
    call = partial(model.generate, torch.arange(3, 3 + PROMPT, device=device)[None], do_sample=False)
    for _ in range(4):
        call(max_new_tokens=4)
    print("ready", Path(hf_fastpath.__file__).parents[1], flush=True)
    for line in sys.stdin:
        print(measure.seconds(partial(call, max_new_tokens=int(line)), torch.device(device)), flush=True)


class Served:
    """A process over one checkout, which has begun."""

    def __init__(self, checkout: Path, *arguments: str):
        environment = os.environ | {"PYTHONPATH": str(checkout), "TRANSFORMERS_VERBOSITY": "error"}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.checkout = checkout
        self.process = subprocess.Popen(command, env=environment, cwd=checkout, **pipes)

    def wait(self) -> None:
        """Wait until the model is made.

        Raises:
            RuntimeError: the process ends, or imports another checkout's package.
        """
        found = self._line()
        if found != f"ready {self.checkout}":
            raise RuntimeError(f"the process is to import hf_fastpath of {self.checkout}, and says {found!r}")

    def _line(self) -> str:
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"the process ended with status {self.process.wait()}, see its output")
        return line.strip()

    def seconds(self, tokens: int) -> float:
        print(tokens, file=self.process.stdin, flush=True)
        return float(self._line())

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def compared(other: Path, given: argparse.Namespace, weights: str) -> str:
    served = [Served(checkout, given.size, given.dtype, weights, given.device) for checkout in (other, HERE)]
    for each in served:
        each.wait()
    times: list[list[float]] = [[], []]
    for turn in range(given.rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(served[which].seconds(given.tokens))
    for each in served:
        each.end()
    speed = measure.Spread.of([*map(truediv, *times)])
    before, now = (1000 * measure.Spread.of(each).p50 for each in times)
    text = f"{given.size} {given.dtype} {weights:10} {before:8.2f} ms, this checkout {now:8.2f} ms"
    return f"{text}: {speed.p50:.3f} ({speed.p20:.3f} to {speed.p80:.3f})"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["--serve"]:
        serve(*arguments[1:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--size", default="3x2048", help="layers x features")
    parser.add_argument("--weights", nargs="+", default=["none", "int4_g32"], help="formats of patch(), or none")
    parser.add_argument("--dtype", choices=measure.DTYPES, default="fp16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=150)
    given = parser.parse_args(arguments)
    if given.rounds < 2:
        parser.error("--rounds has to be 2 at least: one turn has no percentiles")
    for weights in given.weights:
        print(compared(given.other.resolve(), given, weights), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
