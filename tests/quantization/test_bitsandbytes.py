"""Layers of bitsandbytes with four bits: every weight is the package's, and its bytes come back.

Layers are stand-ins by the description of the format, and the package's own where it is installed.
"""

from __future__ import annotations

import copy
from statistics import NormalDist

import pytest
import torch
from models import CPU, SHORT, build, counting, hidden_files, prompt, require_native
from quantized import Linear4bit, packed_in, with_dequantized, with_linear4bit
from torch import nn

import hf_fastpath
from hf_fastpath.errors import NoCounterpart
from hf_fastpath.linears.checkpoints import family_of
from hf_fastpath.ops.packed_gemm import SPEC as PACKED_GEMM
from hf_fastpath.packed_formats import FP4, NF4
from hf_fastpath.quantization import FORMATS, PackedWeight, quantize
from hf_fastpath.quantization.formats import unpack
from hf_fastpath.replacing.counterparts import repacked

KINDS = ("nf4", "fp4")
over_kinds = pytest.mark.parametrize("kind", KINDS)
over_nesting = pytest.mark.parametrize("nested", (False, True), ids=("plain", "nested"))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: rows, columns and weights of a block
HELD = ((24, 256, 64), (9, 192, 64), (7, 64, 64), (11, 384, 128), (5, 1024, 512))


def read(module: nn.Module):
    return family_of(module).read(module)


def test_nf4_has_the_quantiles_of_a_normal_distribution():
    """QLoRA takes equally likely ones, eight of one sign and seven of the other, beside 0."""

    def quantiles(count: int) -> list[float]:
        first = 0.9677083
        return [NormalDist().inv_cdf(first + (0.5 - first) * i / count) for i in range(count)]

    values = sorted([*quantiles(8), 0.0, *(-each for each in quantiles(7))])
    expected = [value / max(values) for value in values]
    assert torch.allclose(torch.tensor(NF4), torch.tensor(expected), rtol=0, atol=1e-6)


def test_fp4_has_a_sign_two_bits_of_exponent_and_one_of_mantissa():
    """In twelfths; the exponents' order is the package's."""
    values = [0, 1 / 16, *(2**exponent * (1 + half / 2) for exponent in (3, 2, 1) for half in (0, 1))]
    assert [12 * value for value in FP4[:8]] == pytest.approx(values, rel=1e-7)
    assert FP4[8:] == tuple(0.0 - value for value in FP4[:8])


@over_kinds
@over_nesting
@pytest.mark.parametrize(("rows", "columns", "block"), HELD)
def test_every_weight_is_the_same(kind, nested, rows, columns, block, device):
    layer = Linear4bit(torch.randn(rows, columns), kind, block, nested)
    expected = layer.dequantized()
    (packed,) = repacked([read(layer)])
    assert packed.format is FORMATS[kind] and packed.in_features == columns and packed.multiplier == 1.0
    for dtype in DTYPES:
        assert torch.equal(packed.dequantize(dtype), expected.to(dtype))
    # and so are those that kernels read: each unit of x picks one, rounded once
    parts = [each.to(device) if isinstance(each, torch.Tensor) else each for each in packed.parts]
    for dtype in DTYPES:
        picked = PACKED_GEMM(torch.eye(columns, device=device, dtype=dtype), *parts).t().cpu()
        torch.testing.assert_close(picked, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=0)


