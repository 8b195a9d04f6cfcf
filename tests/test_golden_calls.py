"""Steps consist of the calls that were measured: of each listed family, type and format, and of some recorded ones."""

from __future__ import annotations

import golden_calls
import pytest
import transformers
from models import CPU, require_native


@pytest.mark.every(12)
@pytest.mark.parametrize("step", list(golden_calls.cases()))
def test_calls_are_those_that_were_measured(step):
    require_native(CPU)
    expected = golden_calls.recorded()[step]
    if transformers.__version__ != expected["transformers"]:
        pytest.skip(f"recorded with transformers {expected['transformers']}")
    if golden_calls.row_of(step) != expected:
        calls = "\n".join(golden_calls.calls_of(step))
        pytest.fail(f"{step} makes other calls than docs/data/golden_calls.csv says, now:\n{calls}")
