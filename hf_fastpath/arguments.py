"""Types of command-line arguments; the errors are argparse's. torch is imported for the arguments that need it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: names of dtypes, and the short names of the benchmarks
DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}
DTYPES |= {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def dtype(text: str) -> torch.dtype:
    """Parse float32, float16 or bfloat16, by either name."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {', '.join(DTYPES)}")
    import torch

    return getattr(torch, DTYPES[text])


def checkpoint(source: str) -> tuple[str, dict[str, str]]:
    """Return what ``from_pretrained()`` takes for a folder, model id or GGUF file: its first and further arguments."""
    path = Path(source)
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" and path.is_file() else (source, {})


def count(text: str) -> int:
    """Parse a whole number above 0."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number above 0")


def device(text: str) -> str:
    """Parse cpu, or a CUDA device of this machine."""
    kind, colon, index = text.partition(":")
    if text == "cpu":
        return text
    if kind != "cuda" or (colon and not index.isdecimal()):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected cpu, cuda or cuda:1")
    import torch

    found = torch.cuda.device_count()
    if not found:
        why = "torch finds none" if torch.version.cuda else "this torch is built without CUDA"
        raise argparse.ArgumentTypeError(f"there is no CUDA device: {why}")
    if colon and int(index) >= found:
        raise argparse.ArgumentTypeError(f"got {text!r}, but this machine has {found} CUDA device(s)")
    return text


def bandwidth(text: str) -> float | str:
    """Parse GB/s, or ``"measure"``."""
    if text == "measure":
        return text
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if 0 < value < float("inf"):
        return value
    raise argparse.ArgumentTypeError(f"got {text!r}, expected GB/s or 'measure'")
