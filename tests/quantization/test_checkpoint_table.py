"""Every row of the table of checkpoints in docs/quantized-weights.md: tokens, prompts, adapters and mixtures.

The list of rows is docs/checkpoint_rows.py; what makes a layer of each row is here.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from causal_lm_types import random_model, small_config
from eight_bits import MAKERS, RoundingLinear
from models import SHORT, build, counting, require_native
from parity import assert_same_tokens
from quantized import Linear4bit, packed_in
from test_checkpoints import Case, awq, compressed, gptq
from test_four_bit_floats import compressed as four_bit_floats
from test_weight_classes import dynamic, quanto, torchao
from test_with_minimums import hqq, numbers_of
from torch import nn
from transformers import AutoModelForCausalLM

import hf_fastpath
from hf_fastpath.decode.model.modules import is_packed
from hf_fastpath.linears.checkpoint_weights import BlockWeight, DequantizedWeight
from hf_fastpath.linears.checkpoints import family_of
from hf_fastpath.reasons import REASONS, Cause
from hf_fastpath.recording import recorded_model
from hf_fastpath.replacing import counterparts

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
sys.path.insert(0, str(DOCS))
_spec = importlib.util.spec_from_file_location("checkpoint_rows", DOCS / "checkpoint_rows.py")
rows = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = rows
_spec.loader.exec_module(rows)

SIZES = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=384)
ROW_THAT_RUNS = next(row for row in rows.ROWS if row.name == "bitsandbytes NF4")  # without the package
#: makes a layer, and the weight that it stands for, of a plain weight
Maker = Callable[[torch.Tensor], tuple[nn.Module, torch.Tensor]]


def of_case(make: Callable[[Case], nn.Module], **how) -> Maker:
    def made(weight: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
        case = Case(rows=weight.shape[0], columns=weight.shape[1], **how)
        layer = make(case).to(weight.device)
        layer.out_features, layer.in_features = weight.shape
        return layer, case.weight

    return made


def of_bytes(kind: str) -> Maker:
    def made(weight: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
        weight = weight + 1e-5 * torch.randn_like(weight)  # a row of zeros has no scale
        layer, stands_for = MAKERS[kind](weight.cpu(), None)
        return layer.to(weight.device), stands_for

    return made


def of_table(kind: str) -> Maker:
    def made(weight: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
        layer = Linear4bit(weight.cpu(), kind, nested=True)
        stands_for = layer.dequantized()
        layer.quant_state.to(weight.device)
        return layer.to(weight.device), stands_for

    return made


def by_rows(weight: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values and the scale of each row, and the weight that they stand for."""
    scales = (weight.abs().amax(1, keepdim=True) / (127.5 if kind == torch.int8 else 448)).clamp(min=1e-9)
    steps = weight / scales
    values = (steps.round().clamp(-128, 127) if kind == torch.int8 else steps.clamp(-448, 448)).to(kind)
    return values, scales, values.float() * scales


