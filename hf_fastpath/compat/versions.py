"""Versions of transformers."""

from __future__ import annotations

import transformers

#: versions of transformers whose replaced forwards were compared with ours; patch() tests itself on any other version
TESTED_TRANSFORMERS = ("5.17", "5.23", "5.24")


def transformers_version() -> str:
    """Return major and minor version, e.g. ``"5.17"``."""
    return ".".join(transformers.__version__.split(".")[:2])


def is_development(version: str) -> bool:
    """Whether a version is one under development, whose code changes while its number stays."""
    return "dev" in version or "+git" in version
