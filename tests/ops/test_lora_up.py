"""lora_up: the common tests, exact integers, features that several adapters or none reach, refusals."""

from __future__ import annotations

import pytest
import torch
from checks import assert_exact, assert_matches, common_tests, is_native, ours, over_dtypes

from hf_fastpath.choices import Activation
from hf_fastpath.ops.gemv import ACTIVATIONS
from hf_fastpath.ops.lora_up import SPEC
from hf_fastpath.registry import OpInputError, Sample


def made(device, dtype, rows, features, matrices, weight_dtype, added=False, **options):
    """Make a call of ``matrices``: the rank, first feature and number of features of each."""

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, device=device).to(dtype)

    hidden = randn(rows, sum(rank for rank, _, _ in matrices), dtype=torch.float32)
    weights = [randn(count, rank, dtype=weight_dtype) * rank**-0.5 for rank, _, count in matrices]
    scales = [(0.5, 2.0, -1.25)[place % 3] for place in range(len(matrices))]
    residual = randn(rows, features) if added else None
    return Sample(randn(rows, features), hidden, weights, scales, [m[1] for m in matrices], residual, **options)


def odd_sizes(device, dtype):
    for rows, features, matrices in (
        (16, 1, [(1, 0, 1)]),
        (7, 40, [(17, 3, 30)]),
        (16, 9, [(8, 0, 9), (8, 0, 9)]),
        (13, 257, [(7, 0, 257), (16, 250, 7), (1, 100, 1)]),
        (2, 1030, [(32, 2, 1028)]),
        (5, 600, [(12, 0, 300), (20, 300, 300), (4, 299, 2)]),
        (1, 515, [(24, 0, 515)] * 3),
        (4, 70, [(8 * (m + 1), 4 * m, 8) for m in range(15)]),
        (1, 300, [(1000, 10, 200), (1048, 0, 300)]),
        (3, 20000, [(16, 0, 20000)]),
        (1, 4100, [(72, 0, 4096)]),
    ):
        for weight_dtype in {dtype, torch.float32}:
            yield made(device, dtype, rows, features, matrices, weight_dtype, True)
            gated = [(rank, 2 * first, 2 * count) for rank, first, count in matrices]
            yield made(device, dtype, rows, 2 * features, gated, weight_dtype, activation="silu", gated=True)
    base, hidden = (torch.randn(3, n, device=device) for n in (80, 40))
    wide = torch.randn(50, 120, device=device).to(dtype) * 0.1
    views = [wide[:, 8:24], wide[3:33, 33:57]]  # strided rows, some of them not aligned
    yield Sample(base.to(dtype), hidden, views, [1.0, -0.5], [0, 50])
    yield Sample(base.to(dtype)[:, 10:70], hidden, views, [1.0, -0.5], [10, 0])


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
def test_lora_up_exact_on_integers(device, dtype):
    """Every rank meets every feature's weight of its place, and no other."""
    for rows, features, matrices in (
        (1, 300, [(16, 0, 300)]),
        (2, 130, [(5, 0, 77), (9, 60, 70)]),
        (16, 66, [(64, 2, 64), (8, 0, 66)]),
        (1, 4096, [(8, 0, 4096)]),
    ):
        hidden = torch.randint(-1, 2, (rows, sum(m[0] for m in matrices)), device=device).float()
        base, residual = (torch.randint(-9, 10, (rows, features), device=device).to(dtype) for _ in range(2))
        for weight_dtype in {dtype, torch.float32}:
            weights = [torch.randint(-1, 2, (n, rank), device=device).to(weight_dtype) for rank, _, n in matrices]
            call = (base, hidden, weights, [2.0, -1.0][: len(matrices)], [m[1] for m in matrices])
            for activation in (Activation.NONE, Activation.RELU):
                assert_exact(SPEC, Sample(*call, residual, activation))


@over_dtypes
def test_lora_up_leaves_other_features(device, dtype):
    """What no weight reaches is base, NaN and infinities among it; what one reaches differs."""
    base = torch.randn(2, 200, device=device).to(dtype)
    base[0, 3], base[1, 190] = float("inf"), float("nan")
    weight = torch.randn(20, 8, device=device).to(dtype)
    hidden = torch.randn(2, 16, device=device)
    found = SPEC(base, hidden, [weight, weight], [1.0, 2.0], [64, 150])
    same = torch.ones(200, dtype=torch.bool, device=device)
    same[64:84] = same[150:170] = False
    torch.testing.assert_close(found[:, same], base[:, same], rtol=0, atol=0, equal_nan=True)
    assert (found[:, ~same] != base[:, ~same]).float().mean() > 0.9


