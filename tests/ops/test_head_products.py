"""head_products: the common tests, exact sums, agreement with the products that it stands for."""

from __future__ import annotations

import pytest
import torch
from checks import assert_exact, common_tests, over_dtypes, small_integers

from hf_fastpath.ops.head_products import MAX_INPUTS, SPEC
from hf_fastpath.registry import OpInputError, Sample


def odd_sizes(device, dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for batch, heads, inputs, outputs in (
        *((4, 1, 1, 9), (1, 3, 2, 1), (2, 2, 33, 31), (5, 3, 129, 66), (4, 1, 520, 520), (1, 2, 2048, 5)),
        *((17, 2, 64, 72), (1, 128, 24, 40), (2, 1, 1000, 264), (0, 2, 8, 8)),
    ):
        yield Sample(randn(batch, heads, inputs), randn(heads, outputs, inputs) * inputs**-0.5)
        yield Sample(randn(batch, heads, inputs), randn(heads, inputs, outputs) * inputs**-0.5, True)


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
@pytest.mark.parametrize("transposed", (False, True))
def test_head_products_exact(transposed, dtype, device):
    """Every input meets every output of its own head, and of no other."""
    for inputs, outputs in ((512, 128), (128, 512), (77, 33)):
        x, weight = small_integers(device, dtype, (3, 6, inputs), (6, outputs, inputs))
        weight = weight.mT.contiguous() if transposed else weight
        assert_exact(SPEC, Sample(x, weight, transposed))


@over_dtypes
@pytest.mark.parametrize("transposed", (False, True))
def test_head_products_special_values(transposed, dtype, device):
    """NaN stays in its head of its row, or in the output whose weights hold it."""
    x, weight = torch.randn(2, 3, 128, device=device).to(dtype), torch.randn(3, 64, 128, device=device).to(dtype)
    x[0, 1, 5], weight[2, 7, 100] = float("nan"), float("nan")
    found = SPEC(x, weight.mT.contiguous() if transposed else weight, transposed)
    assert found[0, 1].isnan().all() and found[:, 2, 7].isnan().all() and int(found.isnan().sum()) == 64 + 2


def test_head_products_names_the_fault():
    with pytest.raises(OpInputError, match=rf"expected \[batch, heads, 1 to {MAX_INPUTS}\]"):
        SPEC(torch.zeros(1, 1, MAX_INPUTS + 1), torch.zeros(1, 2, MAX_INPUTS + 1))
    with pytest.raises(OpInputError, match=r"weight has shape \(2, 4, 8\), expected \(2, 8, 8\)"):
        SPEC(torch.zeros(1, 2, 8), torch.zeros(2, 4, 8), True)
