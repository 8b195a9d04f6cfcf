"""Weights that are floats of four bits, in compressed-tensors' form: NVFP4 and MXFP4."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models import CPU, SHORT, build, counting, prompt, require_native
from quantized import packed_in
from torch import nn

import hf_fastpath
from hf_fastpath.errors import NoCounterpart
from hf_fastpath.linears.checkpoint_weights import DequantizedWeight
from hf_fastpath.linears.checkpoints import family_of
from hf_fastpath.linears.packed_linear import PackedLinear
from hf_fastpath.replacing.counterparts import repacked

#: magnitudes of OCP Microscaling Formats (MX) 1.0, 5.3.3
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIZES = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=384)


class QuantizationScheme(SimpleNamespace):
    """How compressed-tensors quantizes a layer."""

    __module__ = "compressed_tensors.somewhere"


def compressed(rows: int, columns: int, group: int, inputs=None) -> tuple[nn.Module, torch.Tensor]:
    """Return a layer, and its weight, computed in float32, in the package's bfloat16."""
    quants = torch.randint(0, 16, (rows, columns))
    is_nv = group == 16
    if is_nv:
        scales, factor = (torch.rand(rows, columns // group) * 400).to(torch.float8_e4m3fn), torch.tensor([3777.0])
        of_group = scales.float() / factor
    else:
        scales = torch.randint(110, 130, (rows, columns // group), dtype=torch.uint8)
        of_group = torch.exp2(scales.float() - 127)
    values = torch.tensor(MAGNITUDES)[quants % 8] * torch.where(quants < 8, 1.0, -1.0)
    weight = values * of_group[:, torch.arange(columns) // group]
    layer = nn.Linear(columns, rows, bias=False, device="meta")
    del layer.weight
    tensors = dict(weight_packed=(quants[:, ::2] | quants[:, 1::2] << 4).to(torch.uint8), weight_scale=scales)
    if is_nv:
        tensors["weight_global_scale"] = factor
    for name, tensor in tensors.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    how = SimpleNamespace(num_bits=4, type="float", group_size=group, symmetric=True, strategy="group")
    layer.quantization_scheme = QuantizationScheme(weights=how, input_activations=inputs, output_activations=None)
    return layer, weight.bfloat16()


def read(layer: nn.Module):
    return family_of(layer).read(layer)


@pytest.mark.parametrize(("rows", "columns"), ((5, 64), (24, 160), (3, 256)))
def test_every_weight_of_nvfp4(rows, columns, device):
    layer, expected = compressed(rows, columns, 16)
    weight = read(layer.to(device))
    assert isinstance(weight, DequantizedWeight) and torch.equal(weight.values.cpu(), expected)


@pytest.mark.parametrize(("rows", "columns"), ((5, 64), (24, 160), (3, 256)))
def test_every_weight_of_mxfp4(rows, columns, device):
    layer, expected = compressed(rows, columns, 32)
    weight = read(layer.to(device))
    if isinstance(weight, DequantizedWeight):
        assert device.type != "cpu" and torch.equal(weight.values.cpu(), expected)
        return
    (made,) = repacked([weight])
    assert made.format.name == "mxfp4" and torch.equal(made.dequantize(torch.bfloat16), expected)
    picked = PackedLinear(made, None)(torch.eye(columns)).t()
    assert torch.equal(picked, expected.float())


@pytest.mark.parametrize("group", (16, 32))
def test_a_model_decodes_fast_and_comes_back(group):
    require_native(CPU)
    model, same = build("llama", **SIZES).bfloat16(), build("llama", **SIZES).bfloat16()
    layers = {}
    for name, linear in list(model.named_modules()):
        if name.endswith("down_proj"):
            layers[name], weight = compressed(linear.out_features, linear.in_features, group)
            model.set_submodule(name, layers[name])
            same.get_submodule(name).weight = nn.Parameter(weight, requires_grad=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hf_fastpath.patch(model, quiet=True)
    hf_fastpath.patch(same, quiet=True)
    assert len(packed_in(model)) == (2 if group == 32 else 0) and hf_fastpath.report(model).loop == "fast"
    with counting(model) as counts:
        found = model.generate(prompt(CPU), **SHORT)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    if group == 16:  # the same kernels
        assert torch.equal(found, same.generate(prompt(CPU), **SHORT))
    hf_fastpath.unpatch(model)
    assert all(model.get_submodule(name) is layer for name, layer in layers.items())
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(
        torch.equal(after[name].view(-1).view(torch.uint8), each.view(-1).view(torch.uint8))
        for name, each in before.items()
    )


def asymmetric(layer):
    layer.quantization_scheme.weights.symmetric = False


def rounds_inputs(layer):
    layer.quantization_scheme.input_activations = SimpleNamespace(num_bits=4)


def no_factor(layer):
    del layer.weight_global_scale


def narrow_groups(layer):
    layer.quantization_scheme.weights.group_size = 8


@pytest.mark.parametrize(
    ("change", "reason"),
    (
        (asymmetric, "quantized_format"),
        (rounds_inputs, "quantized_activations"),
        (no_factor, "quantized_format"),
        (narrow_groups, "quantized_format"),
    ),
)
def test_what_is_not_read_says_why(change, reason):
    layer, _ = compressed(4, 64, 16)
    change(layer)
    with pytest.raises(NoCounterpart) as found:
        read(layer)
    assert str(found.value) == reason


def test_scales_that_are_no_number_are_refused():
    layer, _ = compressed(4, 64, 32)
    layer.weight_scale.data[1, 1] = 255
    with pytest.raises(NoCounterpart, match="quantized_format"):
        read(layer)
