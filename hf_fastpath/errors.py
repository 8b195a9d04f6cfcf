"""Exceptions of the public surface."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """Nothing in the model could be patched; says what was looked for and why each candidate was declined."""


class FallbackError(RuntimeError):
    """Stock code would have run on a model patched with ``strict=True``."""


class NoCounterpart(Exception):
    """A layer's quantized weight cannot be repacked; its argument is a reason code. Never leaves ``patch()``."""
