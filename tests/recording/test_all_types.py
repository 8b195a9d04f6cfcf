"""Every causal-LM, multimodal and encoder-decoder type: what is fast gives stock's tokens, what is not says why."""

from __future__ import annotations

import pytest
import transformers
from models import CPU, require_native
from recorded_types import TABLES

#: types whose tokens are not stock's, or not by our loop, and why
KNOWN: dict[str, str] = {}
#: types whose padded batches a version of transformers reads otherwise
UNPADDED = {"5.17": ("bloom",)}


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
        if device != CPU:
            assert TABLES[table][1](model_type).how == "stock", found
    else:
        assert found.tokens == "equal", found
        is_known = model_type in UNPADDED.get(transformers.__version__.rpartition(".")[0], ())
        assert not found.reason or found.reason.startswith("attention_mask") or is_known, found
