"""sum_ranks: the common tests, and ranks that wait for each other, all on one GPU."""

from __future__ import annotations

import pytest
import torch
from checks import common_tests, over_dtypes
from ranks import Exchange

from hf_fastpath.ops.sum_ranks import SPEC

globals().update(common_tests(SPEC))


@pytest.mark.parametrize("size", (2, 3, 8))
@over_dtypes
def test_sum_ranks_of_ranks_that_wait_for_each_other(device, dtype, size):
    """Ranks on streams of their own, many times over the same slots: all get the same bits, those of the reference."""
    if device.type != "cuda":
        pytest.skip("kernels wait for each other on a GPU")
    exchange = Exchange(device, dtype, size, room=4096)
    for elements in (8, 1000, 4096):
        given = [torch.randn(60, elements, device=device, dtype=dtype) for _ in range(size)]
        residual = torch.randn(60, elements, device=device, dtype=dtype)
        found = exchange.run(SPEC.overload, given, residual=residual)
        total = torch.stack(given).double().sum(0) + residual.double()
        for each in found:
            assert torch.equal(each, found[0])
        stock = sum(x.float() for x in given) + residual.float()
        torch.testing.assert_close(found[0], stock.to(dtype), rtol=0, atol=0)
        torch.testing.assert_close(stock.double(), total, rtol=1e-5, atol=1e-5)


def test_sum_ranks_hands_every_value_on(device):
    """Infinity, zeros, subnormal numbers and every NaN arrive, also the NaN that stands for what has not arrived."""
    if device.type != "cuda":
        pytest.skip("kernels wait for each other on a GPU")
    bits = torch.tensor([-1, 0x7FFF7FFF, 0, -(2**31), 0x7F800000, 1, 0x3F800000, -65536], dtype=torch.int32)
    x = bits.view(torch.float32).to(device)[None]
    exchange = Exchange(device, torch.float32, 2, room=8)
    found = exchange.run(SPEC.overload, [x, torch.zeros_like(x)])
    for each in found:
        torch.testing.assert_close(each, x, rtol=0, atol=0, equal_nan=True)


def test_sum_ranks_gives_up(device):
    """If status says that a rank did not come, nothing is waited for."""
    if device.type != "cuda":
        pytest.skip("kernels wait for each other on a GPU")
    exchange = Exchange(device, torch.float32, 2, room=8)
    exchange.status.fill_(1)
    SPEC.overload(torch.ones(8, device=device), exchange.buffers, exchange.status, 0, 0)
    torch.cuda.synchronize()
