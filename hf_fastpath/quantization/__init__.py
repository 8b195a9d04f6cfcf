"""Weights of few bits: what formats there are, how they are packed, and how their scales are chosen."""

from .formats import FORMATS, Format, PackedWeight
from .quantizer import quantize

__all__ = ["FORMATS", "Format", "PackedWeight", "quantize"]
