"""Checkpoints that other packages quantized, loaded by transformers, are repacked exactly or run as they are."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from types import MethodType

import pytest
import torch
from models import SHORT, build, counting, hidden_files, prompt, require_native
from parity import assert_same_tokens
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import hf_fastpath
from hf_fastpath.check.explain import explain
from hf_fastpath.linears.packed_linear import PackedLinear

CPU = torch.device("cpu")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@pytest.fixture(autouse=True)
def native():
    require_native(CPU)


def small() -> nn.Module:
    """Make a Llama whose projections have whole groups of 128."""
    sizes = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=384)
    return build("llama", **sizes)


def load(directory: Path, **options) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, **options).eval()


def projections(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name.endswith("_proj")]


def in_groups(weight: torch.Tensor, bits: int, group: int | None, symmetric: bool, order: torch.Tensor | None = None):
    """Return numbers from 0 up [out, in], zeros and float16 scales [out, groups], and the weights they stand for.

    Args:
        order: the inputs, those of a group beside each other; None: as they are.
    """
    if order is not None:
        numbers, zeros, scales, weights = in_groups(weight[:, order], bits, group, symmetric)
        back = order.argsort()
        return numbers[:, back], zeros, scales, weights[:, back]
    grouped = weight.float().view(len(weight), -1, group or weight.shape[1])
    if symmetric:
        scales = grouped.abs().amax(-1) / (2 ** (bits - 1) - 0.5)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = (high - low) / (2**bits - 1)
        zeros = (-low / scales).round()
    scales = scales.half()
    numbers = (grouped / scales.float()[..., None]).round() + zeros[..., None]
    numbers = numbers.clamp(0, 2**bits - 1)
    stands_for = (numbers - zeros[..., None]) * scales.float()[..., None]
    return numbers.view_as(weight).long(), zeros.long(), scales, stands_for.view_as(weight)


def assert_repacked(model: nn.Module, weights: dict[str, torch.Tensor], format: str) -> None:
    """Patch, and compare with a model of ``weights``; then compare without the patch."""
    same = small().to(model.dtype)
    for name, weight in weights.items():
        same.get_submodule(name).weight = nn.Parameter(weight.to(model.dtype), requires_grad=False)
    modules, hooks = dict(model.named_modules()), dict(model._forward_pre_hooks)
    hf_fastpath.patch(model, quiet=True)
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        assert type(layer) is PackedLinear and layer.format.name == format
        assert torch.equal(layer.packed.dequantize(), weight), name
    ids = prompt(CPU)
    expected = same.generate(ids, **SHORT)
    assert torch.equal(model.generate(ids, **SHORT), expected)
    found = hf_fastpath.report(model)
    assert found.loop == "fast" and found.stats["fast_tokens"] == SHORT["max_new_tokens"]
    hf_fastpath.unpatch(model)
    assert dict(model.named_modules()) == modules and dict(model._forward_pre_hooks) == hooks
    assert torch.equal(model.generate(ids, **SHORT), expected)


# ---- compressed-tensors ------------------------------------------------------------------------------------


def save_compressed(
    directory: Path, bits: int, group: int | None, symmetric: bool, actorder: str | None = None
) -> dict[str, torch.Tensor]:
    """Let the package write a checkpoint; return what its weights stand for, by layer."""
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    model, weights = small(), {}
    how = quantization.QuantizationArgs(
        num_bits=bits,
        symmetric=symmetric,
        strategy="group" if group else "channel",
        group_size=group,
        actorder=actorder,
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=how, format="pack-quantized")
    config = quantization.QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head"], format="pack-quantized", quantization_status="compressed"
    )
    quantization.apply_quantization_config(model, config)
    for name in projections(model):
        module = model.get_submodule(name)
        _, zeros, scales, weights[name] = in_groups(module.weight.detach(), bits, group, symmetric)
        module.weight_scale.data = scales.to(module.weight_scale.dtype)
        if not symmetric:
            module.weight_zero_point.data = (zeros - 2 ** (bits - 1)).to(module.weight_zero_point.dtype)
    compressor = compressors.ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(directory)
    return weights


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "actorder", "format"),
    (
        (4, 128, True, None, "int4"),
        (4, 128, False, None, "int4"),
        (4, 32, True, None, "int4_g32"),
        (4, 64, False, None, "int4_g32_zeros"),
        (4, None, False, None, "int4"),
        (8, None, True, None, "int8"),
        (8, 128, True, "weight", "int8"),
        (8, 32, False, None, "int8_g32_zeros"),
        (8, 64, True, "weight", "int8_g32_zeros"),
    ),
)
def test_compressed_tensors(bits, group, symmetric, actorder, format, tmp_path):
    weights = save_compressed(tmp_path, bits, group, symmetric, actorder)
    try:
        model = load(tmp_path)
    except RuntimeError as error:
        if symmetric:
            raise
        pytest.skip(f"transformers does not load what compressed-tensors wrote: {error}")
    said = explain(str(tmp_path))
    assert said.fast and f"repacks as {format}" in said.checkpoint
    assert_repacked(model, weights, format)


def save_four_bit_floats(directory: Path, preset: str) -> None:
    """Let the package write a checkpoint of one of its presets."""
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    model = small().bfloat16()
    scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
    layout = f"{'nv' if preset.startswith('NV') else 'mx'}fp4-pack-quantized"
    config = quantization.QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head"], format=layout, quantization_status="compressed"
    )
    quantization.apply_quantization_config(model, config)
    for name in projections(model):
        module = model.get_submodule(name)
        weight = module.weight.detach().float()
        groups = weight.view(len(weight), -1, scheme.weights.group_size).abs().amax(-1) / 6
        if hasattr(module, "weight_global_scale"):
            factor = 448 * 6 / weight.abs().max()
            module.weight_global_scale.data = factor.reshape(1)
            groups = (groups * factor).to(torch.float8_e4m3fn)
        else:
            groups = torch.exp2(torch.ceil(torch.log2(groups)))
        module.weight_scale.data = groups.to(module.weight_scale.dtype)
    compressor = compressors.ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(directory)


@pytest.mark.parametrize("preset", ("NVFP4A16", "MXFP4A16"))
def test_compressed_tensors_of_four_bit_floats(preset, tmp_path):
    save_four_bit_floats(tmp_path, preset)
    model, stock, ids = load(tmp_path), load(tmp_path), prompt(CPU)
    before = tensors_of(model)
    expected = stock.generate(ids, **SHORT)  # which dequantizes
    hf_fastpath.patch(model, quiet=True)
    for name in projections(model):
        layer = model.get_submodule(name)
        weight = layer.packed.dequantize(torch.bfloat16) if type(layer) is PackedLinear else layer.weight
        assert (type(layer) is PackedLinear) == (preset == "MXFP4A16")
        assert torch.equal(weight, stock.get_submodule(name).weight), name
    with counting(model) as counts:
        model.generate(ids, **SHORT)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    hf_fastpath.unpatch(model)
    after = tensors_of(model)
    assert after.keys() == before.keys()
    for name, each in before.items():
        assert torch.equal(after[name].reshape(-1).view(torch.uint8), each.reshape(-1).view(torch.uint8)), name
    assert torch.equal(model.generate(ids, **SHORT), expected)


def test_compressed_tensors_of_three_bits_keeps_running(tmp_path):
    save_compressed(tmp_path, 3, 128, True)
    assert not explain(str(tmp_path)).fast
    ids = prompt(CPU)
    expected, model = load(tmp_path).generate(ids, **SHORT), load(tmp_path)
    hf_fastpath.patch(model, quiet=True)
    assert not any(type(module) is PackedLinear for module in model.modules())
    for _ in range(2):  # the first call dequantizes the package's layers
        assert torch.equal(model.generate(ids, **SHORT), expected)
    assert hf_fastpath.report(model).stats["fast_tokens"] == 0


@pytest.mark.filterwarnings("ignore:hf_fastpath:UserWarning")
def test_compressed_tensors_after_a_call(tmp_path):
    """The package has dequantized its layers by then: stock code runs, with a reason."""
    save_compressed(tmp_path, 4, 128, True)
    model, ids = load(tmp_path), prompt(CPU)
    expected = model.generate(ids, **SHORT)
    hf_fastpath.patch(model, quiet=True)
    assert torch.equal(model.generate(ids, **SHORT), expected)
    report = hf_fastpath.report(model)
    assert report.stats["fast_tokens"] == 0 and "CompressedTensorsConfig(run_compressed=False)" in str(report)


# ---- torchao -------------------------------------------------------------------------------------------------


def torchao_config(kind: str):
    """Return torchao's config of a kind; the package may be missing."""
    library = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    granularity, _, kind = kind.rpartition(" of ")
    granularity = dict(row=library.PerRow(), tensor=library.PerTensor()).get(granularity) or (
        library.PerGroup(int(granularity)) if granularity else library.PerAxis(0)
    )
    if kind == "int8":
        return library.Int8WeightOnlyConfig(granularity=granularity)
    if kind == "rounded int8":
        return library.Int8DynamicActivationInt8WeightConfig(granularity=granularity)
    if kind == "float8":
        return library.Float8WeightOnlyConfig(granularity=granularity)
    mapping = library.MappingType.ASYMMETRIC if kind.endswith("with zeros") else library.MappingType.SYMMETRIC
    width = getattr(torch, kind.split()[0].replace("intx", "int"))
    return library.IntxWeightOnlyConfig(weight_dtype=width, granularity=granularity, mapping_type=mapping)


