"""The command ``hf-fastpath profile``: where the time of a decode step of a model goes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .. import arguments
from ..choices import PackedFormat
from ..progress import announced

_FORMATS = tuple(format.label for format in PackedFormat)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("model", help="folder, GGUF file or name of a causal LM")
    parser.add_argument("--prompt", default="import os\n\n\ndef", help="text to continue")
    parser.add_argument("--batch", type=arguments.count, default=1, help="sequences of that prompt")
    parser.add_argument("--tokens", type=arguments.count, default=32, help="steps that are measured, 4 or more")
    parser.add_argument("--dtype", type=arguments.dtype, help="of the weights: float32 (default), float16, bfloat16")
    parser.add_argument("--device", type=arguments.device, help="cuda, cuda:1, cpu; default: cuda if there is one")
    parser.add_argument("--weights", choices=_FORMATS, metavar="FORMAT", help=f"quantize first: {', '.join(_FORMATS)}")
    parser.add_argument(
        "--bandwidth",
        type=arguments.bandwidth,
        default="measure",
        help="R, the GB/s that the device reads; default: measure",
    )
    parser.add_argument("--all-calls", action="store_true", help="print every call, also of layers that are alike")
    parser.add_argument(
        "--save", metavar="FILE", help="write a picture (.svg), a page (.html), data (.json) or text (.txt)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run model code that comes with the weights")
    parser.add_argument("--json", action="store_true")


def run(given: argparse.Namespace, load_model: Callable[[argparse.Namespace], tuple[Any, Any]]) -> int:
    """Run the command; return the exit status.

    Args:
        given: the arguments.
        load_model: gives the model and its tokenizer.

    Raises:
        ValueError: the model runs stock code, or an argument has no valid value.
    """
    from ..patching.api import patch
    from ..profiling.profiler import profile
    from ..profiling.result import check_name

    if given.save is not None:
        check_name(given.save)
    model, tokenizer = load_model(given)
    if given.weights is not None:
        patch(model, weights=given.weights, quiet=True)
    inputs = tokenizer([given.prompt] * given.batch, return_tensors="pt")
    bandwidth = None if given.bandwidth == "measure" else given.bandwidth * 1e9
    with announced(f"profiling {given.model}"):
        found = profile(model, inputs, given.tokens, bandwidth=bandwidth)
    if given.save is not None:
        try:
            found.save(given.save)
        except OSError as error:
            raise ValueError(f"--save {given.save}: {error.strerror}") from None
    print(found.to_json() if given.json else found.text(given.all_calls))
    return 0
