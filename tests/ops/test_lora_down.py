"""lora_down: the common tests, exact integers, sums that 16 bits would lose, refusals."""

from __future__ import annotations

import pytest
import torch
from checks import assert_exact, assert_matches, common_tests, is_native, over_dtypes, small_integers
from memory import same_bits

from hf_fastpath.ops.lora_down import MAX_MATRICES, MAX_RANKS, SPEC
from hf_fastpath.ops.norm import NORMS
from hf_fastpath.registry import OpInputError, Sample


def odd_sizes(device, dtype):
    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, device=device, dtype=dtype)

    for rows, k, ranks in (
        (1, 1, (1,)),
        (1, 17, (40, 1, 1)),
        (13, 17, (3, 30)),
        (2, 33, (65, 7, 2)),
        (5, 129, (9, 9, 9)),
        (16, 8, (2,)),
        (1, 1032, (8,) * 16),
        (4, 2056, (3, 5)),
        (3, 9001, (2,)),
        (1, 28672, (8, 8)),
        (9, 40000, (1, 3)),
        (1, 8, (2047, 1)),
    ):
        for weight_dtype in {dtype, torch.float32}:
            x, weights = randn(1, rows, k), [randn(rank, k, dtype=weight_dtype) * k**-0.5 for rank in ranks]
            yield Sample(x, weights)
            for norm in NORMS[1:]:
                yield Sample(x, weights, norm, randn(k), None, 1e-5)
    wide = [randn(n, 300)[:, start : start + 100] * 0.1 for n, start in ((4, 0), (9, 1), (24, 200))]
    yield Sample(randn(1, 1, 100), wide)  # strided rows, some of them not aligned
    yield Sample(randn(3, 200)[:, 100:], wide[:2])
    yield Sample(randn(3, 96) + 30, [randn(8, 96)], "layer", None, randn(96), 1e-5)  # a mean far from zero


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
def test_rows_take_their_owners_weights_alone(device, dtype):
    """Whatever the others hold, a row has zeros for them; its own products are those of the row alone."""
    x, norm = torch.randn(7, 520, device=device, dtype=dtype), torch.randn(520, device=device, dtype=dtype)
    weights = [torch.randn(rank, 520, device=device, dtype=dtype) for rank in (8, 3, 16)]
    chosen = torch.tensor([2, 0, -1, 2, 2, 1, 0], dtype=torch.int32, device=device)
    for named in ({}, dict(norm="rms", norm_weight=norm, norm_eps=1e-6), dict(norm="layer", norm_eps=1e-5)):
        found = SPEC(x, weights, **named, chosen=chosen, owners=[0, 1, 2]).split([8, 3, 16], dim=-1)
        for owner, (part, weight) in enumerate(zip(found, weights)):
            for row, its in enumerate(chosen.tolist()):
                own = SPEC(x[row : row + 1], [weight], **named)[0] if its == owner else torch.zeros_like(part[row])
                assert same_bits(part[row], own), (named, row, owner)
    weights[1].fill_(float("nan"))
    taken = SPEC(x, weights, chosen=chosen, owners=[0, 1, 2])
    assert taken[chosen != 1].isfinite().all() and taken[5, 8:11].isnan().all()


@over_dtypes
def test_lora_down_exact_on_integers(device, dtype):
    """Every feature meets every rank's weight of its place, and no other."""
    for rows, k, ranks in (
        (1, 111, (7, 5)),
        (1, 4096, (16, 8, 8)),
        (4, 14336, (8,)),
        (16, 1001, (9, 3)),
        (3, 8, (64,)),
    ):
        x, weight = small_integers(device, dtype, (rows, k), (sum(ranks), k))
        for stored in (weight, weight.float()):
            assert_exact(SPEC, Sample(x, list(stored.split(ranks))))


@over_dtypes
def test_lora_down_is_not_rounded(device, dtype):
    """Neither products nor weights in float32 lose what 16 bits have no room for."""
    x = torch.ones(1, 2, device=device, dtype=dtype)
    weight = torch.tensor([[256, 0], [256, 2**-8]], device=device, dtype=dtype)
    assert SPEC(x, [weight]).tolist() == [[256.0, 256.00390625]]
    weight = torch.tensor([[1.0, 0.0], [1.0, 2**-20]], device=device)
    assert SPEC(x, [weight]).tolist() == [[1.0, 1.0 + 2**-20]]


@over_dtypes
def test_lora_down_ignores_gaps_between_weight_rows(device, dtype):
    """NaN beside the rows of a column slice, at every alignment, does not leak in."""
    x = torch.randn(3, 48, device=device).to(dtype)
    for start in range(9):
        wide = torch.full((12, 80), float("nan"), device=device, dtype=dtype)
        wide[:, start : start + 48] = torch.randn(12, 48, device=device) * 0.1
        assert_matches(SPEC, Sample(x, [wide[:7, start : start + 48], wide[7:, start : start + 48]]))


