"""gather_ranks: the common tests, and ranks that wait for each other, all on one GPU."""

from __future__ import annotations

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
