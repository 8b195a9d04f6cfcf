"""What explain says of quantized checkpoints: what patch() then does, for every method that transformers knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from causal_lm_types import small_config
from models import CPU, SHORT, build, counting, prompt, require_native
from quantized import Linear4bit
from safetensors.torch import load_file, save_file
from test_checkpoints import Case, awq, compressed, gptq, read, torchao
from torch import nn
from transformers import AutoModelForCausalLM

import hf_fastpath
from hf_fastpath import compat
from hf_fastpath.check.explain import explain, explain_config
from hf_fastpath.errors import NoCounterpart
from hf_fastpath.replacing.counterparts import repacked
from hf_fastpath.replacing.schemes import schemes_of

SIZES = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=384)
LAYERS = {"llama": SIZES, "gpt2": dict(n_embd=256, n_inner=384, n_head=4)}


W8A8 = "Int8DynamicActivationInt8WeightConfig"
GROUPS_OF_64 = dict(_type="PerGroup", _data=dict(group_size=64))
ROWS_OF_8 = dict(symmetric=True, bits=8, group=-1)


def of_compressed(bits=4, group=128, symmetric=False, strategy="group", **changes) -> dict:
    how = dict(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, group_size=group)
    how |= {name: value for name, value in changes.items() if name in ("type", "actorder", "num_bits")}
    scheme = dict(targets=["Linear"], weights=how, input_activations=changes.get("input_activations"))
    made = dict(quant_method="compressed-tensors", format="pack-quantized", quantization_status="compressed")
    return made | dict(ignore=["lm_head"], config_groups={"group_0": scheme}) | changes.get("top", {})


#: inputs that are rounded by groups of 128
IN_GROUPS = dict(strategy="group", group_size=128)


def of_bytes(kind="float", strategy="channel", inputs=None, layout="float-quantized", **changes) -> dict:
    how = dict(num_bits=8, type=kind, symmetric=True, strategy=strategy) | changes
    inputs = dict(num_bits=8, type=kind, strategy="token", dynamic=True, symmetric=True) | (inputs or {})
    made = of_compressed(top=dict(format=layout))
    return made | dict(config_groups={"group_0": dict(targets=["Linear"], weights=how, input_activations=inputs)})


def of_gptq(bits=4, group=128, symmetric=False, **changes) -> dict:
    return dict(quant_method="gptq", bits=bits, group_size=group, sym=symmetric, desc_act=False) | changes


def of_awq(group=128, **changes) -> dict:
    return dict(quant_method="awq", bits=4, group_size=group, zero_point=True, version="gemm") | changes


def of_torchao(bits=4, group=128, symmetric=False, kind="IntxWeightOnlyConfig", version=2, **data) -> dict:
    if kind == "IntxWeightOnlyConfig":
        data = dict(weight_dtype=dict(_type="torch.dtype", _data=f"int{bits}"))
        data |= dict(mapping_type=dict(_type="MappingType", _data="SYMMETRIC" if symmetric else "ASYMMETRIC"))
        data |= dict(granularity=dict(_type="PerGroup", _data=dict(group_size=group)))
    return dict(quant_method="torchao", quant_type=dict(default=dict(_type=kind, _version=version, _data=data)))


def of_bitsandbytes(**changes) -> dict:
    return dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4") | changes


def bitsandbytes(case: Case, kind: str = "nf4") -> nn.Module:
    return Linear4bit(case.weight, kind)


@pytest.mark.parametrize(
    ("said", "make", "case"),
    (
        (of_gptq(), gptq, dict()),
        (of_gptq(symmetric=True), gptq, dict(symmetric=True)),
        (of_gptq(symmetric=True, group=32), gptq, dict(symmetric=True, group=32)),
        (of_gptq(group=32), gptq, dict(group=32)),
        (of_gptq(group=-1), gptq, dict(group=-1)),
        (of_gptq(bits=2), gptq, dict(bits=2, rows=32)),
        (of_gptq(bits=8, symmetric=True), gptq, dict(bits=8, symmetric=True)),
        (of_gptq(group=16, symmetric=True), gptq, dict(group=16, symmetric=True)),
        (of_awq(), awq, dict()),
        (of_awq(group=32), awq, dict(group=32)),
        (of_compressed(), compressed, dict()),
        (of_compressed(symmetric=True), lambda case: compressed(case, True), dict(symmetric=True)),
        (of_compressed(4, 32, True), lambda case: compressed(case, True), dict(symmetric=True, group=32)),
        (of_compressed(8, 128, True), lambda case: compressed(case, True), dict(symmetric=True, bits=8)),
        (of_compressed(8, None, True, "channel"), lambda case: compressed(case, True, "channel"), ROWS_OF_8),
        (of_compressed(8, 64), compressed, dict(bits=8, group=64)),
        (of_torchao(), torchao, dict()),
        (of_torchao(4, 32, True), torchao, dict(symmetric=True, group=32)),
        (of_torchao(8, 128), torchao, dict(bits=8)),
        (of_torchao(kind="Int8WeightOnlyConfig"), lambda case: torchao(case, "Int8Tensor"), ROWS_OF_8),
        (of_bitsandbytes(), bitsandbytes, dict()),
        (dict(load_in_4bit=True), lambda case: bitsandbytes(case, "fp4"), dict()),
    ),
)
def test_a_config_tells_what_the_layers_will(said, make, case):
    """The same format, or the same reason, comes out of the config and of a layer's tensors."""

    def told(call):
        try:
            return call().name
        except NoCounterpart as reason:
            return str(reason)

    layer = make(Case(**case))
    expected = told(lambda: repacked([read(layer)])[0].format)
    assert told(lambda: schemes_of(said)[0].format(256)) == expected


