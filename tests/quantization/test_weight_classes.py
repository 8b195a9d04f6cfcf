"""Layers of torchao and optimum-quanto, made by the description of their classes: every weight is the package's."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from models import CPU, SHORT, build, counting, hidden_files, prompt, require_native
from quantized import packed_in
from torch import nn

import hf_fastpath
from hf_fastpath.choices import InputQuants
from hf_fastpath.errors import NoCounterpart
from hf_fastpath.linears.checkpoints import family_of
from hf_fastpath.linears.packed_linear import PackedLinear
from hf_fastpath.ops.fake_quantize import SPEC as FAKE_QUANTIZE
from hf_fastpath.quantization import RoundedInputWeight
from hf_fastpath.quantization.formats import unpack
from hf_fastpath.replacing.counterparts import repacked
from hf_fastpath.replacing.rewriting import Rewriting

FLOAT8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=384)


def of_package(package: str, name: str, base: type = torch.Tensor) -> type:
    return type(name, (base,), {"__module__": f"{package}.somewhere"})


class QuantizeTensorToInt8Kwargs(SimpleNamespace):
    """How torchao rounds a product's input."""


class PerRow:
    """torchao's name for a scale of each row."""


class PerTensor:
    """torchao's name for one scale of a whole tensor."""


def torchao(
    cls: str, values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], shape=None, **parts
) -> nn.Module:
    """Return a layer whose weight is a tensor of one of torchao's classes, which holds others as its attributes."""
    shape = tuple(values.shape) if shape is None else shape
    layer = nn.Linear(shape[1], shape[0], bias=False, device="meta")
    weight = torch.zeros(1, device=values.device).expand(shape).as_subclass(of_package("torchao", cls))
    weight.qdata, weight.scale, weight.block_size = values, scales, list(block)
    for name, value in parts.items():
        setattr(weight, name, value)
    layer._parameters["weight"] = weight
    return layer


def quanto(values: torch.Tensor, scales: torch.Tensor, cls: str = "WeightQBytesTensor", shape=None) -> nn.Module:
    """Return optimum-quanto's layer of bytes, frozen."""
    shape = tuple(values.shape) if shape is None else shape
    layer = of_package("optimum", "QLinear", nn.Linear)(shape[1], shape[0], bias=False, device="meta")
    weight = torch.zeros(1, device=values.device).expand(shape).as_subclass(of_package("optimum", cls))
    weight._data, weight._scale, weight.axis = values, scales, 0
    layer._parameters["weight"] = weight
    return layer


def bytes_of(rows: int, columns: int, kind: torch.dtype) -> torch.Tensor:
    if kind == torch.int8:
        return torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    return torch.randn(rows, columns).mul(40).to(FLOAT8)


def dynamic(granularity: type = PerRow, mapping: str = "SYMMETRIC", reduce_range: bool = False):
    return QuantizeTensorToInt8Kwargs(
        granularity=granularity(), mapping_type=SimpleNamespace(name=mapping), reduce_range=reduce_range
    )


def read(layer: nn.Module):
    return family_of(layer).read(layer)


