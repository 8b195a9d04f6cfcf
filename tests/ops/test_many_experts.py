"""Experts of many rows: the calls that compute what the ops for a few rows do, over all of their options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import assert_rule, over_dtypes
from memory import upcast
from models import CPU, require_native
from torch.utils._python_dispatch import TorchDispatchMode

from hf_fastpath import ops
from hf_fastpath.choices import Activation, NormKind, Scoring
from hf_fastpath.decode.calls.named_calls import Call, Norm, Register, run
from hf_fastpath.decode.lower import composed, many_experts
from hf_fastpath.decode.lower.which_op import Lower
from hf_fastpath.ops.fused_experts import EXPERT_GATES, UNGATED
from hf_fastpath.ops.fused_swiglu import GATES
from hf_fastpath.ops.gemv import MAX_ROWS
from hf_fastpath.options import MAX_BATCH
from hf_fastpath.recording import marks

#: rows, choices of a row, experts, hidden and inner features: odd ones, of which PyTorch's grouped products take no
#: rows; and even ones; of the last shape experts are large enough for products one by one
SIZES = {
    "one row": (1, 2, 5, 24, 16),
    "odd": (33, 3, 7, 51, 37),
    "even": (40, 2, 6, 64, 48),
    "all experts": (19, 4, 4, 32, 24),
    "one expert": (21, 1, 1, 16, 8),
    "large": (50, 2, 3, 256, 136),
    "many pairs": (150, 2, 3, 256, 136),
}
over_sizes = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def weights_of(dtype, sizes, transposed=False, has_gate=True, biases=False, device=CPU):
    """Return the stacks of a mixture, random, and biases if there are any."""
    _, _, num_experts, hidden_size, width = sizes
    first = 2 * width if has_gate else width
    shapes = (num_experts, first, hidden_size), (num_experts, hidden_size, width)
    shapes = [(shape[0], shape[2], shape[1]) for shape in shapes] if transposed else shapes
    stacks = [torch.randn(shape, device=device) * fan**-0.5 for shape, fan in zip(shapes, (hidden_size, width))]
    given = dict(zip(("gate_up_weight", "down_weight"), stacks))
    if biases:
        given |= dict(
            gate_up_bias=torch.randn(num_experts, first, device=device),
            down_bias=torch.randn(num_experts, hidden_size, device=device),
        )
    return {name: each.to(dtype) for name, each in given.items()}


def logits_of(dtype, rows, num_experts, never=None, always=None):
    """Return scores that differ within a row in every dtype; of one expert below, of another above all others."""
    found = torch.stack([torch.randperm(num_experts) for _ in range(rows)]) / 8 - 2
    if never is not None:
        found[:, never] = -16
    if always is not None:
        found[:, always] = 16
    return found.to(dtype)


def of_experts(dtype, sizes, **layout):
    """Return arguments of ``run_experts``."""
    rows, top_k, num_experts, hidden_size, _ = sizes
    activation = layout.pop("activation", Activation.SILU)
    stacks = weights_of(
        dtype, sizes, layout.get("transposed", False), activation != UNGATED, layout.pop("biases", False)
    )
    ids = torch.rand(rows, num_experts).topk(top_k).indices
    given = dict(x=torch.randn(rows, hidden_size).to(dtype), ids=ids, weights=torch.rand(rows, top_k))
    given |= dict(residual=torch.randn(rows, hidden_size).to(dtype), activation=activation)
    return given | stacks | layout


def to_be_routed(dtype, sizes):
    """Return arguments of ``ops.routed_experts`` but those of a router."""
    given = of_experts(dtype, sizes) | dict(logits=logits_of(dtype, sizes[0], sizes[2]), top_k=sizes[1])
    return {name: each for name, each in given.items() if name not in ("ids", "weights")}


def in_float64(value):
    if isinstance(value, Norm):
        return replace(value, **{name: in_float64(getattr(value, name)) for name in ("weight", "bias")})
    return upcast(value) if isinstance(value, torch.Tensor) else value


def assert_like(expected, given, op, rows):
    """Compare what ``Lower`` makes of many rows with a reference in the working dtype and in float64."""
    tensors = {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
    before = {name: each.clone() for name, each in tensors.items()}
    found, again = (Lower(run, max(rows, MAX_ROWS + 1)).experts(op, **given) for _ in range(2))
    assert torch.equal(found, again)
    assert all(torch.equal(each, tensors[name]) for name, each in before.items())
    wide = {name: in_float64(each) for name, each in given.items()}
    what = str({name: each for name, each in given.items() if name not in tensors})
    assert_rule(found, expected(**given), expected(**wide), what)
    return found


@pytest.mark.each_value
@over_dtypes
@over_sizes
def test_chosen_experts_match_the_reference(dtype, sizes):
    require_native(CPU)
    rows = sizes[0]
    for activation in (*GATES, UNGATED):
        assert_like(marks.experts, of_experts(dtype, sizes, activation=activation), composed.run_experts, rows)
    for activation in EXPERT_GATES:
        for concatenated in (False, True):
            layout = dict(transposed=True, concatenated=concatenated, biases=True, activation=activation)
            given = of_experts(dtype, sizes, **layout) | dict(alpha=1.3, limit=0.7)
            assert_like(marks.experts, given, composed.run_experts, rows)


@over_dtypes
@pytest.mark.parametrize("sizes", (SIZES["odd"], SIZES["even"]))
@pytest.mark.parametrize("biases", (False, True))
def test_experts_of_other_shards_add_nothing(dtype, sizes, biases):
    require_native(CPU)
    given = of_experts(dtype, sizes, transposed=biases, biases=biases)
    given["ids"] = given["ids"] + 4  # of experts 0 to 3 none is chosen, and the shard has some from 6 on
    found = assert_like(marks.experts, given | dict(first_expert=6), composed.run_experts, sizes[0])
    none = given | dict(first_expert=50)
    assert torch.equal(Lower(run, 40).experts(composed.run_experts, **none), none["residual"])
    assert not torch.equal(found, given["residual"])


@pytest.mark.each_value
@over_dtypes
@over_sizes
def test_routed_experts_match_the_reference(dtype, sizes):
    require_native(CPU)
    rows, top_k, num_experts, hidden_size, width = sizes
    routers = [
        dict(normalized=True, rounded=True),
        dict(normalized=False, rounded=False, factor=2.5),
        dict(normalized=True, rounded=False, scoring=Scoring.SIGMOID, factor=2.0, sum_eps=1e-3),
        dict(normalized=True, rounded=False, correction_bias=torch.randn(num_experts) / 64),
    ]
    if num_experts == 6:
        routers.append(dict(normalized=True, rounded=False, num_groups=3, top_groups=2, group_tops=1))
    for router in routers:
        given = to_be_routed(dtype, sizes) | router
        assert_like(marks.routed_experts, given, ops.routed_experts.overload, rows)


@over_dtypes
def test_experts_that_nobody_or_everybody_draws(dtype):
    require_native(CPU)
    for sizes in (SIZES["odd"], SIZES["even"], SIZES["large"]):
        rows, top_k, num_experts, *_ = sizes
        given = to_be_routed(dtype, sizes) | dict(normalized=True, rounded=False)
        given["logits"] = logits_of(dtype, rows, num_experts, never=0, always=2)
        expected = assert_like(marks.routed_experts, given, ops.routed_experts.overload, rows)
        given["gate_up_weight"][0] = torch.nan
        assert torch.equal(Lower(run, rows).experts(**given), expected)


@over_dtypes
@pytest.mark.parametrize("kind", (NormKind.RMS, NormKind.RMS_OFFSET, NormKind.LAYER))
@pytest.mark.parametrize("is_shut", (False, True))
def test_norm_and_shared_expert(dtype, kind, is_shut):
    require_native(CPU)
    sizes = rows, top_k, num_experts, hidden_size, width = SIZES["even"]
    given = to_be_routed(dtype, sizes) | dict(normalized=True, rounded=False)
    for name in ("x", "residual"):
        given[name] = given[name].view(2, rows // 2, hidden_size)
    weight = torch.rand(hidden_size).to(dtype)
    given["norm"] = Norm(kind, weight, weight.flip(0) if kind == NormKind.LAYER else None, 1e-5)
    given["logits"] = logits_of(dtype, rows, num_experts).view(2, rows // 2, num_experts)
    shared = {name: torch.randn(72, hidden_size) * hidden_size**-0.5 for name in ("gate", "up")}
    given |= {f"shared_{name}_weight": each.to(dtype) for name, each in shared.items()}
    given["shared_down_weight"] = (torch.randn(hidden_size, 72) * 72**-0.5).to(dtype)
    given["shared_logits"] = torch.randn(2, rows // 2, 1).to(dtype) if is_shut else None
    assert_like(marks.routed_experts, given, ops.routed_experts.overload, rows)


@over_dtypes
def test_scaled_experts_match_the_reference(dtype):
    require_native(CPU)
    for sizes in (SIZES["odd"], SIZES["even"], SIZES["large"]):
        rows, top_k, num_experts, hidden_size, _ = sizes
        given = weights_of(dtype, sizes, transposed=True) | dict(activation=Activation.SILU, top_k=top_k)
        given |= dict(x=torch.randn(rows, hidden_size).to(dtype), logits=logits_of(dtype, rows, num_experts))
        assert_like(marks.scaled_experts, given, composed.scaled_experts, rows)


class LargestResult(TorchDispatchMode):
    """Notes the elements of the largest tensor that an op makes in memory of its own."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        for each in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.count = max(self.count, each.untyped_storage().nbytes() // each.element_size())
        return out


