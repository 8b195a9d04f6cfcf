"""fused_experts: the common tests, exact integers, experts that many rows share, special values."""

from __future__ import annotations

import pytest
import torch
from checks import assert_exact, assert_matches, common_tests, ours, over_dtypes, replaced, small_integers

from hf_fastpath.ops.fused_experts import SPEC
from hf_fastpath.ops.fused_swiglu import GATES
from hf_fastpath.registry import Sample


def choices(device, rows, top_k, num_experts):
    """Weights that sum to one, and experts that differ within a row."""
    return torch.randn(rows, num_experts, device=device).softmax(-1).topk(top_k)


def odd_sizes(device, dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    for rows, top_k, num_experts, hidden_size, width in (
        (1, 1, 1, 1, 1),
        (1, 3, 7, 33, 17),
        (2, 2, 2, 17, 65),
        (5, 4, 6, 129, 9),
        (9, 2, 3, 70, 31),
        (16, 3, 64, 31, 40),
        (1, 32, 40, 264, 24),
        (15, 32, 33, 9, 10),
    ):
        weights, ids = choices(device, rows, top_k, num_experts)
        gate_up = randn(num_experts, 2 * width, hidden_size) * hidden_size**-0.5
        down = randn(num_experts, hidden_size, width) * width**-0.5
        for activation in GATES:
            yield Sample(randn(rows, hidden_size), ids, weights, gate_up, down, randn(rows, hidden_size), activation)
    weights, ids = choices(device, 2, 2, 3)
    yield Sample(randn(2, 40), ids, weights, randn(3, 48, 100)[:, :, 30:70] * 0.1, randn(3, 60, 24)[:, 20:] * 0.1)
    yield Sample(randn(2, 40), ids, weights, randn(48, 3, 40).transpose(0, 1) * 0.1, randn(3, 40, 24) * 0.1)


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
def test_fused_experts_exact_on_integers(device, dtype):
    """A gate is the identity at 64; with such gates, and powers of two as weights, the whole op is exact."""
    for rows, top_k, num_experts, hidden_size, width in ((1, 2, 4, 111, 37), (4, 2, 3, 64, 40), (16, 4, 8, 100, 19)):
        x, up, down = small_integers(
            device, dtype, (rows, hidden_size), (num_experts, width, hidden_size), (num_experts, hidden_size, width)
        )
        x = x * (torch.rand(hidden_size, device=device) < 4 / hidden_size)  # else the second product is too large
        x[:, -1] = 1  # the gates' only input: the last, where a tail would be lost
        down = down * (torch.rand_like(down, dtype=torch.float32) < 4 / width)
        gate = torch.zeros_like(up)
        gate[..., -1] = 64
        ids = torch.stack([torch.randperm(num_experts, device=device)[:top_k] for _ in range(rows)])
        weights = torch.full(ids.shape, 2.0**-6, device=device)
        assert_exact(SPEC, Sample(x, ids, weights, torch.cat((gate, up), dim=1), down))


@over_dtypes
@pytest.mark.parametrize("rows", (1, 3, 8, 16))
def test_fused_experts_uses_the_chosen_experts_only(rows, device, dtype):
    """What the others hold, NaN here, is not read; nor is anything for an expert that does not exist."""
    scores = torch.randn(rows, 5, device=device).softmax(-1)
    weights, ids = scores.topk(2)
    ids = ids * 2  # the odd experts are nobody's
    stacks = [torch.randn(10, n, k, device=device).to(dtype) * 0.1 for n, k in ((48, 40), (40, 24))]
    for stack in stacks:
        stack[1::2] = torch.nan
    call = Sample(torch.randn(rows, 40, device=device).to(dtype), ids, weights, *stacks)
    result = assert_matches(SPEC, call)
    assert result.isfinite().all()
    for nobody in (-1, 10, 2**40):
        absent = ids.clone()
        absent[:, 1] = nobody
        assert assert_matches(SPEC, replaced(SPEC, call, expert_ids=absent)).isfinite().all()
    none = replaced(SPEC, call, expert_ids=torch.full_like(ids, -1), residual=call.args[0])
    assert torch.equal(ours(SPEC, none)["result"], call.args[0])


@over_dtypes
def test_fused_experts_all_rows_choose_alike(device, dtype):
    """Every row takes the same experts, in another order; one takes an expert twice."""
    x = torch.randn(16, 72, device=device).to(dtype)
    stacks = [torch.randn(4, n, k, device=device).to(dtype) * 0.1 for n, k in ((80, 72), (72, 40))]
    ids = torch.tensor([[3, 1, 0], [0, 3, 1]], device=device).repeat(8, 1)
    ids[5] = 1
    for rows in (1, 2, 4, 7, 16):
        weights = torch.rand(rows, 3, device=device)
        assert_matches(SPEC, Sample(x[:rows], ids[:rows], weights, *stacks, x[:rows]))
    assert_matches(SPEC, Sample(x[5:6], ids[5:6], torch.rand(1, 3, device=device), *stacks))


@over_dtypes
def test_fused_experts_special_values(device, dtype):
    """NaN and infinity of an expert reach exactly the rows that chose it."""
    weights, ids = torch.full((3, 2), 0.5, device=device), torch.tensor([[0, 1], [2, 0], [3, 1]], device=device)
    for bad in (torch.nan, torch.inf):
        x = torch.randn(3, 64, device=device).to(dtype)
        stacks = [torch.randn(4, n, k, device=device).to(dtype) * 0.1 for n, k in ((48, 64), (64, 24))]
        stacks[1][2, 5, 7] = bad
        wrong = ~assert_matches(SPEC, Sample(x, ids, weights, *stacks)).isfinite()
        assert wrong.nonzero().tolist() == [[1, 5]]
