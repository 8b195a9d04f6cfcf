"""Command line: ``python -m hf_fastpath info | explain | verify | profile | bench``.

torch and transformers, which take seconds, are imported by the commands that need them.
"""

from __future__ import annotations

import argparse
import difflib
import json
import platform
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import __version__, arguments
from ..choices import HEADS, PackedFormat
from ..progress import announced
from ..reasons import REASONS
from ..tables import table
from . import profile_command

FORMATS = tuple(format.label for format in PackedFormat)


def _own_device() -> str:
    """Return the device that is meant if none is named."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def info() -> dict[str, Any]:
    """Return what this installation has: versions, devices, their kernels and why, ops, architectures."""
    import torch
    import transformers

    from .. import ops
    from ..architecture import architectures
    from ..native import loader

    for device in loader.status():
        loader.ensure(device)
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "hf_fastpath": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_features": str(loader.cpu_choice() or ""),
        "cpu_threads": torch.get_num_threads(),
        "gpus": gpus,
        "kernels": {device: str(status) for device, status in loader.status().items()},
        "ops": sorted(ops.__all__),
        "architectures": [architecture.name for architecture in architectures()],
    }


def _info(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        if given.routes:
            _print_routes(routes(), given.json)
        else:
            _print_info(info(), given.json)
    except ValueError as error:  # a variable that has no valid value
        parser.error(str(error))
    return 0


def _print_routes(rows: list[dict[str, Any]], as_json: bool) -> None:
    columns = list(rows[0]) if rows else ["name"]
    cells = [[each if isinstance(each, str) else ",".join(each) for each in row.values()] for row in rows]
    print(json.dumps(rows, indent=1) if as_json else table(columns, cells, left=columns))


def _print_info(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        lines = value.values() if isinstance(value, dict) else [value]
        text = [", ".join(map(str, line)) or "none" if isinstance(line, list) else str(line) for line in lines]
        print(f"{name + ':':15}" + f"\n{'':15}".join(text))


def routes() -> list[dict[str, Any]]:
    """Return the routes by which products are computed on the CPU, and then those of a GPU if it has kernels here.

    Of each device's routes the first that fits is taken.
    """
    from dataclasses import asdict

    import torch

    from ..native import loader

    loader.ensure("cpu")
    rows = [asdict(route) | {"device": "cpu"} for route in loader.cpu_routes()]
    if torch.cuda.is_available():
        loader.ensure("cuda")
    for route in loader.cuda_routes():
        row = asdict(route)
        code = row.pop("code")
        rows.append(row | {"needs": ((code,) if code else ()) + row["needs"], "tuning": "", "device": "cuda"})
    return [row | {"rows": "-".join("" if each is None else str(each) for each in row["rows"])} for row in rows]


def _load_model(given: argparse.Namespace) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with announced(f"loading {given.model}"):
        source, more = arguments.checkpoint(given.model)
        remote = dict(trust_remote_code=given.trust_remote_code)
        dtype = given.dtype or "float32"
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **remote, **more)
        return model.to(given.device).eval(), AutoTokenizer.from_pretrained(source, **remote, **more)


def _loaded(given: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[Any, Any]:
    """Do as :func:`_load_model`; what cannot be loaded ends the program."""
    try:
        return _load_model(given)
    except (ImportError, OSError, ValueError) as error:  # transformers needs another package for a GGUF file
        first = str(error).strip().splitlines()[0]
        parser.error(f"{given.model!r} is no folder, GGUF file or model id of a causal LM with a tokenizer: {first}")


def _verify(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from ..check.verification import verify

    given.device = given.device or _own_device()
    model, tokenizer = _loaded(given, parser)
    try:
        if given.weights:
            return _compare_formats(given, model, tokenizer)
        result = verify(model, tokenizer(given.prompt, return_tensors="pt"), given.max_new_tokens)
    except ValueError as error:  # an UnsupportedModelError is one
        parser.error(str(error))
    print(json.dumps(result.to_dict(), indent=1) if given.json else result)
    return 0 if result.ok else 1


def _profile(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    given.device = given.device or _own_device()
    try:
        return profile_command.run(given, lambda given: _loaded(given, parser))
    except ValueError as error:  # an UnsupportedModelError is one
        parser.error(str(error))


def _compare_formats(given: argparse.Namespace, model: Any, tokenizer: Any) -> int:
    from ..check.quality import compare_formats

    try:
        text = given.prompt if given.text is None else Path(given.text).read_text()
    except OSError as error:
        raise ValueError(f"--text {given.text}: {error.strerror}") from None
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, : given.tokens]
    found = compare_formats(model, ids, given.weights, given.lm_head)
    print(json.dumps(found.to_dict(), indent=1) if given.json else found)
    return 0


def _explain(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Explain a reason code, or a model by its config."""
    what = given.what
    if what is None or what in REASONS:
        codes = REASONS if what is None else (what,)
        if given.json:
            print(json.dumps({code: REASONS[code]._asdict() for code in codes}, indent=1))
        else:
            print("\n".join(f"{code}: {REASONS[code]}" for code in codes))
        return 0
    close = [] if Path(what).exists() else difflib.get_close_matches(what, REASONS, n=1, cutoff=0.8)
    if close:
        parser.error(f"unknown reason code {what!r}. Did you mean {close[0]!r}?")
    from ..bandwidth import measure_read_bandwidth
    from ..check.explain import explain
    from ..native import loader

    given.device = given.device or _own_device()
    loader.ensure(given.device)
    bandwidth = given.bandwidth
    if bandwidth == "measure":
        try:
            arguments.device(given.device)
        except argparse.ArgumentTypeError as error:
            parser.error(f"--bandwidth measure: {error}")
        with announced(f"measuring the read bandwidth of {given.device}"):
            bandwidth = measure_read_bandwidth(given.device) / 1e9
    try:
        with announced(f"building {what} without weights"):
            found = explain(
                what,
                given.dtype,
                given.device,
                None if bandwidth is None else bandwidth * 1e9,
                given.trust_remote_code,
                given.gpus,
            )
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(found.to_dict(), indent=1) if given.json else found)
    return 0 if found.fast else 1


