"""PackedLinear: which op computes it, and gradients if no op does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_fastpath import ops
from hf_fastpath.linears.packed_linear import PackedLinear
from hf_fastpath.ops.gemv import MAX_ROWS
from hf_fastpath.quantization import FORMATS, quantize

over_formats = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def made(format, device, bias=None):
    return PackedLinear(quantize(torch.randn(48, 300) / 17, format), bias).to(device)


@over_formats
def test_rows_choose_the_op(device, format):
    layer = made(format, device)
    many = ops.packed_gemm if device.type in ops.packed_gemm.native else None
    for shape, op in (
        ((1,), ops.packed_gemv),
        ((MAX_ROWS,), ops.packed_gemv),
        ((MAX_ROWS + 1,), many),
        ((2, 40), many),
    ):
        x = torch.randn(*shape, 300, device=device)
        assert layer._op_for(x) is op
        expected = nn.functional.linear(x.double(), layer.packed.dequantize(torch.float64))
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-4)
    assert layer._op_for(torch.randn(0, 300, device=device)) is None
    assert layer(torch.randn(0, 300, device=device)).shape == (0, 48)


@over_formats
def test_gradients_take_the_dequantized_weight(device, format):
    layer = made(format, device, nn.Parameter(torch.randn(48)))
    x = torch.randn(20, 300, device=device)
    assert layer._op_for(x) is None  # the bias is trained
    layer(x).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((48,), 20.0, device=device))
    layer.bias.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    layer(leaf).sum().backward()
    expected = layer.packed.dequantize(torch.float64).sum(0).expand(20, -1)
    torch.testing.assert_close(leaf.grad.double(), expected, rtol=1e-4, atol=1e-4)
    with torch.autocast(device.type, torch.bfloat16):
        assert layer._op_for(x) is None
        assert layer(x).dtype == torch.bfloat16
