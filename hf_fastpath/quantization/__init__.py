"""Weights of few bits: their formats, how weights are packed, and how scales are chosen. Ops import this folder."""

from .formats import (
    FORMATS,
    Format,
    InputRounding,
    PackedWeight,
    PreparedInputWeight,
    ReorderedWeight,
    RoundedInputWeight,
)
from .quantizer import quantize

__all__ = [
    "FORMATS",
    "Format",
    "InputRounding",
    "PackedWeight",
    "PreparedInputWeight",
    "ReorderedWeight",
    "RoundedInputWeight",
    "quantize",
]
