"""Shared by the tests of ops."""

from __future__ import annotations

import pytest

from hf_fastpath.quantization import quantizer


@pytest.fixture(autouse=True, scope="module")
def weights_of_samples():
    """Quantize with the first scale that is tried: to search for the best one took most of the time of making samples,
    and a kernel multiplies by whatever scales a weight has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantizer, "_SHRINKS", (1.0,))
        patch.setattr(quantizer, "_REFINEMENTS", 0)
        yield