@pytest.mark.parametrize(
    ("said", "reason"),
    (
        (of_compressed(top=dict(sparsity_config=dict(format="sparse-24-bitmask"))), "quantized_format"),
        (of_gptq(bits=3), "quantized_format"),
        (of_gptq(dynamic={"-:.*down.*": {}}), "quantized_format"),
        (of_awq(version="gemv"), "quantized_format"),
        (of_compressed(bits=3), "quantized_format"),
        (of_compressed(input_activations=dict(num_bits=8)), "quantized_format"),
        (of_compressed(top=dict(format="int-quantized")), "quantized_format"),
        (of_bytes(inputs=dict(dynamic=False)), "quantized_activations"),
        (of_bytes(inputs=dict(symmetric=False)), "quantized_activations"),
        (of_bytes(inputs=dict(type="int")), "quantized_activations"),
        (of_bytes(strategy="block", block_structure=[128, 64]), "quantized_fp8"),
        (dict(quant_method="fp8", activation_scheme="static"), "quantized_activations"),
        (dict(quant_method="fp8", weight_block_size=[1, 32]), "quantized_fp8"),
        (of_compressed(top=dict(kv_cache_scheme=dict(num_bits=8))), "quantized_format"),
        (of_compressed(top=dict(quantization_status="frozen")), "quantized_format"),
        (of_torchao(kind="Int4WeightOnlyConfig", int4_packing_format="preshuffled"), "quantized_format"),
        (of_torchao(kind="Float8DynamicActivationFloat8WeightConfig"), "quantized_format"),
        (of_torchao(kind="Float8WeightOnlyConfig", granularity=GROUPS_OF_64), "quantized_fp8"),
        (of_torchao(kind=W8A8, granularity=dict(_type="PerTensor")), "quantized_activations"),
        (
            of_torchao(kind=W8A8, act_mapping_type=dict(_type="MappingType", _data="ASYMMETRIC")),
            "quantized_activations",
        ),
        (dict(quant_method="quanto", weights="int8", activations="int8"), "quantized_activations"),
        (of_torchao(kind="Int8WeightOnlyConfig", version=1), "quantized_format"),
        (dict(quant_method="torchao", quant_type="int4_weight_only"), "quantized_format"),
        (dict(quant_method="bitsandbytes", load_in_8bit=True, llm_int8_has_fp16_weight=True), "quantized_format"),
        (dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="int4"), "quantized_format"),
    ),
)
def test_what_has_no_counterpart_says_why(said, reason):
    with pytest.raises(NoCounterpart) as found:
        schemes_of(said)
    assert str(found.value) == reason