@over_dtypes
def test_lora_up_rounds_once(device, dtype):
    """What two adapters add is lost if each sum is rounded to 16 bits: each is below half of base's last place."""
    eps = torch.finfo(dtype).eps
    base = torch.ones(1, 8, device=device, dtype=dtype)
    weight = torch.ones(8, 1, device=device)
    hidden = torch.full((1, 2), 0.4 * eps, device=device)
    found = SPEC(base, hidden, [weight, weight], [1.0, 1.0], [0, 0])
    assert found.float().tolist() == [[1.0 + eps if dtype != torch.float32 else found[0, 0].item()] * 8]


@over_dtypes
def test_lora_up_gate_is_the_two_halves(device, dtype):
    """The gated result is that of both halves without a gate, multiplied before they are rounded."""
    for activation in ACTIVATIONS:
        sample = made(device, dtype, 3, 144, [(8, 0, 72), (16, 72, 72)], dtype, activation=activation, gated=True)
        assert_matches(SPEC, sample)
        gate, up = SPEC(*sample.args).float().chunk(2, -1)
        torch.testing.assert_close(
            ours(SPEC, sample)["result"].float(), SPEC(gate, *without(gate), activation=activation) * up, **close(dtype)
        )


def without(base):
    """Return arguments of a call that adds nothing to ``base``."""
    return base.new_zeros(len(base), 1).float(), [base.new_zeros(1, 1)], [1.0], [0]


def close(dtype):
    return dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=0.03, atol=0.03)


@over_dtypes
def test_lora_up_of_one_row_is_that_of_many(device, dtype):
    """Rows do not mix, and programmatic_launch changes nothing."""
    sample = made(device, dtype, 16, 520, [(8, 0, 260), (24, 260, 260)], torch.float32, True, activation="gelu")
    base, hidden, weights, scales, firsts, residual = sample.args
    together = ours(SPEC, sample)["result"]
    for row in range(16):
        of_row = (tensor[row : row + 1] for tensor in (base, hidden, residual))
        one, of_one, added = of_row
        alone = SPEC(one, of_one, weights, scales, firsts, added, "gelu", programmatic_launch=True)
        torch.testing.assert_close(alone.float(), together[row : row + 1].float(), **close(dtype))


@over_dtypes
def test_lora_up_of_owners(device, dtype):
    """A row takes the weights of its owner, and what others hold, NaN among it, is nothing to the row."""
    for gated in (False, True):
        matrices = [(8, 0, 72), (16, 72, 72), (5, 0, 144), (8, 36, 60), (16, 0, 144)]
        sample = made(device, dtype, 7, 144, matrices, dtype, not gated, gated=gated)
        base, hidden, weights, scales, firsts, residual = sample.args
        owners, chosen = [0, 0, 1, 7, 1], [1, 0, -1, 7, 1, 3, 0]
        of_rows = dict(chosen=torch.tensor(chosen, dtype=torch.int32, device=device), owners=owners)
        assert_matches(SPEC, Sample(*sample.args, gated=gated, **of_rows))
        for owner in {*owners, *chosen}:
            rows = [row for row, each in enumerate(chosen) if each == owner]
            spoiled = [each if owner == of else torch.full_like(each, torch.nan) for each, of in zip(weights, owners)]
            found = SPEC(base, hidden, spoiled, scales, firsts, residual, gated=gated, **of_rows)
            own = [place for place, of in enumerate(owners) if of == owner]
            parts = hidden.split([rank for rank, _, _ in matrices], dim=-1)
            if own:
                given = [parts[place] for place in own], [weights[place] for place in own]
                expected = SPEC(
                    base, torch.cat(given[0], -1), given[1], *([each[m] for m in own] for each in (scales, firsts)),
                    residual, gated=gated,
                )  # fmt: skip
            else:
                expected = SPEC(base, *without(base), residual, gated=gated)
            torch.testing.assert_close(found[rows].float(), expected[rows].float(), **close(dtype))


