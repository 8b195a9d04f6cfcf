"""router_logits: the common tests, exact sums, scores that 16 bits would make equal."""

from __future__ import annotations

import pytest
import torch
from checks import assert_exact, common_tests, over_dtypes, small_integers

from hf_fastpath.ops.router_logits import SPEC
from hf_fastpath.registry import OpInputError, Sample


def odd_sizes(device, dtype):
    for rows, num_experts, hidden_size in (
        *((1, 1, 1), (2, 3, 7), (4, 129, 1032), (5, 64, 8200), (17, 16, 64), (1, 60, 9001), (70, 2, 8)),
        *((0, 4, 8), (3, 0, 8)),
    ):
        x, weight = (torch.randn(count, hidden_size, device=device, dtype=dtype) for count in (rows, num_experts))
        weight = weight * max(1, hidden_size) ** -0.5
        yield Sample(x[None], weight)
        yield Sample(x[None], weight.float().repeat(1, 2)[:, :hidden_size])  # rows that are apart


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
def test_router_logits_exact(dtype, device):
    """Every feature meets every expert's weight of its place, and no other."""
    for rows, num_experts, hidden_size in ((1, 64, 2048), (6, 60, 1001), (2, 5, 6152)):
        x, weight = small_integers(device, dtype, (rows, hidden_size), (num_experts, hidden_size))
        assert_exact(SPEC, Sample(x, weight))
        assert_exact(SPEC, Sample(x, weight.float()))


@over_dtypes
def test_router_logits_are_not_rounded(dtype, device):
    """Scores that differ by less than 16 bits can say stay apart: 256 and 256 + 2^-8."""
    x = torch.ones(1, 2, device=device, dtype=dtype)
    weight = torch.tensor([[256, 0], [256, 2**-8]], device=device, dtype=dtype)
    assert SPEC(x, weight).tolist() == [[256.0, 256.00390625]]


@over_dtypes
def test_a_weight_in_float32_is_not_rounded(dtype, device):
    weight = torch.tensor([[1.0, 0.0], [1.0, 2**-20]], device=device)
    assert SPEC(torch.ones(1, 2, device=device, dtype=dtype), weight).tolist() == [[1.0, 1.0 + 2**-20]]


@over_dtypes
def test_router_logits_special_values(dtype, device):
    """NaN stays in its row, or with the expert whose weight holds it."""
    x, weight = torch.randn(3, 256, device=device).to(dtype), torch.randn(16, 256, device=device).to(dtype)
    x[1, 5], weight[7, 200] = float("nan"), float("nan")
    found = SPEC(x, weight)
    assert found[1].isnan().all() and found[:, 7].isnan().all() and int(found.isnan().sum()) == 16 + 2


def test_router_logits_names_the_fault():
    with pytest.raises(OpInputError, match=r"expected \[\.\.\., hidden_size\] and \[num_experts, hidden_size\]"):
        SPEC(torch.zeros(1, 8), torch.zeros(4, 9))
    with pytest.raises(OpInputError, match="make its rows contiguous"):
        SPEC(torch.zeros(1, 8), torch.zeros(8, 8).t())
    half = torch.zeros(1, 8, dtype=torch.float16)
    with pytest.raises(OpInputError, match="weight has dtype torch.bfloat16, expected torch.float16 or float32"):
        SPEC(half, torch.zeros(4, 8, dtype=torch.bfloat16))