@pytest.mark.parametrize(
    ("kind", "format"),
    (
        ("row of int8", "int8_row"),
        ("tensor of int8", "int8_row"),
        ("64 of int8", "int8_g32_zeros"),
        ("row of float8", "fp8"),
        ("tensor of float8", "fp8"),
        ("128 of float8", "fp8_g128"),
        ("row of rounded int8", "int8_row"),
        ("32 of intx4", "int4_g32"),
        ("128 of intx4 with zeros", "int4"),
        ("32 of intx3", "int4_g32"),
        ("32 of intx6 with zeros", "int8_g32_zeros"),
        ("intx1", "int4"),
        ("intx5", "int8"),
    ),
)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_torchao(kind, format, dtype, tmp_path):
    """Every weight is the package's own, but for float32 scales of groups, which are rounded to float16."""
    how = torchao_config(kind)
    from transformers import TorchAoConfig

    small().save_pretrained(tmp_path)
    model = load(tmp_path, quantization_config=TorchAoConfig(how), dtype=dtype)
    is_rounded = kind in ("64 of int8",) or dtype == torch.float32 and "intx" in kind
    weights = {}
    for name in projections(model):
        weight = model.get_submodule(name).weight
        if is_rounded:
            weight.scale = weight.scale.bfloat16().to(weight.scale.dtype)
        # in float32, whatever the model's type is: there are no roundings on the way
        values, height, width = weight.qdata.float(), *weight.block_size
        zeros = getattr(weight, "zero_point", None)
        if zeros is not None:
            values = values - zeros.float().repeat_interleave(height, 0).repeat_interleave(width, 1)
        scales = weight.scale.float().repeat_interleave(height, 0).repeat_interleave(width, 1)
        weights[name] = values * scales
        assert (weight.dequantize().float() - weights[name]).abs().max() <= 2**-8 * weights[name].abs().max()
        if format in ("int8_row", "fp8", "fp8_g128"):
            assert torch.equal(weight.dequantize(), weights[name].to(dtype))
    stock = copy.deepcopy(model)
    if dtype == torch.float32:  # as are scales of float8 and of rows, which float16 does not hold
        format = dict(fp8="fp8_g128", int8="int8_row").get(format, format)
    before = {name: model.get_submodule(name).weight.qdata.clone() for name in weights}
    hf_fastpath.patch(model, quiet=True)
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        assert layer.format.name == format
        assert torch.equal(layer.packed.dequantize(), weight), name
    ids = prompt(CPU)
    with counting(model) as counts:
        found = model.generate(ids, **SHORT)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    if dtype == torch.float32 and "rounded" not in kind:  # an input beside a tie may round to the other neighbor
        assert_same_tokens(found, stock.generate(ids, **SHORT), stock)
    hf_fastpath.unpatch(model)
    for name, qdata in before.items():
        weight = model.get_submodule(name).weight
        assert type(weight).__module__.startswith("torchao")
        assert torch.equal(weight.qdata.view(torch.uint8), qdata.view(torch.uint8))
    assert torch.equal(model.generate(ids, **SHORT), stock.generate(ids, **SHORT))


