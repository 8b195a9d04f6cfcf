"""short_convolution: the common tests, many tokens one after another, agreement with transformers."""

from __future__ import annotations

import pytest
import torch
from checks import common_tests, over_dtypes
from memory import same_bits

from hf_fastpath.ops.short_convolution import ACTIVATIONS, MAX_WIDTH, SPEC
from hf_fastpath.registry import OpInputError, Sample


def odd_sizes(device, dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    for batch, channels, width in ((1, 1, 1), (1, 3, 2), (5, 17, 3), (2, 129, 4), (3, 1025, 5), (2, 33, 8), (1, 9, 16)):
        yield Sample(randn(batch, channels), randn(batch, channels, width), randn(channels, width), randn(channels))
    for activation in ACTIVATIONS:
        yield Sample(randn(2, 70), randn(2, 70, 4), randn(70, 4), None, activation, randn(2, 70), randn(2, 70))
    yield Sample(randn(0, 8), randn(0, 8, 4), randn(8, 4))


globals().update(common_tests(SPEC, odd_sizes))


@over_dtypes
@pytest.mark.parametrize("width", (1, 3, 4, 7))
def test_short_convolution_moves_the_window(width, dtype, device):
    """After any number of tokens the state holds the last inputs, bit for bit, and nothing else."""
    tokens = torch.randn(9, 2, 40, device=device).to(dtype)
    state = torch.zeros(2, 40, width, device=device, dtype=dtype)
    for x in tokens:
        SPEC(x, state, torch.randn(40, width, device=device).to(dtype))
    assert same_bits(state, tokens[-width:].permute(1, 2, 0))


@over_dtypes
@pytest.mark.parametrize("activation", ("none", "silu"))
def test_short_convolution_reference_is_transformers(activation, dtype):
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update

    x, state = torch.randn(2, 24, dtype=dtype), torch.randn(2, 24, 4, dtype=dtype)
    weight, bias = torch.randn(24, 4, dtype=dtype), torch.randn(24, dtype=dtype)
    stock_state = state.clone()
    stock = causal_conv1d_update(x[..., None], stock_state, weight, bias, None if activation == "none" else activation)
    found = SPEC.reference(x, state, weight, bias, activation)
    assert same_bits(state, stock_state)
    torch.testing.assert_close(found, stock[..., 0])


def test_short_convolution_names_the_fault():
    x, state, weight = torch.zeros(2, 8), torch.zeros(2, 8, 4), torch.zeros(8, 4)
    with pytest.raises(
        OpInputError, match=rf"expected \[batch \* tokens, channels\] and \[channels, 1 to {MAX_WIDTH}\]"
    ):
        SPEC(x, state, torch.zeros(8, MAX_WIDTH + 1))
    with pytest.raises(OpInputError, match=r"conv_state has shape \(2, 8, 3\), expected \(2, 8, 4\)"):
        SPEC(x, state[..., 1:].contiguous(), weight)
    with pytest.raises(OpInputError, match="conv_state has strides .*: it is written, make it contiguous"):
        SPEC(x, state.transpose(0, 1).contiguous().transpose(0, 1), weight)
