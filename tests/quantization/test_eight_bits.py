"""Layers whose weights are bytes, and whose products round their input: FP8 of transformers, FBGEMM and
compressed-tensors, W8A8 of compressed-tensors, and LLM.int8.

Weights are the package's in every element, products are those of rounded inputs, and bytes come back.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from eight_bits import MAKERS, Linear8bitLt, QuantizationScheme, block_fp8, compressed_bytes, fbgemm_fp8, with_bytes
from models import CPU, SHORT, build, counting, hidden_files, prompt, require_native
from quantized import packed_in
from torch import nn

import hf_fastpath
from hf_fastpath.choices import InputQuants
from hf_fastpath.errors import NoCounterpart
from hf_fastpath.linears.checkpoints import family_of
from hf_fastpath.linears.packed_linear import PackedLinear
from hf_fastpath.ops.fake_quantize import SPEC as FAKE_QUANTIZE
from hf_fastpath.ops.packed_gemm import SPEC as PACKED_GEMM
from hf_fastpath.patching.state import state_of
from hf_fastpath.quantization import PackedWeight, RoundedInputWeight
from hf_fastpath.quantization.formats import unpack
from hf_fastpath.replacing.counterparts import repacked

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
over_makers = pytest.mark.parametrize("kind", MAKERS)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
#: rows and columns
SHAPES = ((24, 256), (130, 200), (7, 65), (300, 640))
SIZES = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=384)


def read(module: nn.Module):
    return family_of(module).read(module)


def assert_rule(ours: torch.Tensor, stock: torch.Tensor, ref: torch.Tensor) -> None:
    """Assert the rule of docs/numerics.md."""
    error, of_stock = (float((each.double() - ref).abs().max()) for each in (ours, stock))
    bound = 2 * of_stock + torch.finfo(ours.dtype).eps * float(ref.abs().max())
    assert ours.dtype == stock.dtype and error <= bound, (error, bound, of_stock)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (a, b)))


def packed_of(module: nn.Module):
    (made,) = repacked([read(module)])
    return made


# ---- weights -----------------------------------------------------------------------------------------------


@over_makers
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_weight_is_the_packages(kind, rows, columns, device):
    layer, expected = MAKERS[kind](torch.randn(rows, columns))
    made = packed_of(layer)
    assert made.in_features == columns and made.rounding == read(layer).rounding
    assert torch.equal(made.dequantize(), expected)
    parts = [each.to(device) if isinstance(each, torch.Tensor) else each for each in made.weight.parts]
    for dtype in DTYPES:  # and so are those that kernels read: each unit of x picks one
        picked = PACKED_GEMM(torch.eye(columns, device=device, dtype=dtype), *parts).t().cpu()
        torch.testing.assert_close(picked, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


def test_scales_of_rows_that_are_bfloat16_take_no_room_of_float32():
    layer, expected = compressed_bytes(torch.randn(24, 256), scale_dtype=torch.bfloat16)
    made = packed_of(layer)
    assert made.format.name == "fp8" and torch.equal(made.dequantize(), expected)
    exact = packed_of(compressed_bytes(torch.randn(24, 256), scale_dtype=torch.float32)[0])
    assert exact.format.name == "fp8_g128"
    both = repacked([read(compressed_bytes(torch.randn(8, 256), scale_dtype=each)[0]) for each in DTYPES])
    assert {each.format.name for each in both} == {"fp8_g128"}  # one format holds all of them
    assert PackedWeight.joined([each.weight for each in both]) is not None


@over_makers
def test_bytes_are_freed_and_come_back(kind):
    layer, _ = MAKERS[kind](torch.randn(30, 200))
    family, before = family_of(layer), {name: each.clone() for name, each in layer.state_dict().items()}
    made = packed_of(layer)
    family.release(layer)
    assert layer.weight.numel() == 0
    family.restore(layer, unpack(made.format, made.weight.quants)[:, :200])
    after = layer.state_dict()
    assert after.keys() == before.keys()
    for name, each in before.items():
        assert after[name].dtype == each.dtype and after[name].shape == each.shape
        assert same_bytes(after[name], each), name


def test_weights_alone_round_no_input():
    layer, expected = compressed_bytes(torch.randn(24, 256), inputs=None)
    made = packed_of(layer)
    assert isinstance(made, PackedWeight) and torch.equal(made.dequantize(), expected)


# ---- products ----------------------------------------------------------------------------------------------


@over_makers
@over_dtypes
@pytest.mark.parametrize("rows", (1, 3, 40))
def test_products_are_those_of_rounded_inputs(kind, dtype, rows, device):
    """By the rule, beside a product that sums in float32 and rounds once, as kernels of packages do."""
    layer, weight = MAKERS[kind](torch.randn(130, 384) / 20)
    made = packed_of(layer)
    linear = PackedLinear(made, None, dtype).to(device)
    x = torch.randn(1, rows, 384).to(dtype)
    x[0, -1, 17] = 9.0
    rounding = made.rounding
    # what quants and scales are without a last rounding: of x as float64, which has x's values
    exact = FAKE_QUANTIZE.reference(x if rounding.quants.is_narrow else x.double(), rounding.quants, rounding.limit)
    ref = exact.double() @ weight.double().t()
    stock = (exact.float() @ weight.t()).to(dtype)
    assert_rule(linear(x.to(device)).cpu(), stock, ref)


def test_gradients_pass_as_if_nothing_were_rounded():
    layer, weight = block_fp8(torch.randn(24, 256))
    linear = PackedLinear(packed_of(layer), None)
    x = torch.randn(2, 256, requires_grad=True)
    out = linear(x)
    out.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, -1))
    assert torch.equal(out, nn.functional.linear(FAKE_QUANTIZE.reference(x, InputQuants.FP8_BLOCK), weight))


# ---- models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ("file", "recorded"))
@over_makers
def test_a_model_decodes_fast_and_comes_back(kind, how):
    require_native(CPU)
    model, same = with_bytes(build("llama", attention_bias=True, **SIZES), kind)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    ids = torch.cat((prompt(CPU), torch.arange(20, 44)[None]), 1)
    expected, logits = same.generate(ids, **SHORT), same(ids).logits
    if how == "recorded":
        with hidden_files():
            hf_fastpath.patch(model, quiet=True)
    else:
        hf_fastpath.patch(model, quiet=True)
    assert len(packed_in(model)) == 14 and hf_fastpath.report(model).loop == "fast"
    with counting(model) as counts:
        assert torch.equal(model.generate(ids, **SHORT), expected)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    error = float((model(ids).logits - logits).detach().abs().max() / logits.abs().max())
    assert error < 1e-2, error  # an input beside a tie may round to the other neighbor
    hf_fastpath.unpatch(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, each in before.items():
        assert same_bytes(after[name], each), name


def test_rounded_inputs_are_shared_by_products_of_one_input():
    """A step has four roundings a layer, not seven."""
    require_native(CPU)
    model, _ = with_bytes(build("llama", **SIZES), "FP8 in blocks")
    hf_fastpath.patch(model, quiet=True)
    model.generate(prompt(CPU), **SHORT)
    calls = next(iter(state_of(model).plans)).program.calls
    assert sum(call.op is FAKE_QUANTIZE.overload for call in calls) == 4 * 2


def test_saved_weights_round_their_input_again(tmp_path):
    require_native(CPU)
    model, _ = with_bytes(build("llama", **SIZES), "LLM.int8")
    ids = prompt(CPU)
    hf_fastpath.patch(model, keep_original=False, quiet=True)
    hf_fastpath.save_packed(model, tmp_path)
    loaded = hf_fastpath.load_packed(tmp_path, quiet=True)
    rounding = {layer.rounding for layer in packed_in(loaded).values()}
    assert rounding == {layer.rounding for layer in packed_in(model).values()} and None not in rounding
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert torch.equal(loaded.generate(ids, **SHORT), model.generate(ids, **SHORT))


@pytest.mark.parametrize("how", ("file", "recorded"))
def test_adapters_over_bytes_see_inputs_that_are_not_rounded(how):
    require_native(CPU)
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(with_bytes(build("llama", **SIZES), "LLM.int8")[0], config).eval()
    ids = prompt(CPU)
    expected, logits = model.generate(ids, **SHORT), model(ids).logits
    with hidden_files() if how == "recorded" else nullcontext():
        hf_fastpath.patch(model, quiet=True)
        with counting(model) as counts:
            found = model.generate(ids, **SHORT)
    assert len(packed_in(model)) == 14 and counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    assert torch.equal(found, expected)
    assert (model(ids).logits - logits).detach().abs().max() < 1e-2 * logits.detach().abs().max()


@pytest.mark.parametrize(
    ("kind", "is_shared"), (("LLM.int8", False), ("LLM.int8 without outliers", True), ("FP8 in blocks", True))
)
def test_rows_of_other_calls_have_no_say(kind, is_shared):
    """An outlier of LLM.int8 keeps its column in all rows of a call, so that calls do not share steps."""
    require_native(CPU)
    model, _ = with_bytes(build("llama", **SIZES), kind)
    hf_fastpath.patch(model, quiet=True, share_steps=True)
    model.generate(prompt(CPU), **SHORT)
    told = hf_fastpath.report(model).stats["details"].get("not_shared", "")
    assert ("inputs that are rounded" in str(told)) != is_shared


# ---- reasons -----------------------------------------------------------------------------------------------


def static(layer):
    layer.activation_scheme = "static"


def narrow_blocks(layer):
    layer.block_size = (128, 64)


def four_bits(layer):
    layer.weight = nn.Parameter(torch.zeros(24, 128, dtype=torch.int8), requires_grad=False)


def not_a_number(layer):
    layer.weight.data.view(torch.uint8)[3, 5] = 0x7F


@pytest.mark.parametrize(
    ("change", "reason"),
    (
        (static, "quantized_activations"),
        (narrow_blocks, "quantized_fp8"),
        (four_bits, "quantized_fp8"),
        (not_a_number, "quantized_fp8"),
    ),
)
def test_blocks_without_a_counterpart_say_why(change, reason):
    layer, _ = block_fp8(torch.randn(24, 256))
    change(layer)
    with pytest.raises(NoCounterpart) as found:
        packed_of(layer)
    assert str(found.value) == reason


@pytest.mark.parametrize(
    "changes",
    (dict(dynamic=False), dict(symmetric=False), dict(strategy="tensor"), dict(num_bits=4), dict(type="int")),
)
def test_inputs_that_are_rounded_otherwise_say_why(changes):
    layer, _ = compressed_bytes(torch.randn(24, 256))
    for name, value in changes.items():
        setattr(layer.quantization_scheme.input_activations, name, value)
    with pytest.raises(NoCounterpart, match="quantized_activations"):
        read(layer)


def test_llm_int8_that_is_not_quantized_says_why():
    layer, _ = MAKERS["LLM.int8"](torch.randn(24, 256))
    layer.state.has_fp16_weights = True
    with pytest.raises(NoCounterpart, match="quantized_format"):
        read(layer)


def test_layers_that_were_called_are_read_as_well():
    """The first call moves bytes and scales from the weight to the state."""
    layer, expected = MAKERS["LLM.int8"](torch.randn(24, 256))
    layer.called()
    before = {name: each.clone() for name, each in layer.state_dict().items()}
    made, family = packed_of(layer), family_of(layer)
    assert torch.equal(made.dequantize(), expected)
    family.release(layer)
    assert layer.state.CB.numel() == 0
    family.restore(layer, unpack(made.format, made.weight.quants)[:, :256])
    assert torch.equal(layer.state.CB, layer.weight.data)
    assert all(torch.equal(layer.state_dict()[name], each) for name, each in before.items())


# ---- the packages ------------------------------------------------------------------------------------------


@over_dtypes
@pytest.mark.parametrize("threshold", (6.0, 0.0))
@pytest.mark.parametrize("rows", (1, 5))
@pytest.mark.parametrize(("out_features", "in_features"), ((64, 256), (37, 200)))
def test_products_are_those_of_bitsandbytes(dtype, threshold, rows, out_features, in_features):
    """Those of its CPU path: rows in int8, outliers beside them."""
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    weight = torch.randn(out_features, in_features) / 16
    layer = library.nn.Linear8bitLt(in_features, out_features, False, has_fp16_weights=False, threshold=threshold)
    layer.weight = library.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    layer.weight = layer.weight._quantize("cpu")
    layer.eval()
    made = packed_of(layer)
    expected = library.functional.int8_vectorwise_dequant(layer.weight.CB, layer.weight.SCB)
    torch.testing.assert_close(made.dequantize(), expected, rtol=2.0**-22, atol=0)  # two products in another order
    x = torch.randn(1, rows, in_features).to(dtype)
    x[0, 0, 3], x[0, -1, 100] = 8.0, -20.0
    stock = layer(x)
    exact = FAKE_QUANTIZE.reference(x.double(), InputQuants.INT8_OUTLIERS, threshold)
    ref = exact @ made.dequantize().double().t()
    assert_rule(PackedLinear(made, None, dtype)(x), stock, ref)
    # the package's result is that, beside its rounding; its 1 / 127^2 has five digits
    atol = (4 * torch.finfo(dtype).eps + 3e-5) * float(ref.abs().max())
    torch.testing.assert_close(stock.double(), ref, rtol=0, atol=atol)


@over_dtypes
@pytest.mark.parametrize("kind", ("float", "int", "block"))
def test_products_are_those_of_compressed_tensors(kind, dtype):
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    args = quantization.QuantizationArgs
    of = "int" if kind == "int" else "float"
    if kind == "block":
        weights = args(num_bits=8, type=of, strategy="block", block_structure=[128, 128], symmetric=True)
        inputs = args(num_bits=8, type=of, strategy="group", group_size=128, dynamic=True, symmetric=True)
    else:
        weights = args(num_bits=8, type=of, strategy="channel", symmetric=True)
        inputs = args(num_bits=8, type=of, strategy="token", dynamic=True, symmetric=True)
    layer, expected = compressed_bytes(torch.randn(40, 256), of_integers=kind == "int", in_blocks=kind == "block")
    layer.quantization_scheme = QuantizationScheme(weights=weights, input_activations=inputs, output_activations=None)
    layer.quantization_status = quantization.QuantizationStatus.COMPRESSED
    made = packed_of(layer)
    assert torch.equal(forward.dequantize(layer.weight, layer.weight_scale, args=weights).float(), made.dequantize())
    x = torch.randn(2, 3, 256).to(dtype) * 3
    rounded = forward.forward_quantize(layer, x, "input", inputs)
    assert torch.equal(FAKE_QUANTIZE(x, made.rounding.quants), rounded)
    assert isinstance(made, RoundedInputWeight)


def test_a_stand_in_is_what_the_package_has():
    """The stand-in for bitsandbytes' layer computes what the package's computes."""
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    weight, x = torch.randn(24, 256) / 16, torch.randn(1, 3, 256).half()
    mine = Linear8bitLt(weight, 6.0)
    layer = library.nn.Linear8bitLt(256, 24, False, has_fp16_weights=False, threshold=6.0)
    layer.weight = library.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)._quantize("cpu")
    assert torch.equal(layer.weight.CB, mine.weight.CB) and torch.equal(layer.weight.SCB, mine.weight.SCB)
    torch.testing.assert_close(layer.eval()(x), mine(x), rtol=1e-2, atol=1e-2)


def test_fbgemm_cuts_at_its_bound():
    layer, weight = fbgemm_fp8(torch.randn(24, 256), bound=2.0)
    made = packed_of(layer)
    assert made.rounding.limit == 2.0 and made.rounding.quants is InputQuants.FP8_ROW
    x = 3 * torch.randn(1, 2, 256)
    found = PackedLinear(made, None)(x)
    assert torch.allclose(found, FAKE_QUANTIZE(x, InputQuants.FP8_ROW, limit=2.0) @ weight.t(), atol=1e-4)
    assert not torch.allclose(found, FAKE_QUANTIZE(x, InputQuants.FP8_ROW) @ weight.t(), atol=1e-2)
    assert copy.deepcopy(PackedLinear(made, None)).rounding == made.rounding
