"""Versions of transformers."""

from __future__ import annotations

import transformers

#: versions of transformers whose replaced forwards were compared with ours; others are self-tested by patch()
TESTED_TRANSFORMERS = ("5.17", "5.23", "5.24")


def transformers_version() -> str:
    """Major and minor version, e.g. ``"5.17"``."""
    return ".".join(transformers.__version__.split(".")[:2])
