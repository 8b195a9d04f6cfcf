"""routed_experts: the common tests, the experts themselves, the parts it is made of, special values."""

from __future__ import annotations

import pytest
import torch
from checks import assert_matches, common_tests, over_dtypes, replaced
from models import require_native

from hf_fastpath import ops
from hf_fastpath.choices import Activation, Scoring
from hf_fastpath.ops.fused_experts import EXPERT_GATES
from hf_fastpath.ops.fused_swiglu import GATES
from hf_fastpath.ops.routed_experts import SPEC
from hf_fastpath.registry import OpInputError, Sample

CPU = torch.device("cpu")


def call(
    device, dtype, rows, top_k, num_experts, hidden_size, width, transposed=False, scores=None, shared=0, **options
):  # fmt: skip
    """Make a call whose scores differ within a row in every dtype; ``shared``: features of a shared expert."""

    def randn(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    order = torch.stack([torch.randperm(num_experts, device=device) for _ in range(rows)])
    gate_up, down = (num_experts, 2 * width, hidden_size), (num_experts, hidden_size, width)
    if transposed:
        gate_up, down = ((experts, columns, features) for experts, features, columns in (gate_up, down))
        options |= dict(gate_up_bias=randn(num_experts, 2 * width), down_bias=randn(num_experts, hidden_size))
    if shared:
        options |= {f"shared_{name}_weight": randn(shared, hidden_size) * hidden_size**-0.5 for name in ("gate", "up")}
        options["shared_down_weight"] = randn(hidden_size, shared) * shared**-0.5
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
    yield call(device, dtype, 1, 2, 6, 10248, 8, shared=16)
    for width in (704, 1408):  # more places than a ring has slots, of float32 and of 16 bits
        yield call(device, dtype, 1, 8, 10, 40, width)
        yield call(
            device, dtype, 1, 6, 10, 40, width, shared=3 * width, shared_logits=torch.randn(1, 1).to(device, dtype)
        )
    for shared in (16, 24 * 16, 31 * 16, 17):
        yield call(device, dtype, 1, 2, 200, 72, 16, shared=shared, residual=torch.randn(1, 72).to(device, dtype))
        yield call(device, dtype, 1, 8, 9, 33, 17, shared=shared)
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


def routers(num_experts, device):
    """Arguments of routers of every kind."""
    bias = torch.randn(num_experts, device=device)
    yield {}
    yield dict(rounded=True, sum_eps=0.1)
    yield dict(scoring=Scoring.SIGMOID, rounded=True)
    yield dict(scoring=Scoring.SOFTMAX, correction_bias=bias.bfloat16() / num_experts, factor=2.0)
    yield dict(scoring=Scoring.SIGMOID, correction_bias=torch.zeros_like(bias).half())
    for scoring in Scoring if num_experts % 4 == 0 else ():
        groups = dict(num_groups=4, top_groups=2, group_tops=1 + (num_experts > 16))
        yield dict(scoring=scoring, correction_bias=bias, factor=1.5, **groups)
        yield dict(scoring=scoring, sum_eps=1e-20, **groups)


@over_dtypes
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("normalized", (False, True))
def test_routed_experts_is_its_parts(normalized, transposed, device, dtype):
    """The bits are those of ``choose_experts`` and ``fused_experts`` one after the other, equal scores included."""
    for rows, num_experts, top_k in ((1, 8, 2), (1, 30, 4), (1, 128, 8), (1, 132, 8), (1, 300, 8), (4, 16, 3)):
        scores = torch.float32 if num_experts == 128 else dtype
        sample = call(device, dtype, rows, top_k, num_experts, 136, 40, transposed, scores, normalized=normalized)
        given = dict(sample.kwargs)
        given["logits"] = given["logits"].round()
        ids = torch.zeros(rows, top_k, dtype=torch.int64, device=device)
        for router in routers(num_experts, device):
            weights = ops.choose_experts(given["logits"], ids, normalized, **router)
            others = {name: value for name, value in given.items() if name not in ("logits", "top_k", "normalized")}
            found = SPEC(**given, **router)
            assert torch.equal(found, ops.fused_experts(**others, expert_ids=ids, expert_weights=weights)), router


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


@over_dtypes
@pytest.mark.parametrize(("rows", "width"), ((1, 24), (1, 22), (3, 24)))
def test_routed_experts_adds_a_shared_expert(rows, width, device, dtype):
    """What it adds does not depend on who is chosen, and is nothing behind a gate that is shut."""
    shut = torch.full((rows, 1), -torch.inf, device=device, dtype=dtype)
    sample = call(device, dtype, rows, 2, 6, 40, 24, shared=width)
    assert_matches(SPEC, sample)
    without = {name: each for name, each in sample.kwargs.items() if not name.startswith("shared_")}
    found = SPEC(**(sample.kwargs | {"shared_logits": shut}))
    torch.testing.assert_close(found, SPEC(**without), rtol=0, atol=0)
    none = sample.kwargs | {"gate_up_weight": torch.zeros_like(sample.kwargs["gate_up_weight"])}
    assert_matches(SPEC, Sample(**none))
    other = none | {"logits": sample.kwargs["logits"].flip(-1)}
    assert torch.equal(SPEC(**none), SPEC(**other)) and SPEC(**none).any()


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"shared_up_weight": None}, "shared_up_weight are missing: the weights of a shared expert go together"),
        ({"shared_gate_weight": None, "shared_up_weight": None, "shared_down_weight": None}, "go together"),
        ({"shared_gate_weight": torch.zeros(9, 8)}, "shared_gate_weight has shape"),
        ({"shared_down_weight": torch.zeros(9, 40).T}, "shared_down_weight has strides"),
        ({"shared_up_weight": torch.zeros(9, 40, dtype=torch.float16)}, "shared_up_weight"),
        ({"shared_logits": torch.zeros(3, 1)}, r"shared_logits has shape \(3, 1\), expected one number for each of 2"),
        ({"transposed": True, "activation": Activation.CLAMPED_SWIGLU}, "activation"),
    ),
)
def test_routed_experts_names_the_fault_in_a_shared_expert(change, message):
    sample = call(CPU, torch.float32, 2, 2, 3, 40, 24, shared=9, shared_logits=torch.zeros(2, 1))
    with pytest.raises(OpInputError, match=message):
        SPEC(**replaced(SPEC, sample, **change).kwargs)
    require_native(CPU)
    with pytest.raises(RuntimeError):
        SPEC.overload(**replaced(SPEC, sample, **change).kwargs)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"first_expert": 1}, "first_expert is 1, expected 0 to 0: 3 have weights"),
        ({"first_expert": -1}, "first_expert is -1, expected 0 to 0"),
        ({"logits": torch.zeros(2, 4)}, r"logits is torch.float32 \(2, 4\), expected .* \[..., 3\]"),
        ({"logits": torch.zeros(1, 3)}, "logits has 1 rows, expected the 2 of x"),
        ({"top_k": 0}, "top_k is 0, expected 1 to 32"),
        ({"top_k": 4}, "top_k is 4, expected at most the 3 experts"),
        ({"num_groups": 3, "group_tops": 1}, "top_k is 2, expected at most the 1 experts of 1 groups"),
        ({"num_groups": 2}, "num_groups is 2 of 3 experts, expected 1 to 32 of equal size"),
        ({"correction_bias": torch.zeros(4)}, r"correction_bias is torch.float32 \(4,\), expected .* \[3\]"),
        ({"down_weight": torch.zeros(3, 40, 23)}, "gate_up_weight has shape"),
    ),
)
def test_routed_experts_names_the_fault(change, message):
    sample = call(CPU, torch.float32, 2, 2, 3, 40, 24)
    with pytest.raises(OpInputError, match=message):
        SPEC(**replaced(SPEC, sample, **change).kwargs)
