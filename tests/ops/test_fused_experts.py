"""fused_experts: the common tests, exact integers, experts that many rows share, special values."""

from __future__ import annotations

import pytest
import torch
from checks import assert_exact, assert_matches, common_tests, ours, over_dtypes, replaced, small_integers

from hf_fastpath.ops.fused_experts import EXPERT_GATES, SPEC, UNGATED
from hf_fastpath.ops.fused_swiglu import GATES
from hf_fastpath.registry import OpInputError, Sample

CPU = torch.device("cpu")


def choices(device, rows, top_k, num_experts):
    """Return weights that sum to one, and experts that differ within a row."""
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
        up = gate_up[:, :width]  # experts that are strided, too
        yield Sample(randn(rows, hidden_size), ids, weights, up, down, randn(rows, hidden_size), UNGATED)
    weights, ids = choices(device, 2, 2, 3)
    yield Sample(randn(2, 40), ids, weights, randn(3, 48, 100)[:, :, 30:70] * 0.1, randn(3, 60, 24)[:, 20:] * 0.1)
    yield Sample(randn(2, 40), ids, weights, randn(48, 3, 40).transpose(0, 1) * 0.1, randn(3, 40, 24) * 0.1)

    for rows, top_k, num_experts, hidden_size, width in (
        (1, 1, 1, 1, 1),
        (1, 3, 7, 33, 17),
        (1, 4, 5, 136, 520),
        (2, 2, 2, 17, 65),
        (4, 2, 3, 48, 32),
        (5, 4, 6, 129, 9),
        (16, 3, 64, 31, 40),
        (15, 32, 33, 9, 10),
        (12, 4, 8, 72, 24),
    ):
        for activation in EXPERT_GATES:
            sample = transposed(device, dtype, rows, top_k, num_experts, hidden_size, width, activation=activation)
            yield from (sample, replaced(SPEC, sample, concatenated=True))
    sample = transposed(device, dtype, 3, 2, 4, 64, 48)
    yield replaced(SPEC, sample, gate_up_bias=None, residual=sample.kwargs["x"])
    stacks = torch.randn(4, 2 * 64, 100, device=device).to(dtype) * 0.1
    unaligned = replaced(SPEC, sample, gate_up_weight=stacks[:, 5:69, 2:98], down_bias=None)
    yield from (unaligned, replaced(SPEC, unaligned, concatenated=True))
    by_row = sample.kwargs["gate_up_weight"].transpose(0, 1).contiguous().transpose(0, 1)
    yield replaced(SPEC, sample, gate_up_weight=by_row)