#: the same numbers as those of a scale for each row, block or tensor
@pytest.mark.parametrize("kind", (torch.int8, FLOAT8), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("of", ("row", "tensor", "group", "block"))
@pytest.mark.parametrize(("rows", "columns"), ((24, 256), (130, 384)))
def test_every_weight_of_torchao_is_the_packages(kind, dtype, of, rows, columns, device):
    if of == "block" and kind == torch.int8:
        pytest.skip("torchao has no integers with scales of blocks of rows")
    block = dict(row=(1, columns), tensor=(rows, columns), group=(1, 128), block=(2, 128))[of]
    values = bytes_of(rows, columns, kind).to(device)
    scales = (torch.rand(rows // block[0], columns // block[1], device=device) / 99 + 1e-3).to(dtype)
    if kind == FLOAT8 or of in ("row", "tensor"):
        scales = scales.float()  # as torchao has them, without regard to a model's type
    zeros = None if kind == FLOAT8 else torch.zeros_like(scales, dtype=torch.int8)
    layer = torchao("Int8Tensor" if kind == torch.int8 else "Float8Tensor", values, scales, block, zero_point=zeros)
    (made,) = repacked([read(layer)])
    spread = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    expected = values.float() * spread
    if kind == torch.int8 and of == "group" and dtype == torch.float32:  # rounded to float16
        assert made.format.name == "int8"
        torch.testing.assert_close(made.dequantize(), expected, rtol=2.0**-11, atol=0)
    else:
        assert torch.equal(made.dequantize(), expected)
    picked = PackedLinear(made, None)(torch.eye(columns, device=device)).t()
    torch.testing.assert_close(picked, made.dequantize(), rtol=2 * torch.finfo(torch.float32).eps, atol=1e-7)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("group", (32, 256))
@pytest.mark.parametrize("symmetric", (False, True), ids=("zeros", "symmetric"))
def test_integers_of_any_number_of_bits(bits, group, symmetric):
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    values = torch.randint(low, high, (24, 256), dtype=torch.int8)
    scales = (torch.rand(24, 256 // group) / 99 + 1e-3).bfloat16()
    zeros = torch.zeros_like(scales).to(torch.int8)
    zeros = zeros if symmetric else torch.randint(low, high, zeros.shape, dtype=torch.int8)
    layer = torchao(
        "IntxUnpackedToInt8Tensor",
        values,
        scales,
        (1, group),
        zero_point=zeros,
        target_dtype=getattr(torch, f"int{bits}"),
    )
    weight, family = read(layer), family_of(layer)
    (made,) = repacked([weight])
    expected = (values.float() - zeros.float().repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1)
    assert made.format.bits == (4 if bits <= 4 else 8) and torch.equal(made.dequantize(), expected)
    rewriting, before = Rewriting.of(family.written, weight, made), values.clone()
    rewriting.release(layer, made)
    assert rewriting.names == ["weight.qdata"] and not layer.weight.qdata.numel()
    rewriting(layer, made)
    assert torch.equal(layer.weight.qdata, before)


@pytest.mark.parametrize("make", (quanto, lambda values, scales: torchao("Float8Tensor", values, scales, (1, 256))))
@pytest.mark.parametrize("kind", (torch.int8, FLOAT8), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_freed_and_come_back(make, kind, dtype):
    if make is not quanto and kind == torch.int8:
        pytest.skip("that is test_integers_of_any_number_of_bits")
    values, scales = bytes_of(24, 256, kind), (torch.rand(24, 1) / 99 + 1e-3).to(dtype)
    layer = make(values, scales)
    family = family_of(layer)
    (made,) = repacked([read(layer)])
    assert torch.equal(made.dequantize(dtype), (scales.float() * values.float()).to(dtype))
    held, before = layer.weight._data if make is quanto else layer.weight.qdata, values.view(torch.uint8).clone()
    family.release(layer)
    assert not held.numel()
    family.restore(layer, unpack(made.format, made.quants)[:, :256])
    assert held.dtype == kind and torch.equal(held.view(torch.uint8), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", (1, 3, 40))
def test_products_are_those_of_inputs_that_torchao_rounds(dtype, rows, device):
    values, scales = bytes_of(130, 384, torch.int8), torch.rand(130, 1) / 99 + 1e-3
    layer = torchao("Int8Tensor", values, scales, (1, 384), zero_point=None, act_quant_kwargs=dynamic())
    (made,) = repacked([read(layer)])
    assert isinstance(made, RoundedInputWeight) and made.rounding.quants is InputQuants.INT8_ROW
    x = torch.randn(1, rows, 384).to(dtype)
    exact = FAKE_QUANTIZE.reference(x, InputQuants.INT8_ROW)
    weight = values.float() * scales
    ref, stock = exact.double() @ weight.double().t(), (exact.float() @ weight.t()).to(dtype)
    found = PackedLinear(made, None, dtype).to(device)(x.to(device)).cpu()
    error, of_stock = (float((each.double() - ref).abs().max()) for each in (found, stock))
    assert error <= 2 * of_stock + torch.finfo(dtype).eps * float(ref.abs().max())


@pytest.mark.parametrize("how", ("file", "recorded"))
@pytest.mark.parametrize("kind", (torch.int8, FLOAT8), ids=str)
def test_a_model_decodes_fast_and_comes_back(kind, how):
    require_native(CPU)
    model, same = build("llama", **SIZES), build("llama", **SIZES)
    layers = {}
    for name, linear in list(model.named_modules()):
        if name.endswith("_proj"):
            weight = linear.weight.detach()
            scales = weight.abs().amax(1, keepdim=True) / (127.5 if kind == torch.int8 else 448)
            values = (weight / scales).round().clamp(-128, 127) if kind == torch.int8 else weight / scales
            layers[name] = quanto(values.to(kind), scales)
            model.set_submodule(name, layers[name])
            same.get_submodule(name).weight = nn.Parameter(values.to(kind).float() * scales, requires_grad=False)
    before = {name: layer.weight._data.view(torch.uint8).clone() for name, layer in layers.items()}
    with hidden_files() if how == "recorded" else nullcontext():
        hf_fastpath.patch(model, quiet=True)
    assert len(packed_in(model)) == 14 and hf_fastpath.report(model).loop == "fast"
    with counting(model) as counts:
        assert torch.equal(model.generate(prompt(CPU), **SHORT), same.generate(prompt(CPU), **SHORT))
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    hf_fastpath.unpatch(model)
    for name, layer in layers.items():
        assert model.get_submodule(name) is layer
        assert torch.equal(layer.weight._data.view(torch.uint8), before[name])


def int8(**parts) -> nn.Module:
    values = bytes_of(24, 256, torch.int8)
    return torchao("Int8Tensor", values, torch.ones(24, 1), (1, 256), zero_point=None, **parts)


def float8(kind: torch.dtype = FLOAT8, group: int = 256, **parts) -> nn.Module:
    values = torch.randn(24, 256).to(kind)
    return torchao("Float8Tensor", values, torch.ones(24, 256 // group), (1, group), **parts)


@pytest.mark.parametrize(
    ("make", "reason"),
    (
        (lambda: int8(act_quant_kwargs=dynamic(PerTensor)), "quantized_activations"),
        (lambda: int8(act_quant_kwargs=dynamic(mapping="ASYMMETRIC")), "quantized_activations"),
        (lambda: int8(act_quant_kwargs=dynamic(reduce_range=True)), "quantized_activations"),
        (lambda: int8(act_quant_kwargs=dynamic(), act_quant_scale=torch.ones(())), "quantized_activations"),
        (lambda: int8(act_pre_scale=torch.ones(256)), "quantized_activations"),
        (lambda: float8(act_quant_kwargs=SimpleNamespace(granularity=PerRow())), "quantized_activations"),
        (lambda: float8(torch.float8_e5m2), "quantized_fp8"),
        (lambda: float8(group=64), "quantized_fp8"),
        (lambda: quanto(bytes_of(8, 128, FLOAT8), torch.ones(8, 1), "MarlinF8QBytesTensor"), "quantized_kernel"),
        (lambda: quanto(torch.zeros(8, 128, dtype=torch.float8_e5m2), torch.ones(8, 1)), "quantized_fp8"),
    ),
)
def test_what_has_no_counterpart_says_why(make, reason):
    with pytest.raises(NoCounterpart) as found:
        repacked([read(make())])
    assert str(found.value) == reason