@over_kinds
@pytest.mark.parametrize("storage", (torch.uint8, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize(("rows", "columns"), ((6, 256), (3, 192)))
def test_bytes_are_freed_and_come_back(kind, storage, rows, columns):
    layer = Linear4bit(torch.randn(rows, columns), kind, storage=storage)
    family, before = family_of(layer), layer.weight.data.clone()
    (packed,) = repacked([family.read(layer)])
    family.release(layer)
    assert layer.weight.numel() == 0
    family.restore(layer, unpack(packed.format, packed.quants)[:, :columns])
    assert layer.weight.dtype == storage and layer.weight.shape == before.shape
    assert torch.equal(layer.weight.data.view(torch.uint8), before.view(torch.uint8))


def test_weights_of_one_input_lie_behind_each_other():
    layers = [Linear4bit(torch.randn(rows, 128), "nf4", nested=True) for rows in (16, 8, 24)]
    together = PackedWeight.joined(repacked([read(layer) for layer in layers]))
    assert together is not None and together.out_features == 48
    mixed = repacked([read(Linear4bit(torch.randn(4, 128), kind)) for kind in KINDS])
    assert [each.format.name for each in mixed] == list(KINDS)


def crossing(layer):
    return Linear4bit(torch.randn(8, 96), "nf4", 64)


def two_rows_each(layer):
    return Linear4bit(torch.randn(8, 64), "nf4", 128)


def short(layer):
    return Linear4bit(torch.randn(8, 128), "nf4", 32)


def used_on_a_cpu(layer):
    layer.quant_state.packing_format_for_cpu = True
    return layer


def turned(layer):
    layer.quant_state.shape = torch.Size((128, 8))
    return layer


def infinite(layer):
    layer.quant_state.absmax[3] = float("inf")
    return layer


def other_table(layer):
    layer.quant_state.code = layer.quant_state.code.flip(0)
    return layer


def not_quantized(layer):
    layer.quant_state = None
    return layer


def of_eight_bits(layer):
    layer.__class__ = type("Linear8bitLt", (nn.Linear,), {"__module__": "bitsandbytes.somewhere"})
    return layer


@pytest.mark.parametrize(
    ("change", "reason"),
    (
        (crossing, "quantized_blocks"),
        (two_rows_each, "quantized_blocks"),
        (short, "quantized_blocks"),
        (used_on_a_cpu, "quantized_in_use"),
        (turned, "quantized_format"),
        (infinite, "quantized_format"),
        (other_table, "quantized_format"),
        (not_quantized, "quantized_format"),
        (of_eight_bits, "quantized_format"),
    ),
)
def test_what_has_no_counterpart_says_why(change, reason):
    with pytest.raises(NoCounterpart) as found:
        repacked([read(change(Linear4bit(torch.randn(8, 128), "nf4")))])
    assert str(found.value) == reason


# ---- models ------------------------------------------------------------------------------------------------


def small(**changes) -> nn.Module:
    sizes = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=384)
    return build("llama", **sizes | changes)


def bytes_of(model: nn.Module) -> dict[str, torch.Tensor]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    return {name: layer.weight.data.clone() for name, layer in layers.items()}


@over_kinds
@over_nesting
@pytest.mark.parametrize("how", ("file", "recorded"))
def test_a_model_decodes_fast_and_comes_back(kind, nested, how):
    require_native(CPU)
    stock, ids = small(attention_bias=True), prompt(CPU)
    model = with_linear4bit(stock, kind, nested=nested)
    before = bytes_of(model)
    expected_weights = {name: model.get_submodule(name).dequantized() for name in before}
    if how == "recorded":
        with hidden_files():
            hf_fastpath.patch(model, quiet=True)
    else:
        hf_fastpath.patch(model, quiet=True)
    assert packed_in(model).keys() == before.keys() and len(before) == 14
    originals = [each.original for each in vars(model)["_hf_fastpath"].ledger.replaced]
    assert len(originals) == 14 and not any(each.weight.numel() for each in originals)  # nothing is kept twice
    for name, layer in packed_in(model).items():
        assert torch.equal(layer.packed.dequantize(), expected_weights[name])
    expected = with_dequantized(stock, model).generate(ids, **SHORT)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        with counting(each) as counts:
            assert torch.equal(each.generate(ids, **SHORT), expected)
        assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
        hf_fastpath.unpatch(each)
        found = bytes_of(each)
        assert found.keys() == before.keys() and all(torch.equal(found[name], before[name]) for name in before)
        assert torch.equal(each.generate(ids, **SHORT), expected)


def test_one_layer_without_a_counterpart_leaves_all():
    require_native(CPU)
    model = with_linear4bit(small(), "nf4")
    odd = model.model.layers[1].mlp
    odd.down_proj = Linear4bit(torch.randn(256, 384), "nf4", 32)
    before, modules = bytes_of(model), dict(model.named_modules())
    hf_fastpath.patch(model, quiet=True)
    assert dict(model.named_modules()) == modules and hf_fastpath.report(model).loop == "quantized_blocks"
    found = bytes_of(model)
    assert all(torch.equal(found[name], before[name]) for name in before)


def test_a_bias_of_another_type_gets_the_models():
    require_native(CPU)
    stock = small(attention_bias=True).bfloat16()
    model = with_linear4bit(stock, "nf4")
    for layer in model.modules():
        if isinstance(layer, Linear4bit) and layer.bias is not None:
            layer.bias = nn.Parameter(layer.bias.float())
    hf_fastpath.patch(model, quiet=True)
    biases = [layer.bias for layer in packed_in(model).values() if layer.bias is not None]
    assert len(biases) == 8 and all(bias.dtype == torch.bfloat16 for bias in biases)
    with counting(model) as counts:
        model.generate(prompt(CPU), **SHORT)
    assert counts.fast and not counts.fallback
    hf_fastpath.unpatch(model)
    assert model.model.layers[0].self_attn.q_proj.bias.dtype == torch.float32


@over_kinds
def test_originals_can_be_freed_and_packed_weights_saved(kind, tmp_path):
    require_native(CPU)
    model, ids = with_linear4bit(small(), kind, nested=True), prompt(CPU)
    hf_fastpath.patch(model, keep_original=False, quiet=True)
    with pytest.raises(ValueError, match="keep_original=False"):
        hf_fastpath.unpatch(model)
    hf_fastpath.save_packed(model, tmp_path)
    loaded = hf_fastpath.load_packed(tmp_path, quiet=True)
    assert all(layer.scales.dtype == torch.float32 for layer in packed_in(loaded).values())
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert torch.equal(loaded.generate(ids, **SHORT), model.generate(ids, **SHORT))


# ---- the package -------------------------------------------------------------------------------------------


@over_kinds
@over_nesting
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns", "block"), HELD)
def test_every_weight_is_that_of_the_package(kind, nested, dtype, rows, columns, block):
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    weight = torch.randn(rows, columns).to(dtype)
    layer = library.nn.Linear4bit(columns, rows, bias=False, quant_type=kind, compress_statistics=nested)
    data = library.functional.quantize_4bit(weight, blocksize=block, quant_type=kind, compress_statistics=nested)
    layer.weight = library.nn.Params4bit(data[0], False, data[1], block, nested, kind, bnb_quantized=True)
    expected = library.functional.dequantize_4bit(data[0], data[1])
    family, before = family_of(layer), data[0].clone()
    (packed,) = repacked([family.read(layer)])
    assert expected.dtype == dtype and torch.equal(packed.dequantize(dtype), expected)
    family.release(layer)
    family.restore(layer, unpack(packed.format, packed.quants)[:, :columns])
    assert torch.equal(layer.weight.data, before) and type(layer.weight) is library.nn.Params4bit


@over_kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_our_quantizer_gives_the_quants_of_the_package(kind, dtype):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight = torch.randn(33, 320).to(dtype)
    weight[5, :64] = 0
    quants, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind)
    packed = quantize(weight, FORMATS[kind])
    numbers = torch.stack((quants >> 4, quants & 15), -1).view(33, 320)
    assert torch.equal(packed.scales[:, :5], state.absmax.view(33, 5))
    assert torch.equal(unpack(packed.format, packed.quants)[:, :320], numbers)
