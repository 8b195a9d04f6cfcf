"""Weights that are quantized in a moment, for tests whose subject is what reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hf_fastpath.quantization import quantizer


@contextmanager
def first_scales() -> Iterator[None]:
    """Quantize with the first scale that is tried, in a ``with`` block: to search for the best one took most of the
    time of making the samples of ops, and a kernel multiplies by whatever scales a weight has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantizer, "_SHRINKS", (1.0,))
        patch.setattr(quantizer, "_REFINEMENTS", 0)
        yield
