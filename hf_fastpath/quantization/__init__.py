"""Weights of few bits: their formats, how weights are packed, and how scales are chosen. Ops import this folder."""

from .formats import FORMATS, Format, PackedWeight, ReorderedWeight
from .quantizer import quantize

__all__ = ["FORMATS", "Format", "PackedWeight", "ReorderedWeight", "quantize"]