def test_lora_up_names_the_fault():
    base, hidden, weight = torch.randn(1, 8), torch.randn(1, 3), torch.randn(8, 3)
    row = torch.zeros(1, dtype=torch.int32)
    for more, message in (
        (
            dict(chosen=row.long(), owners=[0]),
            r"chosen is torch.int64 \(1,\) on cpu, expected torch.int32 \(1,\) on cpu",
        ),
        (dict(chosen=row.expand(2), owners=[0]), r"chosen is torch.int32 \(2,\) on cpu, expected torch.int32 \(1,\)"),
        (dict(chosen=row), "0 owners and 1 weights, expected as many of each"),
    ):
        with pytest.raises(OpInputError, match=message):
            SPEC(base, hidden, [weight], [1.0], [0], **more)
    for call, message in (
        ((base, hidden, [], [], []), "0 weights, expected 1 to 48"),
        ((base, hidden, [weight], [1.0, 1.0], [0]), "1 weights, 2 scales and 1 firsts, expected as many of each"),
        ((base, hidden, [weight], [1.0], []), "1 weights, 1 scales and 0 firsts, expected as many of each"),
        ((base, hidden, [weight], [1.0], [1]), r"weights\[0\] reaches features 1 to 9, expected within base's 8"),
        ((base, hidden, [weight], [1.0], [-1]), r"weights\[0\] reaches features -1 to 7, expected within base's 8"),
        ((base, hidden, [weight[0]], [1.0], [0]), r"weights\[0\] has shape \(3,\), expected \[features, rank\]"),
        ((base, hidden, [weight.half()], [1.0], [0]), r"weights\[0\] has dtype torch.float16, expected torch.float32"),
        ((base, hidden, [torch.randn(3, 8).t()], [1.0], [0]), r"weights\[0\] has strides \(1, 8\): make its rows"),
        ((base, hidden[:, 1:], [weight], [1.0], [0]), r"hidden has shape \(1, 2\), expected \(1, 3\)"),
        ((base, hidden.half(), [weight], [1.0], [0]), "hidden is torch.float16 on cpu, expected torch.float32 on cpu"),
        ((base, hidden, [weight], [1.0], [0], base[:, 1:]), r"residual has shape \(1, 7\), expected \(1, 8\)"),
        ((base, hidden, [weight], [1.0], [0], base, "none", True), "gated with 8 features takes .* no residual"),
        ((base[:, 1:], hidden, [weight[1:]], [1.0], [0], None, "none", True), "takes an even number of them"),
        ((base, hidden, [weight], [1.0], [0], None, "swish"), "activation is 'swish', expected one of none, relu"),
        ((torch.randn(17, 8), torch.randn(17, 3), [weight], [1.0], [0]), "x has 17 rows, expected 1 to 16"),
        ((base, torch.randn(1, 2049), [torch.randn(8, 2049)], [1.0], [0]), "2049 ranks, expected at most 2048"),
    ):
        with pytest.raises(OpInputError, match=message):
            SPEC(*call)


def test_lora_up_native_names_the_fault():
    """The library has checks of its own, as a decode plan calls it."""
    if not is_native(SPEC, torch.device("cpu")):
        pytest.skip("no native library")
    base, hidden, weight = torch.randn(1, 8), torch.randn(1, 3), torch.randn(8, 3)
    for call in (
        (base, hidden, [], [], []),
        (base, hidden, [weight], [1.0, 1.0], [0]),
        (base, hidden, [weight], [1.0], [1]),
        (base, hidden, [weight], [1.0], [-1]),
        (base, hidden, [weight], [1.0], [2**63 - 1]),
        (base, hidden, [weight], [1.0], [-(2**63)]),
        (base, hidden, [weight[0]], [1.0], [0]),
        (base, hidden, [weight.half()], [1.0], [0]),
        (base, hidden[:, 1:], [weight], [1.0], [0]),
        (base, hidden.half(), [weight], [1.0], [0]),
        (base, hidden, [weight], [1.0], [0], base[:, 1:]),
        (base, hidden, [weight], [1.0], [0], base, 0, True),
        (base, hidden, [weight], [1.0], [0], None, 5),
        (torch.randn(17, 8), torch.randn(17, 3), [weight], [1.0], [0]),
    ):
        with pytest.raises(RuntimeError):
            SPEC.overload(*call)
    for more in (dict(chosen=torch.zeros(2, dtype=torch.int32), owners=[0]), dict(chosen=torch.zeros(1).int())):
        with pytest.raises(RuntimeError):
            SPEC.overload(base, hidden, [weight], [1.0], [0], **more)
