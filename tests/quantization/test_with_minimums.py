"""Weights whose groups have a minimum, or a zero point that is a float: HQQ, optimum-quanto, torchao's int4.

Layers of HQQ and torchao are made by the description of their layouts, those of optimum-quanto by the package.
"""

from __future__ import annotations

import pytest
import torch
from test_weight_classes import torchao
from torch import nn
from with_minimums import hqq

from hf_fastpath.errors import NoCounterpart
from hf_fastpath.linears.checkpoints import family_of
from hf_fastpath.linears.packed_linear import PackedLinear
from hf_fastpath.quantization.formats import unpack
from hf_fastpath.reasons import REASONS
from hf_fastpath.replacing.counterparts import repacked

HALVES = (torch.float16, torch.bfloat16)


def read(layer: nn.Module):
    return family_of(layer).read(layer)


def packed_of(layer: nn.Module):
    (made,) = repacked([read(layer)])
    return made


def spread(values: torch.Tensor, columns: int) -> torch.Tensor:
    return values.float().repeat_interleave(columns // values.shape[1], 1)


def assert_picked(made, expected: torch.Tensor, device: torch.device) -> None:
    """Assert that products read these weights: each unit of x picks one."""
    layer = PackedLinear(made, None).to(device)
    for rows in (slice(0, 3), slice(0, expected.shape[1])):
        x = torch.eye(expected.shape[1], device=device)[rows]
        torch.testing.assert_close(
            layer(x).t().cpu(), expected[:, rows], rtol=2e-6, atol=2e-6 * float(expected.abs().max())
        )


# ---- HQQ -----------------------------------------------------------------------------------------------------


@pytest.mark.each_pair
@pytest.mark.parametrize("bits", (4, 3, 2, 1))
@pytest.mark.parametrize("group", (64, 32, 128))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), ((24, 256), (40, 384), (8, 128)))
def test_every_weight_of_hqq(bits, group, dtype, rows, columns, device):
    layer, expected = hqq(rows, columns, bits, group, dtype)
    family, made, before = family_of(layer), packed_of(layer), layer.W_q.data.clone()
    assert made.format.name == "int4_g32_float_zeros"
    # sums are rounded to float32, of which one has a minimum as its second part
    torch.testing.assert_close(made.dequantize(), expected, rtol=0, atol=2.0**-22 * float(expected.abs().max()))
    assert_picked(made, expected, device)
    family.release(layer)
    assert not layer.W_q.numel()
    family.restore(layer, unpack(made.format, made.quants)[:, :columns])
    assert layer.W_q.dtype == before.dtype and torch.equal(layer.W_q.data, before)


@pytest.mark.parametrize("bits", (4, 2, 1))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_weight_of_hqq_is_the_packages(bits, dtype):
    """In float32, as the package computes it with these scales; in 16 bits the package rounds on the way."""
    library = pytest.importorskip("hqq.core.quantize", reason="hqq is not installed")
    how = library.BaseQuantizeConfig(nbits=bits, group_size=64, axis=1)
    layer = library.HQQLinear(nn.Linear(256, 96, bias=False), how, compute_dtype=dtype, device="cpu")
    made, before = packed_of(layer), layer.W_q.data.clone()
    rounded = layer.dequantize()
    layer.meta |= dict(scale=layer.meta["scale"].float(), zero=layer.meta["zero"].float(), compute_dtype=torch.float32)
    exact = layer.dequantize()
    torch.testing.assert_close(made.dequantize(), exact, rtol=0, atol=2.0**-22 * float(exact.abs().max()))
    ours, theirs = ((each.float() - exact).abs().mean() for each in (made.dequantize(dtype), rounded))
    assert ours <= theirs
    family = family_of(layer)
    family.release(layer)
    family.restore(layer, unpack(made.format, made.quants)[:, :256])
    assert torch.equal(layer.W_q.data, before)


# ---- optimum-quanto ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("qint4", "qint2"))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("columns", (256, 96, 320))
def test_every_weight_of_quanto(kind, dtype, columns):
    library = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    layer = library.QLinear.from_module(nn.Linear(columns, 160).to(dtype), weights=library.qtypes[kind])
    layer.freeze()
    made, weight = packed_of(layer), layer.weight
    if type(weight).__name__ == "TinyGemmWeightQBitsTensor":  # the product's values: the package's own are rounded more
        assert made.format.name == "int4_g32_middles"
        picked = nn.functional.linear(torch.eye(columns, dtype=dtype), weight).t()
        assert torch.equal(made.dequantize(dtype), picked)
        return
    assert made.format.name == "int4_g32_min"
    rows, bits = weight._data._data, weight._data._bits
    numbers = torch.cat([rows >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)])
    exact = weight._scale.float() * numbers[: weight._scale.numel()].float() - weight._shift.float()
    torch.testing.assert_close(
        made.dequantize(), exact.view(160, columns), rtol=0, atol=2.0**-22 * float(exact.abs().max())
    )
    rounded = weight.dequantize().float()
    ours, theirs = (
        (each - exact.view(160, columns)).abs().mean() for each in (made.dequantize(dtype).float(), rounded)
    )
    assert ours <= theirs
    family, before = family_of(layer), rows.clone()
    family.release(layer)
    assert not weight._data._data.numel()
    family.restore(layer, unpack(made.format, made.quants)[:, :columns])
    assert torch.equal(weight._data._data, before)


