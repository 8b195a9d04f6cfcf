"""What a ``quantization_config`` says of weights that :mod:`..linears.checkpoints` will find; no checkpoint is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import structural
from ..architecture import architectures
from ..choices import InputQuants
from ..compat import quantization_method, should_convert_module
from ..decode.model.parts import MoEPart
from ..decode.model.structure import ModelInRoles
from ..decode.sources.described import model_part
from ..errors import NoCounterpart
from ..linears.eight_bits import compressed_rounding
from ..linears.packed_linear import PackedLinear
from ..packed_formats import BLOCK
from ..quantization.formats import (
    FORMATS,
    Format,
    InputRounding,
    PackedWeight,
    RoundedInputWeight,
    padded,
    scale_dtype,
)
from .quantizing import Replaced
from .repacking import Packed, repack_layers
from .scheme_kinds import AffineScheme, AnyScheme, ByteScheme, Scheme, TableScheme

#: features of a layer that stands for all layers while only a scheme is asked about
_SOME_FEATURES = 4096


def _need(is_so: bool, reason: str = "quantized_format") -> None:
    if not is_so:
        raise NoCounterpart(reason)


def _but(names: Sequence[str] | None, lm_head: bool = False) -> Callable[[str, str], bool]:
    """Return the rule for all linear layers but those that ``names`` lists, and the head."""
    patterns = list(names or ())
    return lambda name, kind: (lm_head or name != "lm_head") and should_convert_module(name, patterns)


def _gptq(given: Mapping[str, Any]) -> list[Scheme]:
    bits, group = given.get("bits"), given.get("group_size", 128)
    _need(bits in (2, 4, 8) and not given.get("dynamic"))
    return [Scheme(bits, group, not given.get("sym", True), _but(None, bool(given.get("lm_head"))))]


def _awq(given: Mapping[str, Any]) -> list[Scheme]:
    version = str(getattr(given.get("version"), "value", given.get("version", "gemm"))).lower()
    _need(given.get("bits", given.get("w_bit", 4)) == 4 and version == "gemm")
    group = given.get("group_size", given.get("q_group_size", 128))
    return [Scheme(4, group, bool(given.get("zero_point", True)), _but(given.get("modules_to_not_convert")))]


def _matches(patterns: Sequence[str], name: str, kind: str) -> bool:
    """Whether compressed-tensors means a layer by one of these names, classes or regular expressions."""
    return any(re.match(each[3:], name) if each.startswith("re:") else each in (name, kind) for each in patterns)


#: compressed-tensors' formats of bytes
_OF_BYTES = ("float-quantized", "int-quantized", "naive-quantized")


def _compressed_bytes(how: Mapping[str, Any], inputs: Any, covers: Callable[[str, str], bool]) -> ByteScheme:
    kind, strategy = how.get("type", "int"), how.get("strategy") or "tensor"
    reason = "quantized_fp8" if kind == "float" else "quantized_format"
    _need(how.get("num_bits") == 8 and how.get("symmetric", True), reason)
    rounding = compressed_rounding(inputs, of_integers=kind == "int")
    if strategy == "block":
        block = how.get("block_structure") or (0, 1)
        _need(kind == "float" and block[1] % BLOCK == 0, reason)
        return ByteScheme("fp8_g128", rounding, covers)
    _need(strategy in ("channel", "tensor"), reason)
    return ByteScheme("int8_row" if kind == "int" else "fp8", rounding, covers)


def _compressed(given: Mapping[str, Any]) -> list[AnyScheme]:
    _need(given.get("quantization_status", "compressed") == "compressed")
    _need((given.get("sparsity_config") or {}).get("format", "dense") == "dense" and not given.get("kv_cache_scheme"))
    ignored = given.get("ignore") or ()
    made: list[AnyScheme] = []
    groups = given.get("config_groups") or {}
    _need(bool(groups))
    for each in groups.values():
        _need(isinstance(each, Mapping))
        how = each.get("weights") or {}
        targets = each.get("targets") or ["Linear"]

        def covers(name: str, kind: str, targets: Sequence[str] = targets) -> bool:
            return _matches(targets, name, kind) and not _matches(ignored, name, kind)

        _need(each.get("output_activations") is None)
        layout = each.get("format") or given.get("format")
        if layout in _OF_BYTES:
            made.append(_compressed_bytes(how, each.get("input_activations"), covers))
            continue
        _need(each.get("input_activations") is None)
        if layout == "mxfp4-pack-quantized":
            made.append(TableScheme("mxfp4", FORMATS["mxfp4"].group, covers))
            continue
        _need(layout == "pack-quantized")
        _need(how.get("type", "int") == "int" and how.get("num_bits") in (4, 8))
        size = how.get("group_size")
        strategy = how.get("strategy") or ("group" if size not in (None, -1) else "channel")
        _need(strategy in ("group", "channel", "tensor"))
        group = size if strategy == "group" else -1
        made.append(Scheme(how["num_bits"], group, not how.get("symmetric", True), covers))
    return made


def _value(found: Any) -> Any:
    """Return the value in torchao's way of writing values of its own types."""
    return found.get("_data") if isinstance(found, Mapping) and "_type" in found else found