@pytest.mark.parametrize(
    ("kind", "reason"), (("tensor of rounded int8", "quantized_activations"), ("64 of float8", "quantized_fp8"))
)
def test_torchao_that_has_no_counterpart(kind, reason, tmp_path):
    how = torchao_config(kind)
    from transformers import TorchAoConfig

    small().save_pretrained(tmp_path)
    model = load(tmp_path, quantization_config=TorchAoConfig(how), dtype=torch.bfloat16)
    ids = prompt(CPU)
    expected = model.generate(ids, **SHORT)
    hf_fastpath.patch(model, quiet=True)
    assert torch.equal(model.generate(ids, **SHORT), expected)
    assert set(hf_fastpath.report(model).stats["reasons"]) == {reason}


# ---- optimum-quanto ------------------------------------------------------------------------------------------


def load_with_quanto(directory: Path, kind: str, dtype: torch.dtype) -> nn.Module:
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    from transformers import QuantoConfig

    small().save_pretrained(directory)
    return load(directory, quantization_config=QuantoConfig(weights=kind), dtype=dtype)


@pytest.mark.parametrize("kind", ("int8", "float8"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_quanto_of_bytes(kind, dtype, tmp_path):
    model, stock = (load_with_quanto(tmp_path, kind, dtype) for _ in range(2))
    ids = prompt(CPU)
    weights = {name: model.get_submodule(name).weight.dequantize().detach() for name in projections(model)}
    before = {name: model.get_submodule(name).weight._data.clone() for name in weights}
    hf_fastpath.patch(model, quiet=True)
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        assert layer.format.name in (("int8_row",) if kind == "int8" else ("fp8", "fp8_g128"))
        assert torch.equal(layer.packed.dequantize(dtype), weight), name
    with counting(model) as counts:
        found = model.generate(ids, **SHORT)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    if dtype == torch.float32:
        assert_same_tokens(found, stock.generate(ids, **SHORT), stock)
    hf_fastpath.unpatch(model)
    for name, data in before.items():
        assert torch.equal(model.get_submodule(name).weight._data.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(model.generate(ids, **SHORT), stock.generate(ids, **SHORT))


@pytest.mark.parametrize("kind", ("int4", "int2"))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_quanto_of_few_bits(kind, dtype, tmp_path):
    """Weights are in tests/quantization/test_with_minimums.py: the package rounds on the way to its own."""
    model, stock = (load_with_quanto(tmp_path, kind, dtype) for _ in range(2))
    weights = {name: model.get_submodule(name).weight.dequantize().detach() for name in projections(model)}
    ids = prompt(CPU)
    hf_fastpath.patch(model, quiet=True)
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        assert layer.format.name in ("int4_g32_min", "int4_g32_middles")
        error = (layer.packed.dequantize() - weight.float()).abs().max()
        assert error <= 4 * torch.finfo(dtype).eps * weight.float().abs().max(), name
    with counting(model) as counts:
        model.generate(ids, **SHORT)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    hf_fastpath.unpatch(model)
    assert torch.equal(model.generate(ids, **SHORT), stock.generate(ids, **SHORT))


def test_quanto_in_float32_says_why(tmp_path):
    """Its scales and shifts are float32, which our pairs of float16 do not hold."""
    model, ids = load_with_quanto(tmp_path, "int4", torch.float32), prompt(CPU)
    expected = model.generate(ids, **SHORT)
    hf_fastpath.patch(model, quiet=True)
    assert torch.equal(model.generate(ids, **SHORT), expected)
    assert set(hf_fastpath.report(model).stats["reasons"]) == {"quantized_float32"}


# ---- HQQ -----------------------------------------------------------------------------------------------------


def with_hqq(bits: int, axis: int, dtype: torch.dtype) -> nn.Module:
    """Let HQQ quantize a model's projections; transformers of today loads no checkpoint of HQQ."""
    library = pytest.importorskip("hqq.core.quantize", reason="hqq is not installed")
    model, how = small().to(dtype), library.BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
    for name in projections(model):
        layer = library.HQQLinear(model.get_submodule(name), how, compute_dtype=dtype, device="cpu")
        model.set_submodule(name, layer)
    return model


@pytest.mark.parametrize("bits", (4, 2))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_hqq(bits, dtype):
    model, ids = with_hqq(bits, 1, dtype), prompt(CPU)
    weights = {name: model.get_submodule(name).dequantize() for name in projections(model)}
    before = {name: model.get_submodule(name).W_q.clone() for name in weights}
    expected = model.generate(ids, **SHORT)
    hf_fastpath.patch(model, quiet=True)
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        assert layer.format.name == "int4_g32_float_zeros"
        error = (layer.packed.dequantize() - weight.float()).abs().max()
        assert error <= 4 * torch.finfo(dtype).eps * weight.float().abs().max(), name
    with counting(model) as counts:
        model.generate(ids, **SHORT)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    hf_fastpath.unpatch(model)
    assert all(torch.equal(model.get_submodule(name).W_q, each) for name, each in before.items())
    assert torch.equal(model.generate(ids, **SHORT), expected)


def test_hqq_that_has_no_counterpart():
    model, ids = with_hqq(4, 0, torch.bfloat16), prompt(CPU)
    expected = model.generate(ids, **SHORT)
    hf_fastpath.patch(model, quiet=True)
    assert torch.equal(model.generate(ids, **SHORT), expected)
    assert set(hf_fastpath.report(model).stats["reasons"]) == {"quantized_axis"}


def test_hqq_of_eight_bits_is_recorded_with_its_own_calls():
    """None of our formats holds it, and its layers are made of PyTorch's calls alone."""
    model, ids = with_hqq(8, 1, torch.float32), prompt(CPU)
    expected = model.generate(ids, **SHORT)
    hf_fastpath.patch(model, quiet=True)
    assert not any(type(module) is PackedLinear for module in model.modules())
    assert torch.equal(model.generate(ids, **SHORT), expected)


# ---- bitsandbytes --------------------------------------------------------------------------------------------


def load_in_4bit(directory: Path, dtype: torch.dtype, kind: str = "nf4", nested: bool = True, compute=None):
    """Let transformers quantize a model; return it, and what its weights stand for, by layer."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=compute or dtype,
    )
    model, weights = load(directory, quantization_config=how, dtype=dtype), {}
    for name in projections(model):
        layer = getattr(model.get_submodule(name), "base_layer", model.get_submodule(name))
        weights[name] = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return model, weights


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", ("nf4", "fp4"))
@pytest.mark.parametrize("nested", (False, True), ids=("plain", "nested"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_bitsandbytes_of_four_bits(kind, nested, dtype, tmp_path):
    small().save_pretrained(tmp_path)
    model, weights = load_in_4bit(tmp_path, dtype, kind, nested)
    before, same, ids = tensors_of(model), load(tmp_path, dtype=dtype), prompt(CPU)
    for name, weight in weights.items():
        same.get_submodule(name).weight = nn.Parameter(weight, requires_grad=False)
    hf_fastpath.patch(model, quiet=True)
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        assert layer.format.name == kind and torch.equal(layer.packed.dequantize(dtype), weight), name
    with counting(model) as counts:
        found = model.generate(ids, **SHORT)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    assert_same_tokens(found, same.generate(ids, **SHORT), same)
    hf_fastpath.unpatch(model)
    after = tensors_of(model)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("dtype", "compute"),
    ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)),
    ids=str,
)
def test_bitsandbytes_that_computes_in_another_type(dtype, compute, tmp_path):
    """Products are of the model's type, of which each is rounded once: no worse than in the type that is asked for."""
    small().save_pretrained(tmp_path)
    model, weights = load_in_4bit(tmp_path, dtype, compute=compute)
    exact, ids = load(tmp_path, dtype=torch.float64), prompt(CPU)
    for name, weight in weights.items():
        exact.get_submodule(name).weight = nn.Parameter(weight.double(), requires_grad=False)
    expected = exact(ids).logits
    stock = copy.deepcopy(model)
    hf_fastpath.patch(model, quiet=True)
    ours = (model(ids).logits.double() - expected).abs().mean()
    assert ours <= 1.1 * (stock(ids).logits.double() - expected).abs().mean()
    model.generate(ids, **SHORT)
    assert hf_fastpath.report(model).stats["fast_tokens"] == SHORT["max_new_tokens"]


def test_bitsandbytes_saved_by_transformers(tmp_path):
    small().save_pretrained(tmp_path / "plain")
    model, weights = load_in_4bit(tmp_path / "plain", torch.bfloat16)
    model.save_pretrained(tmp_path / "quantized")
    said = explain(str(tmp_path / "quantized"))
    assert said.fast and "repacks as nf4" in said.checkpoint
    loaded = load(tmp_path / "quantized", dtype=torch.bfloat16)
    hf_fastpath.patch(loaded, keep_original=False, quiet=True)
    for name, weight in weights.items():
        assert torch.equal(loaded.get_submodule(name).packed.dequantize(torch.bfloat16), weight)
    hf_fastpath.save_packed(loaded, tmp_path / "ours")
    again, ids = hf_fastpath.load_packed(tmp_path / "ours", quiet=True), prompt(CPU)
    assert torch.equal(again.generate(ids, **SHORT), loaded.generate(ids, **SHORT))


@pytest.mark.parametrize("how", ("file", "recorded"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_llm_int8(dtype, how, tmp_path):
    """Logits are the package's own, with outliers, as near as its own rounding is."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=2.0)  # a random model has no larger inputs
    small().save_pretrained(tmp_path)
    stock, model = (load(tmp_path, quantization_config=config, dtype=dtype) for _ in range(2))
    layers = {name: model.get_submodule(name) for name in projections(model)}
    weights = {
        name: functional.int8_vectorwise_dequant(layer.weight.CB, layer.weight.SCB) for name, layer in layers.items()
    }
    before, ids = tensors_of(model), prompt(CPU)
    expected = stock(ids).logits.float()
    with hidden_files() if how == "recorded" else nullcontext():
        hf_fastpath.patch(model, quiet=True)
        for name, weight in weights.items():
            layer = model.get_submodule(name)
            assert layer.format.name == "int8_row" and layer.rounding.limit == 2.0
            torch.testing.assert_close(layer.packed.dequantize(), weight, rtol=2.0**-22, atol=0)
        with counting(model) as counts:
            found = model.generate(ids, **SHORT)
        assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    assert found.shape == stock.generate(ids, **SHORT).shape
    error = (model(ids).logits.float() - expected).abs().mean() / expected.abs().mean()
    assert error < 0.03, error  # quants beside a tie differ: its CPU code takes 1 / 127^2 for 6.200124e-05
    hf_fastpath.unpatch(model)
    after = tensors_of(model)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(model(ids).logits.float(), expected)


@pytest.mark.parametrize("preset", ("FP8_DYNAMIC", "FP8_BLOCK", "W8A8"))
def test_compressed_tensors_of_bytes(preset, tmp_path):
    """Activations are rounded as the package rounds them."""
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    scheme, layout = quantization.preset_name_to_scheme(preset, ["Linear"]), "float-quantized"
    scheme.format = layout = "int-quantized" if preset == "W8A8" else layout
    config = quantization.QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head"], format=layout, quantization_status="compressed"
    )
    plain = small()
    quantization.apply_quantization_config(plain, config)
    for name in projections(plain):
        module = plain.get_submodule(name)
        most = 127.5 if preset == "W8A8" else 448
        if preset == "FP8_BLOCK":
            blocks = [part.abs().amax() for rows in module.weight.split(128) for part in rows.split(128, 1)]
            module.weight_scale.data = (torch.stack(blocks) / most).view(module.weight_scale.shape).detach()
        else:
            module.weight_scale.data = (module.weight.abs().amax(1, keepdim=True) / most).detach()
    compressor = compressors.ModelCompressor(quantization_config=config)
    compressor.compress_model(plain)
    plain.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    ids, stock, model = prompt(CPU), load(tmp_path), load(tmp_path)
    before = tensors_of(model)
    said = explain(str(tmp_path))
    assert said.fast and "repacks as" in said.checkpoint, str(said)
    expected = stock(ids).logits
    hf_fastpath.patch(model, quiet=True)
    with counting(model) as counts:
        found = model.generate(ids, **SHORT)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    assert torch.equal(found, stock.generate(ids, **SHORT))
    assert (model(ids).logits - expected).abs().max() < 1e-2 * expected.abs().max()
    hf_fastpath.unpatch(model)
    after = tensors_of(model)
    assert after.keys() == before.keys()
    for name, each in before.items():
        assert torch.equal(after[name].view(torch.uint8), each.view(torch.uint8)), name


@pytest.mark.parametrize("how", ("file", "recorded"))
def test_lora_over_bitsandbytes(how, tmp_path):
    """QLoRA: the adapters stay as they are, and what they stand around is repacked."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    small().save_pretrained(tmp_path)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    quantized, weights = load_in_4bit(tmp_path, torch.float32)
    model = peft.get_peft_model(quantized, config).eval()
    same = peft.get_peft_model(load(tmp_path, dtype=torch.float32), config).eval()
    same.load_state_dict({name: each for name, each in model.state_dict().items() if "lora_" in name}, strict=False)
    for name, weight in weights.items():
        layer = same.base_model.model.get_submodule(name)
        getattr(layer, "base_layer", layer).weight = nn.Parameter(weight, requires_grad=False)
    before, ids = tensors_of(model), prompt(CPU)
    with hidden_files() if how == "recorded" else nullcontext():
        hf_fastpath.patch(model, quiet=True)
        with counting(model) as counts:
            found = model.generate(ids, **SHORT)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    assert sum(type(module) is PackedLinear for module in model.modules()) == len(weights)
    assert_same_tokens(found, same.generate(ids, **SHORT))
    hf_fastpath.unpatch(model)
    after = tensors_of(model)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


# ---- GPTQ and AWQ, both loaded by gptqmodel ----------------------------------------------------------------


def words(numbers: torch.Tensor, order=range(8)) -> torch.Tensor:
    """Return int32 [..., n / 8] of numbers [..., n] of four bits."""
    parts = numbers.view(*numbers.shape[:-1], -1, 8)
    made = sum(parts[..., which] << (4 * place) for place, which in enumerate(order))
    return torch.where(made >= 2**31, made - 2**32, made).to(torch.int32)


def save_gptqmodel(directory: Path, method: str, desc_act: bool = False, group: int = 128) -> dict[str, torch.Tensor]:
    """Write a float16 checkpoint by the formats' descriptions; return what its weights stand for, by layer."""
    pytest.importorskip("gptqmodel", reason="gptqmodel is not installed, which transformers loads GPTQ and AWQ with")
    pytest.importorskip("optimum", reason="optimum is not installed, which transformers loads GPTQ with")
    model = small().half()
    model.save_pretrained(directory)
    tensors, weights = load_file(directory / "model.safetensors"), {}
    for name in projections(model):
        weight = tensors.pop(f"{name}.weight")
        order = torch.randperm(weight.shape[1]) if desc_act else torch.arange(weight.shape[1])
        numbers, zeros, scales, weights[name] = in_groups(weight, 4, group, method == "gptq", order)
        tensors[f"{name}.scales"] = scales.t().contiguous()
        if method == "gptq":
            tensors[f"{name}.g_idx"] = (order.argsort() // group).int()
            tensors[f"{name}.qweight"] = words(numbers).t().contiguous()
            tensors[f"{name}.qzeros"] = words((zeros - 1).t().contiguous())
        else:
            tensors[f"{name}.qweight"] = words(numbers.t().contiguous(), AWQ_ORDER)
            tensors[f"{name}.qzeros"] = words(zeros.t().contiguous(), AWQ_ORDER)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    how = dict(quant_method=method, bits=4, group_size=group, desc_act=desc_act)
    how |= dict(sym=True, checkpoint_format="gptq") if method == "gptq" else dict(zero_point=True, version="gemm")
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    return weights


@pytest.mark.parametrize(
    ("method", "desc_act", "group", "format"),
    (
        ("gptq", False, 128, "int4"),
        ("gptq", True, 128, "int4"),
        ("gptq", True, 32, "int4_g32"),
        ("awq", False, 128, "int4"),
        ("awq", False, 32, "int4_g32_zeros"),
    ),
)
def test_gptqmodel(method, desc_act, group, format, tmp_path):
    weights = save_gptqmodel(tmp_path, method, desc_act, group)
    assert explain(str(tmp_path)).fast
    assert_repacked(load(tmp_path, device_map="cpu"), weights, format)


# ---- around them -------------------------------------------------------------------------------------------


def test_repacked_weights_are_saved_and_loaded(tmp_path):
    save_compressed(tmp_path / "theirs", 4, 128, True)
    model = hf_fastpath.patch(load(tmp_path / "theirs"), keep_original=False, quiet=True)
    assert not any(tensor.numel() for tensor in _left_of_originals(model))
    with pytest.raises(ValueError, match="keep_original=False"):
        hf_fastpath.unpatch(model)
    with pytest.raises(ValueError, match="save_packed"):
        model.save_pretrained(tmp_path / "no")
    hf_fastpath.save_packed(model, tmp_path / "ours")
    loaded = hf_fastpath.load_packed(tmp_path / "ours", quiet=True)
    ids = prompt(CPU)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert torch.equal(loaded.generate(ids, **SHORT), model.generate(ids, **SHORT))
    assert "quantization_config" not in loaded.config.to_dict()


def _left_of_originals(model: nn.Module) -> list[torch.Tensor]:
    originals = [each.original for each in vars(model)["_hf_fastpath"].ledger.replaced]
    return [tensor for each in originals for tensor in (*each.parameters(), *each.buffers())]


def test_quantizing_again_is_refused_and_leaves_it(tmp_path):
    save_compressed(tmp_path, 4, 128, True)
    model = load(tmp_path)
    modules, hooks = dict(model.named_modules()), dict(model._forward_pre_hooks)
    with pytest.raises(ValueError, match="leave weights= out"):
        hf_fastpath.patch(model, weights="int8", quiet=True)
    assert dict(model.named_modules()) == modules and dict(model._forward_pre_hooks) == hooks


def test_one_layer_without_a_counterpart_leaves_all(tmp_path):
    save_compressed(tmp_path, 4, 128, True)
    model = load(tmp_path)
    odd = model.model.layers[1].mlp.down_proj  # all of its inputs are one group
    odd.register_parameter("weight_g_idx", nn.Parameter(torch.zeros(384, dtype=torch.int32), requires_grad=False))
    modules, hooks = dict(model.named_modules()), dict(model._forward_pre_hooks)
    hf_fastpath.patch(model, quiet=True)
    assert dict(model.named_modules()) == modules and dict(model._forward_pre_hooks) == hooks
    assert hf_fastpath.report(model).loop == "compressed_tensors"


@pytest.mark.parametrize("what", ("hook", "forward"))
def test_layers_that_somebody_else_has_changed_are_left(what, tmp_path):
    save_compressed(tmp_path, 4, 128, True)
    model, seen = load(tmp_path), []
    layer = model.model.layers[0].mlp.up_proj
    if what == "hook":
        layer.register_forward_hook(lambda module, inputs, output: seen.append(1))
    else:
        theirs = layer.forward
        layer.forward = MethodType(lambda self, x: seen.append(1) or theirs(x), layer)
    modules = dict(model.named_modules())
    hf_fastpath.patch(model, quiet=True)
    assert dict(model.named_modules()) == modules and hf_fastpath.report(model).loop != "fast"
    model.generate(prompt(CPU), **SHORT)
    assert seen