# ---- torchao -------------------------------------------------------------------------------------------------


def numbers_of(rows: int, columns: int, group: int) -> tuple[torch.Tensor, ...]:
    """Return numbers from 0 up, scales and middles [rows, groups], and ``scale * (number - 8) + middle``."""
    numbers = torch.randint(0, 16, (rows, columns))
    scales = (torch.rand(rows, columns // group) / 99 + 1e-3).bfloat16()
    middles = ((torch.rand(rows, columns // group) - 0.5) / 20).bfloat16()
    return numbers, scales, middles, spread(scales, columns) * (numbers - 8) + spread(middles, columns)


@pytest.mark.parametrize("group", (32, 64, 128))
def test_every_weight_of_torchao_in_pairs(group, device):
    """Two signed numbers a byte, the first in the low bits; scales and zeros of a group lie in a row."""
    numbers, scales, middles, expected = numbers_of(24, 256, group)
    signed = numbers - 8
    bytes = (signed[:, ::2] & 15 | (signed[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    layer = torchao(
        "Int4Tensor", bytes, scales.t().contiguous(), (1, group), zero_point=middles.t().contiguous(), shape=(24, 256)
    )
    made = packed_of(layer)
    assert made.format.name == "int4_g32_middles"
    torch.testing.assert_close(made.dequantize(), expected, rtol=0, atol=2.0**-22 * float(expected.abs().max()))
    assert_picked(made, expected, device)


@pytest.mark.parametrize(("rows", "columns"), ((16, 1024), (48, 1920), (144, 1024)))
@pytest.mark.parametrize("group", (32, 128))
def test_every_weight_of_torchao_in_tiles(rows, columns, group, device):
    """Numbers lie as PyTorch's own product wants them, filled up to a multiple of 1,024 inputs."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        pytest.skip("PyTorch packs for compute capability 8.0 and newer")
    width = -(-columns // 1024) * 1024
    numbers, scales, middles, expected = numbers_of(rows, width, group)
    on_device = numbers.int().to(device)
    if device.type == "cpu":
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(on_device, 2)
    else:
        pairs = (on_device[:, ::2] << 4 | on_device[:, 1::2]).to(torch.uint8)
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    table = torch.stack((scales, middles), -1).transpose(0, 1).contiguous().to(device)
    layer = torchao(
        "Int4TilePackedTo4dTensor", packed, torch.ones(1), (1, group), shape=(rows, columns), scale_and_zero=table
    )
    made = packed_of(layer)
    expected = expected[:, :columns]
    torch.testing.assert_close(made.dequantize().cpu(), expected, rtol=0, atol=2.0**-22 * float(expected.abs().max()))


# ---- reasons -------------------------------------------------------------------------------------------------


def not_ready():
    layer, _ = hqq(8, 128, 4, 64, torch.float16)
    layer.ready = False
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    (
        (not_ready, "quantized_format"),
        (lambda: hqq(8, 128, 4, 64, torch.float16, axis=0)[0], "quantized_axis"),
        (lambda: hqq(8, 96, 4, 64, torch.float16)[0], "quantized_blocks"),
        (lambda: hqq(8, 128, 4, 16, torch.float16)[0], "quantized_format"),
        (lambda: hqq(8, 128, 4, 64, torch.float16, nbits=8)[0], "quantized_format"),
        (lambda: hqq(8, 128, 4, 64, torch.float16, quant_zero=True)[0], "quantized_format"),
        (lambda: hqq(8, 128, 4, 64, torch.float16, view_as_float=True)[0], "quantized_format"),
        (lambda: hqq(8, 128, 4, 64, torch.float32)[0], "quantized_float32"),
    ),
)
def test_what_has_no_counterpart_says_why(make, reason):
    with pytest.raises(NoCounterpart) as found:
        packed_of(make())
    assert str(found.value) == reason and reason in REASONS


def test_inputs_that_torchao_scales_say_why():
    layer = torchao("Int4Tensor", torch.zeros(8, 64, dtype=torch.int8), torch.ones(1, 8), (1, 128), (8, 128))
    layer.weight.zero_point, layer.weight.act_pre_scale = torch.ones(1, 8), torch.ones(128)
    with pytest.raises(NoCounterpart, match="quantized_activations"):
        read(layer)
    layer.weight.act_pre_scale, layer.weight.activation_dtype = None, torch.float8_e4m3fn
    with pytest.raises(NoCounterpart, match="quantized_activations"):
        read(layer)
