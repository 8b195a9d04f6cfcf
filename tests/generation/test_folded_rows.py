"""Rows of a slice, which PyTorch's products of 16 bits on the CPU take one by one."""

import pytest
import torch
from torch.nn.functional import linear

from hf_fastpath.compat.generation import _FoldedRows, _is_slice


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("bias", (False, True))
def test_products_of_slices_are_those_of_their_rows(dtype, bias):
    whole, weight = torch.randn(3, 5, 24, dtype=dtype), torch.randn(7, 24, dtype=dtype)
    shift = torch.randn(7, dtype=dtype) if bias else None
    for x in (whole, whole[:, -1:], whole[:1, -1:], whole[:, 1:3], whole[1], whole.transpose(0, 1)):
        expected = linear(x.contiguous().view(-1, 24), weight, shift).view(*x.shape[:-1], 7)
        with _FoldedRows():
            found = linear(x, weight, shift)
        assert found.shape == expected.shape and found.dtype == dtype
        torch.testing.assert_close(found, expected)
    assert _is_slice(whole[:1, -1:]) == (dtype == torch.bfloat16) and not _is_slice(whole) and not _is_slice(whole[1])


def test_rows_are_folded_so_that_one_product_is_made():
    x, weight, seen = torch.randn(1, 4, 8, dtype=torch.bfloat16)[:, -1:], torch.randn(3, 8, dtype=torch.bfloat16), []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is linear:
                seen.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    with Seen(), _FoldedRows():
        linear(x, weight)
    assert seen == [(1, 8)]
