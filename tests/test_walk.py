"""How many files one has to open to follow ``patch()`` and a token."""

from __future__ import annotations

import walk
from models import CPU, require_native


def test_patch_is_a_short_way():
    require_native(CPU)
    assert 0 < len(walk.of_patch().own()) <= 13


def test_a_token_is_a_short_way():
    require_native(CPU)
    assert 0 < len(walk.of_token().folded()) <= 10
