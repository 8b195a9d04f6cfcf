"""choose_experts: the common tests, the experts themselves, equal scores, special values."""

from __future__ import annotations

import pytest
import torch
from checks import common_tests, over_dtypes
from models import CPU, require_native

from hf_fastpath.choices import Scoring
from hf_fastpath.ops.choose_experts import SPEC
from hf_fastpath.registry import OpInputError, Sample


def ids_for(logits, top_k):
    return torch.full((len(logits), top_k), -7, dtype=torch.int64, device=logits.device)


def odd_sizes(device, dtype):
    for rows, num_experts, top_k in ((1, 2, 1), (3, 17, 5), (2, 127, 31), (7, 300, 6), (1, 1023, 32)):
        logits = torch.randn(rows, num_experts, device=device).to(dtype)
        yield Sample(logits, ids_for(logits, top_k))
        yield Sample(logits, ids_for(logits, top_k), False, True)
        bias = torch.randn(num_experts, device=device)
        for scoring in Scoring:
            router = dict(scoring=scoring, correction_bias=bias, factor=1.75)
            yield Sample(logits, ids_for(logits, top_k), **router)
            if num_experts % 3 == 0:
                router |= dict(num_groups=3, top_groups=2, group_tops=2 - (num_experts == 3), sum_eps=0.1)
                yield Sample(logits, ids_for(logits, min(top_k, num_experts // 3)), False, **router)
                yield Sample(logits, ids_for(logits, min(top_k, num_experts // 3)), True, True, **router)


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
@pytest.mark.parametrize("num_experts", (1, 8, 128, 129, 1024))
def test_choose_experts_finds_the_experts(num_experts, device, dtype):
    """Scores differ in every dtype."""
    order = torch.stack([torch.randperm(num_experts, device=device) for _ in range(5)])
    logits = (order - num_experts).to(dtype) / 4 if num_experts <= 256 else (order // 8 * 8 - 1024).to(dtype)
    top_k = min(num_experts, 32)
    ids = ids_for(logits, top_k)
    weights = SPEC(logits, ids, normalized=False)
    probabilities = logits.double().softmax(-1)
    picked = probabilities.gather(1, ids)
    assert torch.equal(picked, probabilities.topk(top_k).values)
    assert all(len(set(row)) == top_k for row in ids.tolist())
    torch.testing.assert_close(weights, picked.float())


@over_dtypes
def test_choose_experts_equal_scores(device, dtype):
    """Each expert is chosen once, whatever is equal to it."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, -100.0, 1.0], [0.0] * 6], device=device).to(dtype)
    ids = ids_for(logits, 4)
    weights = SPEC(logits, ids)
    assert set(ids[0, :3].tolist()) == {1, 2, 3} and ids[0, 3] in (0, 5) and len(set(ids[1].tolist())) == 4
    torch.testing.assert_close(weights[1], torch.full((4,), 0.25, device=device))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, device=device))


@over_dtypes
def test_choose_experts_special_values(device, dtype):
    """Experts that are ruled out are chosen last; NaN gives NaN, and the experts exist."""
    inf = float("inf")
    logits = torch.tensor([[-inf, 2.0, -inf, 1.0], [0.0, float("nan"), 1.0, 2.0], [inf, 0, 1, 2]], device=device)
    ids = ids_for(logits, 3)
    weights = SPEC(logits.to(dtype), ids)
    assert ids[0, :2].tolist() == [1, 3] and weights[0, 2] == 0
    assert weights[1:].isnan().all()
    assert all(len(set(row)) == 3 and set(row) <= set(range(4)) for row in ids.tolist())


@over_dtypes
@pytest.mark.parametrize("scoring", Scoring, ids=lambda each: each.label)
@pytest.mark.parametrize(("num_experts", "num_groups"), ((8, 1), (8, 4), (96, 32), (256, 8), (960, 20)))
def test_choose_experts_of_groups(num_experts, num_groups, scoring, device, dtype):
    """Groups whose largest two are largest, and nobody of another group, however large; the bias is no part of weights.

    Logits are equal, so that the bias alone decides, whose sums are exact in every dtype.
    """
    size = num_experts // num_groups
    bias = torch.randperm(num_experts, device=device).float() / 16
    logits = torch.zeros(3, num_experts, device=device, dtype=dtype)
    kept = min(3, num_groups)
    ids = ids_for(logits, min(size * kept, 9))
    router = dict(num_groups=num_groups, top_groups=kept, group_tops=2, factor=4.0)
    weights = SPEC(logits, ids, False, scoring=scoring, correction_bias=bias, **router)
    groups = bias.view(num_groups, size)
    best = groups.topk(2).values.sum(-1).topk(kept).indices
    allowed = torch.full_like(groups, -torch.inf).index_copy(0, best, groups[best]).flatten()
    assert torch.equal(ids, allowed.topk(ids.shape[1]).indices.expand_as(ids))
    share = 1 / num_experts if scoring == Scoring.SOFTMAX else 0.5
    torch.testing.assert_close(weights, torch.full_like(weights, 4 * share))


@over_dtypes
def test_choose_experts_special_scores(device, dtype):
    """With a sigmoid, NaN is chosen first and is the weight of that expert alone; large logits are 0 and 1."""
    logits = torch.tensor([[0.0, float("nan"), 80.0, -80.0]], device=device).to(dtype)
    ids = ids_for(logits, 3)
    weights = SPEC(logits, ids, False, scoring=Scoring.SIGMOID)
    assert ids.tolist() == [[1, 2, 0]] and weights[0, 0].isnan() and weights[0, 1:].tolist() == [1.0, 0.5]
    assert SPEC(logits, ids, True, scoring=Scoring.SIGMOID).isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (dict(scoring=2), "scoring is 2, expected one of softmax, sigmoid"),
        (dict(correction_bias=torch.zeros(11)), r"correction_bias is torch.float32 \(11,\), expected .* \[12\]"),
        (dict(correction_bias=torch.zeros(24)[::2]), "expected contiguous floats"),
        (dict(correction_bias=torch.zeros(12, dtype=torch.int32)), "correction_bias is torch.int32"),
        (dict(num_groups=5), "num_groups is 5 of 12 experts, expected 1 to 32 of equal size"),
        (dict(num_groups=0), "num_groups is 0 of 12 experts"),
        (dict(num_groups=4, top_groups=5), "top_groups is 5, expected 1 to the 4 groups"),
        (dict(num_groups=4, top_groups=1), r"expert_ids has shape \(2, 4\), expected \[2, 1 to 3\]"),
        (dict(num_groups=4, top_groups=2, group_tops=3), "group_tops is 3, expected 1 to 2"),
        (dict(num_groups=12, top_groups=4), "group_tops is 2, expected 1 to 1: groups have 1 experts"),
        (dict(sum_eps=-1.0), "sum_eps is -1.0, expected 0 or more"),
    ),
)
def test_choose_experts_names_the_fault(change, message):
    logits = torch.randn(2, 12)
    with pytest.raises(OpInputError, match=message):
        SPEC(logits, ids_for(logits, 4), **change)
    require_native(CPU)
    with pytest.raises(RuntimeError):
        SPEC.overload(logits, ids_for(logits, 4), **change)


@pytest.mark.parametrize(("num_experts", "top_k"), ((4, 2), (8, 1), (64, 6), (128, 8), (256, 3), (1000, 32)))
@pytest.mark.parametrize("scoring", Scoring, ids=lambda each: each.label)
def test_choose_experts_of_equal_scores_are_stocks(num_experts, top_k, scoring):
    """A router whose weights are zeros chooses as ``torch.topk`` does, on the CPU: then logits can be compared."""
    require_native(CPU)
    for logits in (torch.zeros(2, num_experts), torch.randint(0, 3, (2, num_experts)).float()):
        for groups in ({}, dict(num_groups=4, top_groups=3, group_tops=1)):
            ids, expected = ids_for(logits, top_k), ids_for(logits, top_k)
            SPEC(logits, ids, scoring=scoring, **groups)
            SPEC.reference(logits, expected, scoring=scoring, **groups)
            assert torch.equal(ids.sort(-1).values, expected.sort(-1).values)
