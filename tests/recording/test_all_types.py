"""Every causal-LM, multimodal and encoder-decoder type: what is fast gives stock's tokens, what is not says why."""

from __future__ import annotations

import pytest
from models import require_native
from recorded_types import TABLES

#: types whose tokens are not stock's, or not by our loop, and why
KNOWN: dict[str, str] = {}


@pytest.mark.full
@pytest.mark.parametrize(
    ("table", "model_type"),
    [
        pytest.param(table, each, marks=pytest.mark.xfail(strict=True, reason=KNOWN[each]) if each in KNOWN else ())
        for table, (types, _) in TABLES.items()
        for each in types
    ],
)
def test_tokens_are_stocks_or_a_reason_is_given(table, model_type, device):
    require_native(device)
    found = TABLES[table][1](model_type, device)
    if found.how == "stock":
        assert found.reason and not found.tokens
    else:
        assert found.tokens == "equal", found
        assert not found.reason or found.reason.startswith("attention_mask")
