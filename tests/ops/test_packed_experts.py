"""packed_experts: the common tests, odd sizes in every format, experts that many rows share, what is refused."""

from __future__ import annotations

import pytest
import torch
from checks import assert_matches, common_tests, over_dtypes, replaced

from hf_fastpath.choices import Activation
from hf_fastpath.ops.packed_experts import SPEC
from hf_fastpath.ops.packed_gemv import random_weight
from hf_fastpath.packed_formats import FORMATS
from hf_fastpath.registry import OpInputError, Sample

CPU = torch.device("cpu")


def call(device, dtype, format, rows, top_k, num_experts, hidden_size, width, biases=False, **options):
    """Return a call with random experts, which differ within a row."""

    def randn(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    weights, ids = torch.randn(rows, num_experts, device=device).softmax(-1).topk(top_k)
    gate_up = random_weight(FORMATS[format], num_experts * 2 * width, hidden_size, device)
    down = random_weight(FORMATS[format], num_experts * hidden_size, width, device)
    if biases:
        options |= dict(gate_up_bias=randn(num_experts, 2 * width), down_bias=randn(num_experts, hidden_size))
    return Sample(randn(rows, hidden_size), ids, weights, *gate_up, *down, randn(rows, hidden_size), **options)


def odd_sizes(device, dtype):
    sizes = (
        (1, 1, 1, 1, 1),
        (1, 3, 7, 33, 17),
        (2, 2, 2, 17, 65),
        (1, 4, 5, 136, 520),
        (5, 4, 6, 129, 9),
        (9, 2, 3, 70, 31),
        (1, 32, 40, 264, 24),
        (15, 8, 9, 9, 10),
    )
    activations = Activation.SILU, Activation.CLAMPED_SWIGLU, Activation.GELU, Activation.GELU_TANH
    for place, format in enumerate(FORMATS):
        for number in range(place % 4, len(sizes), 4):  # two of each format
            how = (place + number // 4) % 4
            options = dict(biases=how % 2 == 1, alternating=how > 1, activation=activations[how])
            yield call(device, dtype, format, *sizes[number], **options)


globals().update(common_tests(SPEC, odd_sizes=odd_sizes))


@over_dtypes
def test_rows_that_share_experts_or_choose_none(device, dtype):
    sample = call(device, dtype, "int4_g32", 16, 4, 6, 136, 72, biases=True)
    ids = torch.randint(-2, 9, (16, 4), device=device)  # repeated ones, and others that do not exist
    ids[3] = 2
    ids[5] = -1
    assert_matches(SPEC, replaced(SPEC, sample, expert_ids=ids))


@pytest.mark.parametrize("format", FORMATS)
def test_an_expert_nobody_chose_is_not_read(device, format):
    sample = call(device, torch.float32, format, 2, 2, 4, 48, 40)
    ids = torch.tensor([[0, 2], [2, 0]], device=device)
    given = replaced(SPEC, sample, expert_ids=ids)
    arguments = given.kwargs
    expected = SPEC(**arguments)
    poisoned = {}
    for name, rows in (("gate_up", 80), ("down", 48)):
        scales = arguments[f"{name}_scales"].clone()
        scales.view(4, rows, -1)[[1, 3]] = torch.nan if scales.is_floating_point() else 255
        poisoned[f"{name}_scales"] = scales
    assert torch.equal(SPEC(**arguments | poisoned), expected)


def test_what_does_not_fit_is_refused():
    sample = call(CPU, torch.float32, "int4_g32", 2, 2, 4, 48, 40)
    names = [each.name for each in SPEC.overload._schema.arguments]
    given = dict(zip(names, sample.args))
    for changed, message in (
        ({"down_quants": given["down_quants"][:-1]}, "down_quants has 191 rows, expected 48 for each expert"),
        ({"gate_up_quants": given["gate_up_quants"][:-1]}, "gate_up_quants has 319 rows, expected an even number"),
        ({"gate_up_format": "int8"}, "gate_up_quants has shape"),
        ({"down_format": "q9"}, "down_format is 'q9', expected one of int8"),
        ({"expert_ids": given["expert_ids"].int()}, "expert_ids has dtype torch.int32"),
        ({"expert_weights": given["expert_weights"][:1]}, "expert_weights has shape"),
        ({"activation": "relu"}, "activation is 'relu'"),
        ({"limit": 0.0}, "limit is 0.0, expected a positive number"),
        ({"gate_up_bias": torch.zeros(4, 40)}, "gate_up_bias has shape"),
        ({"down_zeros": torch.zeros(192, 4, dtype=torch.uint8)}, "down_zeros is given"),
        ({"norm": "rms"}, "norm 'rms' takes norm_weight"),
    ):
        with pytest.raises(OpInputError, match=message):
            SPEC(**given | changed)


@pytest.mark.every(3)
@over_dtypes
@pytest.mark.parametrize("format", ["int4_g32", "mxfp4"])
def test_rows_that_are_longer_than_shared_memory(device, dtype, format):
    """On a GPU x comes in phases then: of one row of 16 bits from 16,384 inputs on, of more from 3,072 on."""
    for rows, hidden_size, width, biases in ((1, 16500, 5, False), (3, 3400, 9, True), (1, 9, 16500, True)):
        norm = {} if width > 100 else dict(norm="rms", norm_weight=torch.randn(hidden_size, device=device).to(dtype))
        assert_matches(SPEC, call(device, dtype, format, rows, 2, 2, hidden_size, width, biases=biases, **norm))
