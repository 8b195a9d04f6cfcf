"""topk_softmax: the common tests, the experts themselves, equal scores, special values."""

from __future__ import annotations

import pytest
import torch
from checks import common_tests, over_dtypes

from hf_fastpath.ops.topk_softmax import SPEC
from hf_fastpath.registry import Sample


def ids_for(logits, top_k):
    return torch.full((len(logits), top_k), -7, dtype=torch.int64, device=logits.device)


def odd_sizes(device, dtype):
    for rows, num_experts, top_k in ((1, 2, 1), (3, 17, 5), (2, 127, 31), (7, 300, 6), (1, 1023, 32)):
        logits = torch.randn(rows, num_experts, device=device).to(dtype)
        yield Sample(logits, ids_for(logits, top_k))
        yield Sample(logits, ids_for(logits, top_k), False, True)


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
@pytest.mark.parametrize("num_experts", (1, 8, 128, 129, 1024))
def test_topk_softmax_finds_the_experts(num_experts, device, dtype):
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
def test_topk_softmax_equal_scores(device, dtype):
    """Each expert is chosen once, whatever is equal to it."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, -100.0, 1.0], [0.0] * 6], device=device).to(dtype)
    ids = ids_for(logits, 4)
    weights = SPEC(logits, ids)
    assert set(ids[0, :3].tolist()) == {1, 2, 3} and ids[0, 3] in (0, 5) and len(set(ids[1].tolist())) == 4
    torch.testing.assert_close(weights[1], torch.full((4,), 0.25, device=device))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, device=device))


@over_dtypes
def test_topk_softmax_special_values(device, dtype):
    """Experts that are ruled out are chosen last; NaN gives NaN, and the experts exist."""
    inf = float("inf")
    logits = torch.tensor([[-inf, 2.0, -inf, 1.0], [0.0, float("nan"), 1.0, 2.0], [inf, 0, 1, 2]], device=device)
    ids = ids_for(logits, 3)
    weights = SPEC(logits.to(dtype), ids)
    assert ids[0, :2].tolist() == [1, 3] and weights[0, 2] == 0
    assert weights[1:].isnan().all()
    assert all(len(set(row)) == 3 and set(row) <= set(range(4)) for row in ids.tolist())