def of_rows(kind: torch.dtype, make: Callable[[torch.Tensor, torch.Tensor], nn.Module]) -> Maker:
    def made(weight: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
        values, scales, stands_for = by_rows(weight, kind)
        return make(values, scales), stands_for

    return made


def of_torchao(cls: str, **parts) -> Callable[[torch.Tensor, torch.Tensor], nn.Module]:
    return lambda values, scales: torchao(cls, values, scales, (1, values.shape[1]), zero_point=None, **parts)


def of_intx(weight: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    scales = (torch.rand(weight.shape[0], weight.shape[1] // 32, device=weight.device) / 99).bfloat16()
    values = torch.randint(-8, 8, weight.shape, dtype=torch.int8, device=weight.device)
    zeros = torch.zeros_like(scales, dtype=torch.int8)
    how = dict(zero_point=zeros, target_dtype=torch.int4)
    layer = torchao("IntxUnpackedToInt8Tensor", values, scales, (1, 32), **how)
    return layer, values.float() * scales.float().repeat_interleave(32, 1)


def of_pairs(weight: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    numbers, scales, middles, stands_for = numbers_of(*weight.shape, 128)
    bytes = (numbers[:, ::2] - 8 & 15 | (numbers[:, 1::2] - 8 & 15) << 4).to(torch.uint8).to(weight.device)
    scales, middles = (each.t().contiguous().to(weight.device) for each in (scales, middles))
    return torchao("Int4Tensor", bytes, scales, (1, 128), weight.shape, zero_point=middles), stands_for


def of_quanto_bits(weight: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    """Quants from 0 to 3 of groups of 128, four a byte, of rows of groups that are a quarter of all apart."""
    numbers, scales, shifts, _ = numbers_of(*weight.shape, 128)
    grouped = (numbers & 3).view(-1, 128)
    parts = grouped.split(len(grouped) // 4)
    bytes = sum(part << 2 * place for place, part in enumerate(parts)).to(torch.uint8)
    layer = quanto(bytes.to(weight.device), scales.view(-1, 1).to(weight.device), "WeightQBitsTensor", weight.shape)
    held = layer.weight
    held._data, held._group_size = SimpleNamespace(_data=held._data, _bits=2), 128
    held._shift = shifts.view(-1, 1).to(weight.device)
    return layer, (scales.view(-1, 1).float() * grouped - shifts.view(-1, 1).float()).view(weight.shape)


def of_hqq(weight: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    layer, stands_for = hqq(*weight.shape, 4, 64, torch.bfloat16)
    layer.meta |= {name: layer.meta[name].to(weight.device) for name in ("scale", "zero")}
    return layer.to(weight.device), stands_for


def of_floats(group: int) -> Maker:
    def made(weight: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
        layer, stands_for = four_bit_floats(*weight.shape, group)
        return layer.to(weight.device), stands_for

    return made


FLOAT8 = torch.float8_e4m3fn
LAYERS: dict[str, Maker] = {
    "bitsandbytes NF4": of_table("nf4"),
    "bitsandbytes FP4": of_table("fp4"),
    "bitsandbytes LLM.int8": of_bytes("LLM.int8"),
    "GPTQ, 4 bits of 128": of_case(gptq),
    "GPTQ, 4 bits of 32": of_case(gptq, group=32),
    "GPTQ, 4 bits of 32, symmetric": of_case(gptq, group=32, symmetric=True),
    "GPTQ, 8 bits of 128, symmetric": of_case(gptq, bits=8, symmetric=True),
    "GPTQ, 8 bits of 32": of_case(gptq, bits=8, group=32),
    "AWQ, 4 bits of 128": of_case(awq),
    "AWQ, 4 bits of 64": of_case(awq, group=64),
    "compressed-tensors, 4 bits of 128": of_case(compressed),
    "compressed-tensors, 8 bits of 64": of_case(compressed, bits=8, group=64),
    "compressed-tensors FP8": of_bytes("compressed-tensors FP8"),
    "compressed-tensors W8A8": of_bytes("compressed-tensors W8A8"),
    "compressed-tensors MXFP4": of_floats(32),
    "compressed-tensors NVFP4": of_floats(16),
    "FP8 in blocks": of_bytes("FP8 in blocks"),
    "FBGEMM FP8": of_bytes("FBGEMM"),
    "torchao Int8WeightOnly": of_rows(torch.int8, of_torchao("Int8Tensor")),
    "torchao Int8DynamicActivationInt8Weight": of_rows(
        torch.int8, of_torchao("Int8Tensor", act_quant_kwargs=dynamic())
    ),
    "torchao IntxWeightOnly, 4 bits of 32": of_intx,
    "torchao Float8WeightOnly": of_rows(FLOAT8, of_torchao("Float8Tensor")),
    "torchao Int4WeightOnly": of_pairs,
    "quanto int8": of_rows(torch.int8, quanto),
    "quanto float8": of_rows(FLOAT8, quanto),
    "quanto int4 and int2": of_quanto_bits,
    "HQQ of 4, 3, 2 and 1 bits, axis=1": of_hqq,
}
over_rows = pytest.mark.parametrize("row", rows.ROWS, ids=lambda row: row.name)


def put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    model.get_submodule(parent)._modules[attribute] = layer


def with_layers(stock: nn.Module, row, at=lambda name: name) -> tuple[nn.Module, nn.Module]:
    """Return a model with a row's layers, and one that computes what they mean.

    Args:
        at: gives the place of a projection in both models by its place in ``stock``.
    """
    torch.manual_seed(1)
    model, same = copy.deepcopy(stock), copy.deepcopy(stock)
    for name, linear in list(stock.named_modules()):
        if type(linear) is nn.Linear and name.endswith("_proj"):
            layer, weight = LAYERS[row.name](linear.weight.detach())
            layer.bias = linear.bias
            rounding = getattr(family_of(layer).read(layer), "rounding", None)
            weight = weight.to(linear.weight.device, linear.weight.dtype)
            plain = copy.deepcopy(linear)
            plain.weight = nn.Parameter(weight, requires_grad=False)
            put(model, at(name), layer)
            put(same, at(name), plain if rounding is None else RoundingLinear(weight, linear.bias, rounding))
    return model, same


def check(row, model: nn.Module, same: nn.Module, device: torch.device, count: int) -> None:
    """Assert that the patched model decodes fast, and that its tokens and prompts are those of the other one."""
    names = {layer.format.name for layer in packed_in(model).values()}
    assert names <= set(row.becomes), names
    if device.type == "cpu":
        assert len(packed_in(model)) == (count if row.becomes else 0)
    assert hf_fastpath.report(model).loop == "fast"
    rounds = any(isinstance(layer, RoundingLinear) for layer in same.modules())
    ids = torch.randint(3, 90, (1, 40), device=device)
    with counting(model) as counts:
        found = model.generate(ids, **SHORT)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    logits, expected = model(ids).logits, same(ids).logits
    error = (logits - expected).detach().abs()
    if rounds:  # an input beside a tie may round to the other neighbor, and so do others in layers behind it
        assert error.amax(-1).min() <= 1e-4 * expected.detach().abs().max()
        assert error.mean() <= 5e-2 * expected.detach().abs().mean()
    else:
        assert error.max() <= 1e-4 * expected.detach().abs().max()
        assert_same_tokens(found, same.generate(ids, **SHORT), same)


@pytest.mark.every(2)
@over_rows
def test_tokens_and_prompts(row, device):
    """A prompt of many rows is read, and tokens follow it; then all layers are there again."""
    require_native(device)
    model, same = with_layers(build("llama", attention_bias=True, **SIZES).to(device), row)
    modules = dict(model.named_modules())
    hf_fastpath.patch(model, quiet=True)
    check(row, model, same, device, 14)
    hf_fastpath.unpatch(model)
    assert dict(model.named_modules()) == modules


@pytest.mark.every(4)
@over_rows
def test_lora(row, device):
    """Adapters lie over a row's layers."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    require_native(device)
    stock = build("llama", **SIZES).to(device)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    with_adapters = peft.get_peft_model(copy.deepcopy(stock), config).eval()
    inner = with_adapters.base_model.model
    places = {
        name: f"{name}.base_layer" if hasattr(inner.get_submodule(name), "base_layer") else name
        for name, _ in stock.named_modules()
        if name
    }
    model, same = (copy.deepcopy(with_adapters) for _ in range(2))
    layers = with_layers(stock, row)
    for whole, of in zip((model, same), layers):
        for name, place in places.items():
            if name.endswith("_proj"):
                put(whole.base_model.model, place, of.get_submodule(name))
    hf_fastpath.patch(model, quiet=True)
    check(row, model, same, device, 14)


@pytest.mark.every(4)
@pytest.mark.parametrize("row", [row for row in rows.ROWS if not row.experts], ids=lambda row: row.name)
def test_mixtures(row, device):
    """Packages that quantize linear layers alone leave experts as they are, which decode fast beside them."""
    require_native(device)
    sizes = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    model, same = with_layers(build("qwen3_moe", **sizes).to(device), row)
    hf_fastpath.patch(model, quiet=True)
    check(row, model, same, device, sum(name.endswith("_proj") for name, _ in same.named_modules()))


@over_rows
def test_weights_are_repacked_in_pieces(row, device, monkeypatch):
    """Pieces of a few rows give what all rows at once give, also of two weights that lie behind each other."""
    model, _ = with_layers(build("llama", **SIZES).to(device), row)
    read = [family.read(each) for each in model.modules() if (family := family_of(each)) is not None]
    read = [each for each in read if not isinstance(each, (DequantizedWeight, BlockWeight))]
    whole = [counterparts.repacked([each])[0] for each in read]
    monkeypatch.setattr(counterparts, "_PIECE", 1000)
    for expected, each in zip(whole, read):
        for found in counterparts.repacked([each, each]):
            assert all(map(torch.equal, found.tensors, expected.tensors))


@pytest.fixture
def refused(monkeypatch):
    """Recorded steps of quantized layers are wrong."""
    difference = recorded_model.reason_against

    def refuses(part, *given):
        has_packed = any(map(is_packed, part.module.modules()))
        return Cause("not_proven", "quantized layers", part.module) if has_packed else difference(part, *given)

    monkeypatch.setattr(recorded_model, "reason_against", refuses)


@pytest.mark.parametrize("has_adapter", (False, True), ids=("recorded", "adapter"))
def test_a_checkpoint_that_is_not_proven_is_left_to_stock(has_adapter, refused, device):
    """Its layers are the package's own again."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    require_native(device)
    config = small_config("glm4")
    vars(config).update(SIZES)
    stock = build("llama", **SIZES) if has_adapter else random_model(config, AutoModelForCausalLM, 0)
    whole = model = with_layers(stock.to(device), ROW_THAT_RUNS)[0]
    if has_adapter:
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        whole = peft.get_peft_model(model, config).eval()
    layers, given = dict(model.named_modules()), dict(input_ids=torch.arange(3, 12, device=device)[None], **SHORT)
    expected = whole.generate(**given)
    hf_fastpath.patch(whole, quiet=True)
    assert dict(model.named_modules()) == layers
    assert torch.equal(whole.generate(**given), expected)
    stats = hf_fastpath.report(whole).stats
    assert stats["fast_tokens"] == 0 and stats["reasons"]


def test_every_row_has_a_layer_and_tests_that_exist():
    names = [row.name for row in rows.ROWS]
    assert list(LAYERS) == names and len(set(names)) == len(names)
    assert set(rows.table().splitlines()) and all(name in rows.table() for name in names)
    for row in (*rows.ROWS, *rows.FURTHER):
        named = [row.weights, *filter(None, (row.package, row.experts, row.tokens, row.lora)), rows.MIXTURE]
        for each in named:
            file, is_test, name = each.partition("::")
            if not is_test:
                assert each in REASONS, (row.name, each)
                continue
            tree = ast.parse((rows.TESTS / file).read_text())
            functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in functions, (row.name, each)
            if each not in (row.weights, row.package):  # the table has a line for each device
                assert "device" in [argument.arg for argument in functions[name].args.args], (row.name, each)
