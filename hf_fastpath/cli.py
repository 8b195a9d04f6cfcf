"""Command line: ``python -m hf_fastpath info | explain | verify | bench``."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import __version__, build, loader, registry
from .architecture import architectures
from .reasons import REASONS


def info() -> dict[str, Any]:
    """What this installation has: versions, devices, which kernels serve them and why, ops, architectures."""
    import transformers

    for device in build.TARGETS:
        loader.ensure(device, lambda line: print(line, file=sys.stderr))
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "hf_fastpath": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_threads": torch.get_num_threads(),
        "gpus": gpus,
        "kernels": {device: str(status) for device, status in loader.status().items()},
        "ops": sorted(registry.all_ops()),
        "architectures": [architecture.name for architecture in architectures()],
    }


def _load_model(arguments: argparse.Namespace) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = getattr(torch, arguments.dtype)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).to(arguments.device).eval()
    return model, AutoTokenizer.from_pretrained(arguments.model)


def _verify(arguments: argparse.Namespace) -> int:
    from .verification import verify

    model, tokenizer = _load_model(arguments)
    result = verify(model, tokenizer(arguments.prompt, return_tensors="pt"), arguments.max_new_tokens)
    print(json.dumps(result.to_dict(), indent=1) if arguments.json else result)
    return 0 if result.ok else 1


def _bench(rest: Sequence[str]) -> int:
    """Run the benchmark script of the source checkout."""
    script = Path(__file__).resolve().parent.parent / "benchmarks" / "bench_generate.py"
    if not script.is_file():
        print("hf_fastpath: the benchmarks are in the source checkout, which this is not", file=sys.stderr)
        return 1
    import runpy

    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *rest]
    runpy.run_path(str(script), run_name="__main__")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hf-fastpath", description="Fast decoding for transformers models.")
    commands = parser.add_subparsers(dest="command", required=True)
    info_parser = commands.add_parser("info", help="versions, devices, kernels and why")
    info_parser.add_argument("--json", action="store_true")
    explain = commands.add_parser("explain", help="what a reason code means")
    explain.add_argument("code", nargs="?", help="a reason code; none: all of them")
    verify = commands.add_parser("verify", help="compare a model patched with itself unpatched")
    verify.add_argument("model", help="folder or name of a causal LM")
    verify.add_argument("--prompt", default="import os\n\n\ndef", help="text to continue")
    verify.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    verify.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    verify.add_argument("--max-new-tokens", type=int, default=64)
    verify.add_argument("--json", action="store_true")
    commands.add_parser("bench", help="decode speed beside stock; see benchmarks/bench_generate.py", add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "bench":
        return _bench(rest)
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    if arguments.command == "info":
        found = info()
        if arguments.json:
            print(json.dumps(found, indent=1))
        else:
            for name, value in found.items():
                lines = value.values() if isinstance(value, dict) else [value]
                text = [", ".join(map(str, line)) if isinstance(line, list) else str(line) for line in lines]
                print(f"{name + ':':15}" + f"\n{'':15}".join(text))
        return 0
    if arguments.command == "explain":
        if arguments.code is not None and arguments.code not in REASONS:
            parser.error(f"unknown reason code {arguments.code!r}; known: {', '.join(REASONS)}")
        for code in REASONS if arguments.code is None else (arguments.code,):
            print(f"{code}: {REASONS[code]}")
        return 0
    return _verify(arguments)