def transposed(device, dtype, rows, top_k, num_experts, hidden_size, width, activation="clamped_swiglu") -> Sample:
    """Make a call with weights as gpt-oss keeps them; about half of the gates and ups are beyond the limit."""

    def randn(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    weights, ids = choices(device, rows, top_k, num_experts)
    return Sample(
        x=randn(rows, hidden_size),
        expert_ids=ids,
        expert_weights=weights,
        gate_up_weight=randn(num_experts, hidden_size, 2 * width) * hidden_size**-0.5,
        down_weight=randn(num_experts, width, hidden_size) * width**-0.5,
        activation=activation,
        gate_up_bias=randn(num_experts, 2 * width),
        down_bias=randn(num_experts, hidden_size),
        transposed=True,
        limit=1.0,
    )


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
    """The weights of other experts hold NaN and are not read; an expert that does not exist reads nothing."""
    scores = torch.randn(rows, 5, device=device).softmax(-1)
    weights, ids = scores.topk(2)
    ids = ids * 2  # no row chooses an odd expert
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
    """Every row takes the same experts in another order; one row takes an expert twice."""
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
    """NaN and infinity of an expert reach exactly the rows that chose that expert."""
    weights, ids = torch.full((3, 2), 0.5, device=device), torch.tensor([[0, 1], [2, 0], [3, 1]], device=device)
    for bad in (torch.nan, torch.inf):
        x = torch.randn(3, 64, device=device).to(dtype)
        stacks = [torch.randn(4, n, k, device=device).to(dtype) * 0.1 for n, k in ((48, 64), (64, 24))]
        stacks[1][2, 5, 7] = bad
        wrong = ~assert_matches(SPEC, Sample(x, ids, weights, *stacks)).isfinite()
        assert wrong.nonzero().tolist() == [[1, 5]]


@over_dtypes
def test_fused_experts_transposed_exact_on_integers(device, dtype):
    """The same holds for gates and ups that alternate; every bias counts."""
    for rows, top_k, num_experts, hidden_size, width in ((1, 2, 4, 112, 40), (4, 2, 3, 61, 37), (16, 4, 8, 104, 24)):
        x, up, down = small_integers(
            device, dtype, (rows, hidden_size), (num_experts, hidden_size, width), (num_experts, width, hidden_size)
        )
        x = x * (torch.rand(hidden_size, device=device) < 4 / hidden_size)
        x[:, -1] = 1
        down = down * (torch.rand(num_experts, width, 1, device=device) < 4 / width)
        gate = torch.zeros_like(up)
        gate[:, -1] = 32
        gate_bias, up_bias, down_bias = (torch.randint(-2, 3, (num_experts, n), device=device) for n in (1, width, 1))
        biases = torch.stack(((32 + 0 * gate_bias).expand(-1, width), up_bias), dim=-1).flatten(1).to(dtype)
        ids = torch.stack([torch.randperm(num_experts, device=device)[:top_k] for _ in range(rows)])
        weights = torch.full(ids.shape, 2.0**-5, device=device)
        call = Sample(
            *(x, ids, weights, torch.stack((gate, up), dim=-1).flatten(2), down),
            gate_up_bias=biases,
            down_bias=(32 * down_bias).expand(-1, hidden_size).to(dtype),
            transposed=True,
        )
        assert_exact(SPEC, call)


@over_dtypes
@pytest.mark.parametrize("rows", (1, 3, 8, 16))
def test_fused_experts_transposed_uses_the_chosen_experts_only(rows, device, dtype):
    sample = transposed(device, dtype, rows, 2, 10, 40, 24)
    scores = torch.randn(rows, 5, device=device)
    ids = scores.topk(2).indices * 2  # no row chooses an odd expert
    for name in ("gate_up_weight", "down_weight", "gate_up_bias", "down_bias"):
        sample.kwargs[name][1::2] = torch.nan
    for second in (ids[:, 1], -1, 10, 2**40, ids[:, 0]):  # the last one is the same expert twice
        ids = ids.clone()
        ids[:, 1] = second
        assert assert_matches(SPEC, replaced(SPEC, sample, expert_ids=ids)).isfinite().all()
    none = replaced(SPEC, sample, expert_ids=torch.full_like(ids, -1), residual=sample.kwargs["x"])
    assert torch.equal(ours(SPEC, none)["result"], sample.kwargs["x"])


@over_dtypes
def test_fused_experts_transposed_rows_do_not_matter_to_each_other(device, dtype):
    """The bits of a row's result do not depend on the other rows of the call."""
    sample = transposed(device, dtype, 8, 3, 4, 72, 40)
    together = ours(SPEC, sample)["result"]
    for count in (5, 8):
        rows = {name: sample.kwargs[name][:count] for name in ("x", "expert_ids", "expert_weights")}
        assert torch.equal(ours(SPEC, replaced(SPEC, sample, **rows))["result"], together[:count])


@over_dtypes
def test_fused_experts_transposed_special_values(device, dtype):
    """NaN of an expert reaches exactly the rows that chose that expert; infinite gates and ups are clamped."""
    sample = transposed(device, dtype, 3, 2, 4, 64, 24)
    sample.kwargs["expert_ids"] = torch.tensor([[0, 1], [2, 0], [3, 1]], device=device)
    sample.kwargs["down_weight"][2, 7, 5] = torch.nan
    assert (~assert_matches(SPEC, sample).isfinite()).nonzero().tolist() == [[1, 5]]
    sample.kwargs["down_weight"][2, 7, 5] = 0
    sample.kwargs["gate_up_bias"][2, 3] = torch.nan
    assert assert_matches(SPEC, sample)[1].isnan().all()
    sample.kwargs["gate_up_bias"][2] = torch.inf
    assert assert_matches(SPEC, sample).isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"transposed": False}, r"gate_up_weight has shape \(3, 40, 48\), expected \(3, 80, 40\)"),
        ({"gate_up_bias": torch.zeros(3, 24)}, r"gate_up_bias has shape \(3, 24\), expected \(3, 48\)"),
        ({"down_bias": torch.zeros(40)}, r"down_bias has shape \(40,\), expected \(3, 40\)"),
        ({"down_bias": torch.zeros(3, 40).half()}, "down_bias"),
        ({"down_weight": torch.zeros(3, 40, 24)}, "down_weight|gate_up_weight"),
        ({"limit": 0.0}, "limit is 0.0, expected a positive number"),
        ({"limit": float("nan")}, "limit is nan"),
    ),
)
def test_fused_experts_transposed_names_the_fault(change, message):
    sample = transposed(CPU, torch.float32, 2, 2, 3, 40, 24)
    with pytest.raises(OpInputError, match=message):
        SPEC(**replaced(SPEC, sample, **change).kwargs)


def test_fused_experts_biases_go_with_transposed():
    call = next(SPEC.samples(CPU, torch.float32))
    for change in ({"gate_up_bias": torch.zeros(4, 74)}, {"activation": "clamped_swiglu"}):
        with pytest.raises(OpInputError, match="goes with transposed|expected one of silu"):
            SPEC(**replaced(SPEC, call, **change).kwargs)
        with pytest.raises((RuntimeError, KeyError)):
            SPEC.overload(**replaced(SPEC, call, **change).kwargs)