def _bench(rest: Sequence[str]) -> int:
    """Run one of the two benchmarks that are part of the package."""
    # The two modules import what no other command needs.
    if rest and rest[0] == "gemv":
        from ..bench import formats

        return formats.main(rest[1:])
    from ..bench import generate

    return generate.main(rest[1:] if rest and rest[0] == "generate" else rest)


#: exit status after an error that nobody foresaw; 1 means a model that is not fast or differs, 2 a wrong argument
UNFORESEEN = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    try:
        return _main(argv)
    except Exception:
        traceback.print_exc()
        return UNFORESEEN


def _main(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="hf-fastpath", description="Fast decoding for transformers models.")
    parser.add_argument("--version", action="version", version=f"hf-fastpath {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    info_parser = commands.add_parser("info", help="versions, devices, kernels and why")
    info_parser.add_argument(
        "--routes",
        action="store_true",
        help="instead: how products are computed on each device, by the first row that fits",
    )
    info_parser.add_argument("--json", action="store_true")
    explain = commands.add_parser(
        "explain",
        help="what a reason code means; what patch() would make of a model, from its config alone",
        description="Exit status of a model: 0 if its decode loop would be fast, 1 if not, 2 for what is no "
        "model, 3 after an error that nobody foresaw.",
    )
    named = "a reason code; a folder, config.json, GGUF file or model id; none: all codes"
    explain.add_argument("what", nargs="?", help=named)
    explain.add_argument(
        "--dtype",
        type=arguments.dtype,
        metavar="DTYPE",
        help="of the weights: float32, float16, bfloat16; default: the config's",
    )
    explain.add_argument(
        "--device", choices=("cpu", "cuda"), help="whose kernels and bandwidth are meant; default: cuda if there is one"
    )
    explain.add_argument(
        "--bandwidth", type=arguments.bandwidth, help="GB/s the device reads, or 'measure': shows the limits"
    )
    explain.add_argument(
        "--gpus", type=arguments.count, default=1, help="GPUs of one host over which a tp_plan spreads the model"
    )
    explain.add_argument("--trust-remote-code", action="store_true", help="run model code that comes with the config")
    explain.add_argument("--json", action="store_true")
    verify = commands.add_parser(
        "verify",
        help="compare a model patched with itself unpatched",
        description="Exit status: 0 if no error is above stock's own noise, 1 if one is, 2 if nothing was compared, "
        "3 after an error that nobody foresaw.",
    )
    verify.add_argument("model", help="folder, GGUF file or name of a causal LM")
    verify.add_argument("--prompt", default="import os\n\n\ndef", help="text to continue")
    verify.add_argument("--dtype", type=arguments.dtype, help="of the weights: float32 (default), float16, bfloat16")
    verify.add_argument("--device", type=arguments.device, help="cuda, cuda:1, cpu; default: cuda if there is one")
    verify.add_argument("--max-new-tokens", type=arguments.count, default=64, help="that each row compares")
    verify.add_argument(
        "--weights",
        nargs="+",
        choices=FORMATS,
        metavar="FORMAT",
        help=f"instead: what quantizing costs, for some of {', '.join(FORMATS)}: perplexity and divergence over --text",
    )
    verify.add_argument("--lm-head", default=HEADS[0], choices=HEADS, help="with --weights: format of the head")
    verify.add_argument("--text", metavar="FILE", help="with --weights: what is decoded; default: --prompt")
    verify.add_argument("--tokens", type=arguments.count, default=4096, help="with --weights: of the text, at most")
    verify.add_argument("--trust-remote-code", action="store_true", help="run model code that comes with the weights")
    verify.add_argument("--json", action="store_true")
    profile_command.add_arguments(
        commands.add_parser(
            "profile",
            help="where the time of a decode step goes, call by call",
            description="Exit status: 0 if the step was measured, 2 if stock code decodes for the model or an argument "
            "is wrong, 3 after an error that nobody foresaw.",
        )
    )
    commands.add_parser(
        "bench",
        help="decode speed beside stock; bench gemv: products with quantized weights; see bench --help",
        add_help=False,
    )
    given, rest = parser.parse_known_args(argv)
    if given.command == "bench":
        return _bench(rest)
    command = commands.choices[given.command]
    if rest:
        command.error(f"unknown arguments: {' '.join(rest)}")
    if given.command == "info":
        return _info(given, command)
    if given.command == "explain":
        return _explain(given, command)
    if given.command == "profile":
        return _profile(given, command)
    return _verify(given, command)