def _granularity(given: Any, default: str) -> tuple[str, int]:
    """Return the name of one of torchao's granularities, and the weights of a group."""
    given = given or {"_type": default}
    return given.get("_type", default), (given.get("_data") or {}).get("group_size", -1)


def _torchao_bytes(how: Mapping[str, Any], data: Mapping[str, Any], rule: Callable[[str, str], bool]) -> AnyScheme:
    """Return the scheme of a config of torchao whose weights are bytes."""
    kind = how["_type"]
    given = data.get("granularity")
    if kind == "Int8DynamicActivationInt8WeightConfig":
        is_symmetric = _value(data.get("act_mapping_type", "SYMMETRIC")) == "SYMMETRIC" and not data.get("reduce_range")
        granularities = [_granularity(each, "PerRow") for each in (given if isinstance(given, list) else [given] * 2)]
        of_rows = granularities[0][0] == "PerRow" and len(granularities) == 2
        _need(is_symmetric and of_rows and granularities[1][0] in ("PerRow", "PerTensor"), "quantized_activations")
        return ByteScheme("int8_row", InputRounding(InputQuants.INT8_ROW), rule)
    name, group = _granularity(given, "PerRow")
    if kind == "Int8WeightOnlyConfig":
        _need(how.get("_version", 2) >= 2 and data.get("group_size") is None)
        return Scheme(8, group, False, rule) if name == "PerGroup" else ByteScheme("int8_row", None, rule)
    _need("e4m3" in str(_value(data.get("weight_dtype", "float8_e4m3fn"))), "quantized_fp8")
    _need(name != "PerGroup" or group % BLOCK == 0, "quantized_fp8")
    return ByteScheme("fp8_g128" if name == "PerGroup" else "fp8", None, rule)


#: configs of torchao whose weights are bytes
_TORCHAO_BYTES = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig")


def _torchao(given: Mapping[str, Any]) -> list[AnyScheme]:
    kinds = given.get("quant_type")
    _need(isinstance(kinds, Mapping) and set(kinds) == {"default"})
    how = kinds["default"]
    _need(isinstance(how, Mapping))
    data = how.get("_data") or {}
    rule = _but(given.get("modules_to_not_convert"), bool(given.get("include_input_output_embeddings")))
    if how.get("_type") in _TORCHAO_BYTES:
        return [_torchao_bytes(how, data, rule)]
    if how.get("_type") == "Int4WeightOnlyConfig":
        layout = str(_value(data.get("int4_packing_format", "plain"))).lower()
        _need(layout in ("plain", "tile_packed_to_4d"))
        return [AffineScheme("middles", data.get("group_size", 128), rule)]
    _need(how.get("_type") == "IntxWeightOnlyConfig")
    bits = int(re.sub(r"\D", "", str(_value(data.get("weight_dtype", "int8")))) or 0)
    _need(1 <= bits <= 8 and str(_value(data.get("intx_packing_format", "unpacked"))).startswith("unpacked"))
    granularity = data.get("granularity") or {"_type": "PerAxis"}
    group = (granularity.get("_data") or {}).get("group_size", -1) if granularity.get("_type") == "PerGroup" else -1
    return [
        Scheme(
            max(bits, 2) if bits <= 4 else 8, group, _value(data.get("mapping_type", "SYMMETRIC")) == "ASYMMETRIC", rule
        )
    ]


#: weights of a block, where transformers has bitsandbytes quantize them: no config says it
_BITSANDBYTES_BLOCK = 64


def _bitsandbytes(given: Mapping[str, Any]) -> list[TableScheme]:
    name = given.get("bnb_4bit_quant_type", "fp4")
    _need(name in FORMATS and FORMATS[name].is_table)
    return [TableScheme(name, _BITSANDBYTES_BLOCK, _but(given.get("llm_int8_skip_modules")))]


def _llm_int8(given: Mapping[str, Any]) -> list[ByteScheme]:
    _need(not given.get("llm_int8_has_fp16_weight"))
    rounding = InputRounding(InputQuants.INT8_OUTLIERS, float(given.get("llm_int8_threshold", 6.0)))
    return [ByteScheme("int8_row", rounding, _but(given.get("llm_int8_skip_modules")))]


