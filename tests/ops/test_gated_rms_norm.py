"""gated_rms_norm: the common tests, special values, agreement with transformers."""

from __future__ import annotations

import pytest
import torch
from checks import assert_matches, common_tests, over_dtypes
from memory import same_bits

from hf_fastpath.ops.gated_rms_norm import SPEC
from hf_fastpath.registry import OpInputError, Sample


def odd_sizes(device, dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for rows, hidden, groups in (
        *((1, 1, 1), (3, 3, 3), (2, 15, 5), (5, 17, 1), (13, 33, 3), (1, 1025, 1), (3, 4099, 1), (2, 11008, 8)),
        *((70, 96, 1), (300, 64, 2), (1, 40000, 1)),
    ):
        for gate_first in (False, True):
            yield Sample(2 * randn(rows, hidden), randn(rows, hidden), randn(hidden), 1e-6, groups, gate_first)
            yield Sample(randn(rows, hidden), randn(rows, hidden), randn(hidden), 1e-6, groups, gate_first, "sigmoid")
    yield Sample(randn(77), randn(77), randn(77), 1e-5)
    yield Sample(randn(2, 0, 64), randn(2, 0, 64), randn(64), 1e-5)
    yield Sample(randn(3, 7, 5).transpose(0, 1), randn(7, 3, 5), randn(5), 1e-5)
    yield Sample(randn(4, 8, 40), randn(4, 8, 2 * 40)[..., 40:], randn(40), 1e-5, 1, True)


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
@pytest.mark.parametrize("gate_first", (False, True))
def test_gated_rms_norm_special_values(gate_first, dtype, device):
    """NaN and infinity stay in their group; a group of zeros gives zeros."""
    x, gate = torch.randn(2, 6, 192, device=device).to(dtype)
    x[1, 0], x[2, 70], gate[3, 191], x[5] = float("nan"), float("inf"), float("nan"), 0
    weight = torch.rand(192, device=device).to(dtype) + 0.5
    result = assert_matches(SPEC, Sample(x, gate, weight, 1e-5, 3, gate_first))
    assert result[[0, 4, 5]].isfinite().all() and not result[5].any()
    assert result[1, 64:].isfinite().all() and result[2, :64].isfinite().all() and result[3, :128].isfinite().all()


@over_dtypes
def test_gated_rms_norm_scale(dtype, device):
    """Squares neither overflow nor vanish: the accumulator is float32, whatever x is."""
    x, gate = torch.randn(2, 4, 333, device=device)
    weight = torch.randn(333, device=device).to(dtype)
    for factor in (1e-4, 1e-2, 1e2, 1e4):
        for gate_first in (False, True):
            assert_matches(SPEC, Sample((x * factor).to(dtype), gate.to(dtype), weight, 1e-12, 1, gate_first))


@over_dtypes
@pytest.mark.parametrize(
    ("module", "name", "arguments", "options"),
    (
        ("qwen3_next", "Qwen3NextRMSNormGated", dict(eps=1e-6), {}),
        ("mamba2", "MambaRMSNormGated", dict(group_size=96, eps=1e-6), dict(gate_first=True)),
        ("zamba2", "Zamba2RMSNormGated", dict(group_size=32, eps=1e-6), dict(groups=3, gate_first=True)),
    ),
)
def test_gated_rms_norm_reference_is_transformers(module, name, arguments, options, dtype):
    import importlib
    import inspect

    made = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    known = inspect.signature(made).parameters
    norm = made(96, **{key: value for key, value in arguments.items() if key in known}).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(2, 3, 5, 96, dtype=dtype)
    found = SPEC.reference(x, gate, norm.weight.detach(), 1e-6, **options)
    assert same_bits(found, norm(x, gate).detach())


def test_gated_rms_norm_names_the_fault():
    x = torch.zeros(2, 64)
    with pytest.raises(OpInputError, match="groups is 3, expected a divisor of hidden_size 64"):
        SPEC(x, x, torch.zeros(64), 1e-6, 3)
    with pytest.raises(OpInputError, match="activation is 'gelu', expected one of silu, sigmoid"):
        SPEC(x, x, torch.zeros(64), 1e-6, activation="gelu")
