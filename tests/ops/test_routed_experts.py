"""routed_experts: the common tests, the experts themselves, the parts it is made of, special values."""

from __future__ import annotations

import pytest
import torch
from checks import assert_matches, common_tests, over_dtypes, replaced

from hf_fastpath import ops
from hf_fastpath.ops.fused_experts import EXPERT_GATES
from hf_fastpath.ops.fused_swiglu import GATES
from hf_fastpath.ops.routed_experts import SPEC
from hf_fastpath.registry import OpInputError, Sample

CPU = torch.device("cpu")


def call(device, dtype, rows, top_k, num_experts, hidden_size, width, transposed=False, scores=None, **options):
    """Make a call whose scores differ within a row in every dtype."""

    def randn(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    order = torch.stack([torch.randperm(num_experts, device=device) for _ in range(rows)])
    gate_up, down = (num_experts, 2 * width, hidden_size), (num_experts, hidden_size, width)
    if transposed:
        gate_up, down = ((experts, columns, features) for experts, features, columns in (gate_up, down))
        options |= dict(gate_up_bias=randn(num_experts, 2 * width), down_bias=randn(num_experts, hidden_size))
    return Sample(
        x=randn(rows, hidden_size),
        logits=(order / 8 - 2).to(scores or dtype),
        gate_up_weight=randn(*gate_up) * hidden_size**-0.5,
        down_weight=randn(*down) * width**-0.5,
        top_k=top_k,
        transposed=transposed,
        **options,
    )


def odd_sizes(device, dtype):
    for rows, top_k, num_experts, hidden_size, width in (
        (1, 1, 1, 1, 1),
        (1, 3, 7, 33, 17),
        (1, 32, 40, 264, 24),
        (1, 5, 128, 72, 9),
        (1, 2, 129, 40, 16),
        (1, 6, 256, 40, 16),
        (1, 2, 257, 40, 16),
        (2, 2, 3, 17, 65),
        (15, 6, 64, 31, 40),
    ):
        sizes = rows, top_k, num_experts, hidden_size, width
        for activation in GATES:
            residual = torch.randn(rows, hidden_size, device=device).to(dtype)
            yield call(device, dtype, *sizes, activation=activation, residual=residual)
        for activation in EXPERT_GATES if hidden_size > 1 else ():  # biases alone may cancel each other
            yield call(device, dtype, *sizes, transposed=True, activation=activation, normalized=False, rounded=True)
    yield call(device, dtype, 1, 2, 6, 10248, 8)  # a row that no block keeps in float32
    yield call(device, dtype, 1, 3, 20, 200, 300, scores=torch.float32, rounded=True)


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize(("rows", "num_experts"), ((1, 10), (1, 140), (3, 10)))
def test_routed_experts_uses_the_chosen_experts_only(rows, num_experts, transposed, device, dtype):
    """The weights of experts that no row chooses hold NaN, and are not read."""
    sample = call(device, dtype, rows, 2, num_experts, 40, 24, transposed)
    sample.kwargs["logits"][:, 1::2] = -50
    for name in ("gate_up_weight", "down_weight", "gate_up_bias", "down_bias"):
        if name in sample.kwargs:
            sample.kwargs[name][1::2] = torch.nan
    assert assert_matches(SPEC, sample).isfinite().all()


@over_dtypes
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("normalized", (False, True))
def test_routed_experts_is_its_parts(normalized, transposed, device, dtype):
    """The bits are those of ``topk_softmax`` and ``fused_experts`` one after the other, equal scores included."""
    for rows, num_experts, top_k in ((1, 8, 2), (1, 32, 4), (1, 128, 8), (1, 200, 8), (1, 300, 8), (4, 16, 3)):
        sample = call(device, dtype, rows, top_k, num_experts, 136, 40, transposed, normalized=normalized)
        given = dict(sample.kwargs)
        given["logits"] = given["logits"].round()
        ids = torch.zeros(rows, top_k, dtype=torch.int64, device=device)
        weights = ops.topk_softmax(given["logits"], ids, normalized)
        others = {name: value for name, value in given.items() if name not in ("logits", "top_k", "normalized")}
        assert torch.equal(SPEC(**given), ops.fused_experts(**others, expert_ids=ids, expert_weights=weights))


@over_dtypes
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize(("rows", "num_experts", "top_k"), ((1, 10, 4), (1, 140, 5), (1, 12, 1), (5, 10, 3)))
def test_routed_experts_over_several_stacks(rows, num_experts, top_k, transposed, device, dtype):
    """Halves of the experts, of which a row may choose none, give parts of the sum; no weight beside them is read."""
    sample = call(device, dtype, rows, top_k, num_experts, 72, 24, transposed)
    exact = sample.map_tensors(torch.Tensor.double)
    total = torch.zeros_like(exact.kwargs["x"])
    names = [name for name in sample.kwargs if name.endswith(("_weight", "_bias"))]
    for first in (0, num_experts // 2):
        part = {}
        for name in names:
            held = torch.full_like(sample.kwargs[name], torch.nan)
            mine = slice(first, first + num_experts // 2)
            held[mine] = sample.kwargs[name][mine]
            part[name] = held[mine]
        one = replaced(SPEC, sample, **part, first_expert=first)
        assert_matches(SPEC, one)
        total += SPEC.reference(**one.map_tensors(torch.Tensor.double).kwargs)
    torch.testing.assert_close(total, SPEC.reference(**exact.kwargs))


@over_dtypes
def test_routed_experts_special_values(device, dtype):
    """A score that is NaN makes the whole row NaN, and no other row."""
    for rows in (1, 3):
        sample = call(device, dtype, rows, 2, 5, 64, 24)
        sample.kwargs["logits"][0, 3] = torch.nan
        result = assert_matches(SPEC, sample)
        assert result[0].isnan().all() and result[1:].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"first_expert": 1}, "first_expert is 1, expected 0 to 0: 3 have weights"),
        ({"first_expert": -1}, "first_expert is -1, expected 0 to 0"),
        ({"logits": torch.zeros(2, 4)}, r"logits is torch.float32 \(2, 4\), expected .* \[..., 3\]"),
        ({"logits": torch.zeros(1, 3)}, "logits has 1 rows, expected the 2 of x"),
        ({"top_k": 0}, "top_k is 0, expected 1 to 32"),
        ({"top_k": 4}, "top_k is 4, expected at most the 3 experts"),
        ({"down_weight": torch.zeros(3, 40, 23)}, "gate_up_weight has shape"),
    ),
)
def test_routed_experts_names_the_fault(change, message):
    sample = call(CPU, torch.float32, 2, 2, 3, 40, 24)
    with pytest.raises(OpInputError, match=message):
        SPEC(**replaced(SPEC, sample, **change).kwargs)