def _fine_grained(given: Mapping[str, Any]) -> list[ByteScheme]:
    _need(given.get("activation_scheme", "dynamic") == "dynamic", "quantized_activations")
    block = given.get("weight_block_size", (BLOCK, BLOCK))
    _need(block is None or block[1] == BLOCK, "quantized_fp8")
    rounding = InputRounding(InputQuants.FP8_ROW if block is None else InputQuants.FP8_BLOCK)
    return [ByteScheme("fp8_g128", rounding, _but(given.get("modules_to_not_convert")))]


def _fbgemm(given: Mapping[str, Any]) -> list[ByteScheme]:
    rounding = InputRounding(InputQuants.FP8_ROW, float(given.get("activation_scale_ub", 1200.0)))
    return [ByteScheme("fp8_g128", rounding, _but(given.get("modules_to_not_convert")))]


def _quanto(given: Mapping[str, Any]) -> list[AnyScheme]:
    _need(given.get("activations") is None, "quantized_activations")
    kind, rule = given.get("weights", "int8"), _but(given.get("modules_to_not_convert"))
    if kind in ("int4", "int2"):
        return [AffineScheme("minimums", BLOCK, rule)]
    _need(kind in ("int8", "float8"))
    return [ByteScheme("int8_row" if kind == "int8" else "fp8", None, rule)]


#: methods whose weights our formats hold -> what reads their config
_METHODS: dict[str, Callable[[Mapping[str, Any]], Sequence[AnyScheme]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "torchao": _torchao,
    "quanto": _quanto,
    "bitsandbytes_4bit": _bitsandbytes,
    "bitsandbytes_8bit": _llm_int8,
    "fp8": _fine_grained,
    "fbgemm_fp8": _fbgemm,
}


def schemes_of(quantized: Mapping[str, Any]) -> Sequence[AnyScheme]:
    """Return the schemes of a ``quantization_config``.

    Raises:
        NoCounterpart: our formats hold no weights of this method, or not those of this config.
    """
    method = quantization_method(quantized)
    _need(method in _METHODS)
    found = _METHODS[method](quantized)
    for scheme in found:
        scheme.format(_SOME_FEATURES)
    return found


def repack_empty(model: nn.Module, schemes: Sequence[AnyScheme]) -> set[str]:
    """Replace the layers of a model on the meta device as ``patch()`` will replace those of the checkpoint.

    Returns:
        Names of the formats.

    Raises:
        NoCounterpart: a layer's weight has none, or ``patch()`` looks at no layers of this model.
    """
    known = structural.known_for(model, architectures())
    part = next(filter(None, (model_part(architecture, model) for architecture in known)), None)
    _need(part is not None and part.other_reason() is None, "class_not_supported")
    assert part is not None
    names = {id(module): name for name, module in model.named_modules()}
    formats: set[str] = set()

    def packed(linears: list[nn.Module]) -> list[Packed]:
        made: list[Packed] = []
        for linear in linears:
            name, kind = names[id(linear)], type(linear).__name__
            scheme = next((each for each in schemes if each.covers(name, kind)), None)
            if scheme is not None:
                weight = _empty(scheme.format(linear.in_features), linear.out_features, linear.in_features)
                formats.add(weight.format.name)
                rounding = scheme.rounding if isinstance(scheme, ByteScheme) else None
                given = weight if rounding is None else RoundedInputWeight(weight, rounding)
                layer = PackedLinear(given, linear.bias)
                layer.is_described = True
                made.append((linear, layer, None))
        return made

    _check_experts(part, schemes, names)
    replaced: list[Replaced] = []
    repack_layers(part, replaced, quiet=True, packed=packed)
    return formats


def _check_experts(part: ModelInRoles, schemes: Sequence[AnyScheme], names: Mapping[int, str]) -> None:
    """Raise if the checkpoint quantizes experts, which are not repacked."""
    for layer in part.layers:
        if isinstance(layer.mlp, MoEPart):
            name = f"{names[id(layer.mlp.module)]}.experts.0.down_proj"
            _need(not any(scheme.covers(name, "Linear") for scheme in schemes))


def _empty(format: Format, rows: int, columns: int) -> PackedWeight:
    """Make a weight without data."""
    groups = rows, format.groups(columns)
    quants = torch.empty(rows, padded(columns) * format.bits // 8, dtype=torch.uint8, device="meta")
    scales = torch.empty(rows, format.scale_columns(columns), dtype=scale_dtype(format), device="meta")
    zeros = torch.empty(groups, dtype=torch.uint8, device="meta") if format.has_zeros else None
    return PackedWeight(format, columns, quants, scales, zeros, 1.0)
