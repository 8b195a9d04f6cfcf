"""Exceptions of the public surface."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """Nothing in the model could be patched; the message says what was looked for and why it was declined."""


def lacking(what: str) -> UnsupportedModelError:
    """Make the error of a release of transformers that has changed what this package uses.

    Args:
        what: what the release lacks or does otherwise.
    """
    import transformers

    return UnsupportedModelError(
        f"transformers {transformers.__version__} is not what this hf_fastpath was made for ({what}): install a newer "
        "hf_fastpath, or an older transformers"
    )


class FallbackError(RuntimeError):
    """Stock code would have run on a model patched with ``strict=True``."""


class NoCounterpart(Exception):
    """A layer's quantized weight cannot be repacked; the argument is a reason code. ``patch()`` never raises this."""


class RankError(RuntimeError):
    """Another of the processes over which a model is spread has failed, or did not come in time."""


class RankMismatch(RankError, ValueError):
    """Processes over which a model is spread were given different arguments, or make different calls."""
