"""step_inputs: the common tests, PyTorch's rows bit for bit, indices outside a table, refusals."""

from __future__ import annotations

import pytest
import torch
from checks import common_tests, over_dtypes, replaced
from memory import same_bits

from hf_fastpath.ops.step_inputs import MAX_TABLES, SPEC
from hf_fastpath.registry import OpInputError, Sample

globals().update(common_tests(SPEC))


@over_dtypes
def test_step_inputs_is_pytorch(device, dtype):
    """Bits and shapes are the same, and contiguous, also for tables with gaps between rows or with any start."""
    wide, longer = (torch.randn(rows, 100, device=device, dtype=dtype) for rows in (40, 50))
    indices = torch.randint(40, (5, 6), device=device)
    tokens, positions = indices[:, ::2], indices.t()[:3].t()
    views = [
        Sample(wide[:, first : first + 64], tokens, positions, longer[7:, :64], 3, [wide[:, first:]])
        for first in (0, 3)
    ]
    for sample in (*SPEC.samples(device, dtype), *views):
        found, expected = (call(*sample.args, **sample.kwargs) for call in (SPEC, SPEC.reference))
        assert len(found) == len(expected)
        for rows, right in zip(found, expected):
            assert rows.shape == right.shape and rows.is_contiguous() and same_bits(rows, right)


def test_step_inputs_outside_a_table(device):
    """An index past either end is an error on the CPU; on CUDA it would end the process's use of the device."""
    if device.type != "cpu":
        pytest.skip("CUDA: a device-side assert")
    table, there = torch.randn(4, 8), torch.tensor([[3]])
    for index in (4, -1):
        outside = torch.tensor([[index]])
        for call in (
            (outside, there, None, 0, []),
            (there, outside, None, 0, [table]),
            (there, outside, table, 0, []),
            (there, there, table, 5 * index, []),
        ):
            with pytest.raises(OpInputError, match=r"asks for row -?\d+ of .*, expected 0 to 3"):
                SPEC(table, *call)
            with pytest.raises(IndexError):  # PyTorch's own type of error
                SPEC.overload(table, *call)


def test_step_inputs_refuses(device):
    sample = next(iter(SPEC.samples(device, torch.float32)))
    table = sample.args[0]
    wrong = {
        "tokens is torch.int32": {"tokens": sample.args[1].int()},
        "positions is torch.int64": {"positions": sample.args[2][0]},
        "width 3": {"position_embedding": table[:, :3]},
        "contiguous rows": {"embedding": table[:, ::2]},
        "dtype torch.float16": {"tables": [table.half()]},
        f"at most {MAX_TABLES}": {"tables": [table] * (MAX_TABLES + 1)},
    }
    for message, values in wrong.items():
        call = replaced(SPEC, sample, **values)
        with pytest.raises(OpInputError, match=message):
            SPEC(*call.args, **call.kwargs)