@pytest.mark.parametrize(
    ("said", "format"),
    (
        (of_compressed(symmetric=True, actorder="weight", top=dict(sparsity_config=dict(format="dense"))), "int4"),
        (of_compressed(symmetric=True, top=dict(kv_cache_scheme=None, sparsity_config={})), "int4"),
        (of_gptq(symmetric=True, static_groups=False, checkpoint_format="gptq", lm_head=False, dynamic={}), "int4"),
        (of_gptq(group=-1, symmetric=True, desc_act=True), "int4"),
        (of_gptq(desc_act=True), "int4"),
        (of_bytes(), "fp8"),
        (of_bytes(strategy="tensor"), "fp8"),
        (of_bytes(kind="int", layout="int-quantized"), "int8_row"),
        (
            of_bytes(strategy="block", block_structure=[128, 128], inputs=dict(strategy="group", group_size=128)),
            "fp8_g128",
        ),
        (dict(quant_method="fp8", weight_block_size=[128, 128]), "fp8_g128"),
        (dict(quant_method="fp8", weight_block_size=None), "fp8_g128"),
        (dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0), "fp8_g128"),
        (dict(quant_method="bitsandbytes", load_in_8bit=True), "int8_row"),
        (of_gptq(group=32, desc_act=True), "int4_g32_zeros"),
        (of_gptq(bits=8, group=32, desc_act=True), "int8_g32_zeros"),
        (of_compressed(actorder="group"), "int4"),
        (of_compressed(group=64, actorder=True), "int4_g32_zeros"),
        (of_awq(group=64), "int4_g32_zeros"),
        (of_awq(modules_to_not_convert=None), "int4"),
        (of_torchao(kind="Int8WeightOnlyConfig", granularity=dict(_type="PerTensor", _data={})), "int8_row"),
        (of_torchao(kind="Int8WeightOnlyConfig", granularity=GROUPS_OF_64), "int8_g32_zeros"),
        (of_torchao(kind=W8A8, granularity=dict(_type="PerRow", _data=dict(dim=-1))), "int8_row"),
        (of_torchao(kind="Float8WeightOnlyConfig"), "fp8"),
        (of_torchao(bits=6, group=32), "int8_g32_zeros"),
        (of_torchao(bits=1, group=32, symmetric=True), "int4_g32"),
        (of_torchao(kind="Int4WeightOnlyConfig", group_size=64), "int4_g32_middles"),
        (dict(quant_method="quanto", weights="int4"), "int4_g32_min"),
        (dict(quant_method="quanto", weights="float8"), "fp8"),
        (of_compressed(top=dict(format="mxfp4-pack-quantized"), type="float"), "mxfp4"),
    ),
)
def test_what_published_configs_say_besides(said, format):
    assert [scheme.format(4096).name for scheme in schemes_of(said)] == [format]


def with_config(architecture: str, said: dict):
    config = build(architecture, **LAYERS.get(architecture, {})).config
    config.quantization_config = said
    return config


@pytest.mark.parametrize("architecture", ("llama", "mistral", "qwen3"))
@pytest.mark.parametrize(
    ("said", "format", "bits"),
    (
        (of_compressed(symmetric=True), "int4", 4 + 24 / 128),
        (of_compressed(4, 32, True), "int4_g32", 4.5),
        (of_gptq(symmetric=True), "int4", 4 + 24 / 128),
        (of_awq(), "int4", 4 + 24 / 128),
        (of_torchao(), "int4", 4 + 24 / 128),
        (of_bitsandbytes(), "nf4", 4 + 32 / 64),
    ),
    ids=("compressed", "compressed_32", "gptq", "awq", "torchao", "bitsandbytes"),
)
def test_what_is_repacked_is_fast_and_small(architecture, said, format, bits):
    config = build(architecture, **SIZES).config
    plain = explain_config(config, "plain", bandwidth=1e9)
    config.quantization_config = said
    found = explain_config(config, "quantized", bandwidth=1e9)
    assert found.fast and found.report.patched == plain.report.patched and found.parameters == plain.parameters
    assert f"which patch() repacks as {format}" in str(found) and "nothing would be fast" not in str(found)
    model = build(architecture, **SIZES)
    weights = sum(each.weight.numel() for name, each in model.named_modules() if name.endswith("_proj"))
    assert plain.weight_bytes - found.weight_bytes == pytest.approx(weights * (4 - bits / 8))
    for few, many in zip(found.steps, plain.steps):
        assert few.weight_bytes < many.weight_bytes and few.tokens_per_second > many.tokens_per_second