@over_dtypes
@pytest.mark.parametrize(("hidden_size", "width"), ((256, 144), (64, 48)), ids=("one by one", "grouped"))
def test_no_copy_of_weights(dtype, hidden_size, width):
    """What is made is no larger than what all pairs of rows and experts need."""
    require_native(CPU)
    sizes = rows, top_k, num_experts, *_ = 20, 2, 64, hidden_size, width
    given = to_be_routed(dtype, sizes) | dict(normalized=True, rounded=False)
    with LargestResult() as largest:
        Lower(run, rows).experts(**given)
    assert 0 < largest.count <= rows * top_k * max(hidden_size, 2 * width) < given["down_weight"].numel() / 8


def test_calls_that_a_graph_cannot_hold():
    calls = []
    given = to_be_routed(torch.float32, SIZES["even"]) | dict(normalized=True, rounded=False)
    for rows in (16, 17):
        Lower(lambda op, **arguments: calls.append(Call(op, arguments, Register(0))), rows).experts(**given)
    few, many = calls
    assert not many_experts.waits_for_choice(few) and not many_experts.waits_for_choice(many)
    assert many_experts.most_sequences([given]) == MAX_BATCH
    for name in ("gate_up_weight", "down_weight"):  # as if they were on a GPU, in a type without grouped products
        many.arguments[name] = given[name] = given[name].to("meta")
    assert not many_experts.waits_for_choice(few) and many_experts.waits_for_choice(many)
    assert many_experts.most_sequences([given]) == MAX_ROWS
