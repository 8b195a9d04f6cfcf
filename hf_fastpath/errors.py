"""Exceptions of the public surface."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """Nothing in the model could be patched; the message says what was looked for and why it was declined."""


class FallbackError(RuntimeError):
    """Stock code would have run on a model patched with ``strict=True``."""


class NoCounterpart(Exception):
    """A layer's quantized weight cannot be repacked; the argument is a reason code. ``patch()`` never raises this."""


class RankError(RuntimeError):
    """Another of the processes over which a model is spread has failed, or did not come in time."""


class RankMismatch(RankError, ValueError):
    """Processes over which a model is spread were given different arguments, or make different calls."""