def test_layers_that_a_config_leaves_out_stay_as_they_are():
    ignored = of_compressed(symmetric=True, top=dict(ignore=["lm_head", "re:.*down_proj"]))
    some, all_of_them = (explain_config(with_config("llama", each), "x") for each in (ignored, of_compressed()))
    assert some.fast and some.weight_bytes > all_of_them.weight_bytes
    nothing = explain_config(with_config("llama", of_compressed(top=dict(ignore=["re:.*"]))), "x")
    assert nothing.fast and "outside of the layers that patch() repacks" in nothing.checkpoint


@pytest.mark.parametrize("model_type", ("glm4", "mixtral", "mamba2"))
def test_other_models_promise_nothing(model_type):
    """Recorded steps and experts are not repacked."""
    config = small_config(model_type)
    config.quantization_config = of_compressed(symmetric=True)
    found = explain_config(config, "x")
    assert not found.fast and "which patch() does not repack" in found.checkpoint and not found.steps


#: methods whose weights transformers dequantizes as it loads them, where there is no GPU
DEQUANTIZED = {"fp8", "mxfp8", "metal", "mxfp4"}


@pytest.mark.parametrize("method", compat.quantization_methods())
def test_every_method_has_an_answer(method):
    """The answer names the method, and it is "fast" only for what is repacked or dequantized."""
    said: dict = dict(quant_method=method.removesuffix("_4bit").removesuffix("_8bit"))
    if method.startswith("bitsandbytes"):
        said[f"load_in_{method[-4:]}"] = True
    known = {"gptq": of_gptq(), "awq": of_awq(), "compressed-tensors": of_compressed(), "torchao": of_torchao()}
    architecture = "gpt_oss" if method == "mxfp4" else "llama"
    found = explain_config(with_config(architecture, known.get(method, said)), "x")
    assert method in found.checkpoint
    if method in known:
        assert found.fast and "repacks as int4" in found.checkpoint
    elif method == "bitsandbytes_4bit":
        assert found.fast and "repacks as fp4" in found.checkpoint
    elif method == "quanto":
        assert found.fast and "repacks as int8_row" in found.checkpoint
    elif method in DEQUANTIZED and not torch.cuda.is_available():
        assert found.fast and "dequantizes" in found.checkpoint and found.unsupported is None
    elif method in ("bitsandbytes_8bit", "fbgemm_fp8"):
        assert found.fast and f"repacks as {'int8_row' if method[0] == 'b' else 'fp8_g128'}" in found.checkpoint
    elif not torch.cuda.is_available():
        assert not found.fast and "does not repack" in found.checkpoint and "no exact counterpart" in str(found)
    json.dumps(found.to_dict())


def with_fp8(model: nn.Module, folder: Path) -> dict:
    """Write a checkpoint of float8 with a scale for blocks of 128 by 128; return its quantization_config."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        scale = tensors[name].abs().amax() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.full((-(-rows // 128), -(-columns // 128)), float(scale))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128])


def with_mxfp4(model: nn.Module, folder: Path) -> dict:
    """Write a checkpoint whose experts are codes of four bits with an exponent for each 32 weights."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inner, outer = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, outer, inner // 32), 122, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])


@pytest.mark.parametrize("write", (with_fp8, with_mxfp4))
def test_a_folder_that_transformers_dequantizes(write, tmp_path):
    require_native(CPU)
    if torch.cuda.is_available():
        pytest.skip("transformers keeps the quants where there is a GPU")
    model = build("llama", **SIZES) if write is with_fp8 else build("gpt_oss", hidden_size=64, intermediate_size=64)
    said = write(model.bfloat16(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    found = explain(str(tmp_path))
    ours = hf_fastpath.patch(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), quiet=True)
    report = hf_fastpath.report(ours)
    assert found.fast and found.report.patched == report.patched and report.loop == "fast"
    with counting(ours) as counts:
        ours.generate(prompt(CPU), **SHORT)
    assert counts.fast and not counts.fallback


def test_rows_that_are_no_whole_blocks_are_not_repacked():
    """bitsandbytes' blocks of 64 go on in the next row of 160."""
    config = build("llama", **SIZES | dict(intermediate_size=160)).config
    config.quantization_config = of_bitsandbytes()
    found = explain_config(config, "x")
    assert not found.fast and "does not repack" in found.checkpoint and "no whole number of blocks" in str(found)