@over_dtypes
def test_lora_down_of_one_row_is_that_of_many(device, dtype):
    """Rows of x do not mix, and programmatic_launch changes nothing."""
    x, norm_weight = (torch.randn(*shape, device=device).to(dtype) for shape in ((16, 520), (520,)))
    weights = [torch.randn(rank, 520, device=device) * 0.05 for rank in (8, 16)]
    together = SPEC(x, weights, "rms", norm_weight, None, 1e-5)
    for row in range(16):
        alone = SPEC(x[row : row + 1], weights, "rms", norm_weight, None, 1e-5, True)
        torch.testing.assert_close(alone, together[row : row + 1], rtol=1e-5, atol=1e-5)
    assert same_bits(together, SPEC(x, weights, "rms", norm_weight, None, 1e-5, True))


@over_dtypes
def test_lora_down_special_values(device, dtype):
    """NaN stays in its row, or with the rank whose weight holds it."""
    x, weight = torch.randn(3, 256, device=device).to(dtype), torch.randn(16, 256, device=device).to(dtype)
    x[1, 5], weight[7, 200] = float("nan"), float("nan")
    found = SPEC(x, [weight[:6], weight[6:]])
    assert found[1].isnan().all() and found[:, 7].isnan().all() and int(found.isnan().sum()) == 16 + 2


def test_lora_down_names_the_fault():
    x, weight = torch.randn(1, 8), torch.randn(3, 8)
    for weights, message in (
        ([], "0 weights, expected 1 to 48"),
        (
            [weight] * (MAX_MATRICES + 1),
            f"{MAX_MATRICES + 1} weights, expected 1 to {MAX_MATRICES}: take the others in another call",
        ),
        ([weight, torch.randn(3, 9)], r"weights\[1\] has shape \(3, 9\), expected \[rank, 8\]"),
        ([weight, torch.randn(0, 8)], r"weights\[1\] has shape \(0, 8\), expected \[rank, 8\]"),
        ([weight, torch.randn(8)], r"weights\[1\] has shape \(8,\), expected \[rank, 8\]"),
        ([weight, weight.half()], r"weights\[1\] has dtype torch.float16, expected torch.float32 or float32: cast it"),
        ([weight, torch.randn(8, 3).t()], r"weights\[1\] has strides \(1, 3\): make its rows contiguous"),
        ([weight, weight.to("meta")], r"weights\[1\] is on meta, expected cpu: move it"),
        ([torch.randn(MAX_RANKS, 8), weight], "weights have 2051 ranks, expected at most 2048"),
    ):
        with pytest.raises(OpInputError, match=message):
            SPEC(x, weights)
    with pytest.raises(OpInputError, match=r"weights\[1\] has dtype torch.float32, weights\[0\] torch.float16"):
        SPEC(x.half(), [weight.half(), weight])
    for chosen, owners, message in (
        (torch.zeros(2, dtype=torch.int32), [0], r"chosen is torch.int32 \(2,\) on cpu, expected torch.int32 \(1,\)"),
        (torch.zeros(1), [0], r"chosen is torch.float32 \(1,\) on cpu, expected torch.int32"),
        (torch.zeros(1, dtype=torch.int32), [0, 1], "2 owners and 1 weights, expected as many of each"),
    ):
        with pytest.raises(OpInputError, match=message):
            SPEC(x, [weight], chosen=chosen, owners=owners)
    with pytest.raises(OpInputError, match="x has 17 rows, expected 1 to 16"):
        SPEC(torch.randn(17, 8), [weight])
    with pytest.raises(OpInputError, match="norm 'rms' takes norm_weight and no norm_bias"):
        SPEC(x, [weight], "rms")


def test_lora_down_native_names_the_fault():
    """The library has checks of its own, as a decode plan calls it."""
    if not is_native(SPEC, torch.device("cpu")):
        pytest.skip("no native library")
    x, weight = torch.randn(1, 8), torch.randn(3, 8)
    for args in (
        (x, []),
        (x, [weight] * 49),
        (x, [weight, torch.randn(3, 9)]),
        (x, [weight, weight.half()]),
        (x, [weight, weight[:0]]),
        (x, [torch.randn(8, 3).t()]),
        (x, [torch.randn(2049, 8)]),
        (torch.randn(17, 8), [weight]),
        (x, [weight], 1),
        (x, [weight], 9),
    ):
        with pytest.raises(RuntimeError):
            SPEC.overload(*args)
    for wrong in (dict(chosen=torch.zeros(2, dtype=torch.int32), owners=[0]), dict(chosen=torch.zeros(1), owners=[0])):
        with pytest.raises(RuntimeError, match="chosen has to be int32"):
            SPEC.overload(x, [weight], **wrong)
