"""gather_ranks: the common tests, and ranks that wait for each other, all on one GPU."""

from __future__ import annotations

import functools

import pytest
import torch
from checks import common_tests, over_dtypes
from ranks import Exchange

from hf_fastpath.ops.gather_ranks import SPEC

globals().update(common_tests(SPEC))


@pytest.mark.parametrize("size", (2, 3, 8))
@over_dtypes
def test_gather_ranks_of_ranks_that_wait_for_each_other(device, dtype, size):
    if device.type != "cuda":
        pytest.skip("kernels wait for each other on a GPU")
    exchange = Exchange(device, dtype, size, room=3 * 2000)
    for features in (8, 2000):
        given = [torch.randn(40, 3, features, device=device, dtype=dtype) for _ in range(size)]
        for each in exchange.run(SPEC.overload, given):
            assert torch.equal(each, torch.cat(given, -1))
    given = [torch.randn(40, 3, 2000, device=device, dtype=dtype) for _ in range(size)]
    for ends in ((0, 8), (8, 1992), (1000, 1000), (2000, 2000)):
        expected = [part for parts in zip(*(each.tensor_split(ends, -1) for each in given)) for part in parts]
        for each in exchange.run(functools.partial(SPEC.overload, first_end=ends[0], second_end=ends[1]), given):
            assert torch.equal(each, torch.cat(expected, -1)), ends
