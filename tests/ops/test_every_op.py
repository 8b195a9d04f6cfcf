"""The common tests for ops that have no test file yet, and checks of the checks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checks import DTYPES, assert_rule, common_tests
from memory import duplicate, intact, offset, poisoned, same_storage

import hf_fastpath  # noqa: F401  (defines the ops)
from hf_fastpath import registry

for _name, _spec in registry.all_ops().items():
    if not Path(__file__).with_name(f"test_{_name}.py").exists():
        globals().update(common_tests(_spec))


def test_poison_reaches_new_tensors(device):
    """If poison did not reach new tensors, nothing would show that "every element is written"."""
    for dtype in DTYPES:
        for size in (64, 1000, 100_000, 10_000_000):
            with poisoned(device, size * dtype.itemsize):
                fresh = torch.empty(size, device=device, dtype=dtype)
            assert not intact(fresh[-1:]), (dtype, size)


def test_rule_is_strict():
    ref = torch.tensor([1.0, 2.0, float("nan"), float("inf")], dtype=torch.float64)
    good = ref.float()
    assert_rule(good, good, ref, "equal")
    assert_rule(good * (1 + 2**-23), good, ref, "one unit in the last place")
    for index, value in (
        (0, 1.000001),
        (1, float("nan")),
        (2, 0.0),
        (2, float("inf")),
        (3, float("-inf")),
        (3, 3e38),
    ):
        bad = good.clone()
        bad[index] = value
        with pytest.raises(AssertionError):
            assert_rule(bad, good, ref, "bad")


def test_copies_keep_layout_and_show_stray_writes():
    tensor = offset(torch.randn(3, 4))
    copy = duplicate(tensor)
    assert copy.stride() == tensor.stride() and copy.storage_offset() == 1 and torch.equal(copy, tensor)
    assert same_storage(copy, tensor)
    copy.as_strided((1,), (1,), 0).zero_()  # this element is outside the view
    assert not same_storage(copy, tensor)
