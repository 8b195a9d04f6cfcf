"""Mixtures whose experts have quantized weights: of our formats, and of checkpoints in MXFP4."""

from __future__ import annotations

import copy

import pytest
import torch
from causal_lm_types import small_model
from models import SHORT, build, counting, hidden_files, prompt, require_native
from parity import assert_equal_generation, assert_same_tokens
from quantized import check_saved_copied_and_taken_back, with_dequantized
from torch import nn
from transformers.integrations import mxfp4

import hf_fastpath
from hf_fastpath import traffic
from hf_fastpath.linears.packed_experts import PackedExperts
from hf_fastpath.ops.gemv import MAX_ROWS
from hf_fastpath.packed_formats import FORMATS
from hf_fastpath.replacing.mxfp4_experts import repacked_experts

FORMAT = "int4_g32"


def experts_in(model: nn.Module) -> list[PackedExperts]:
    return [module for module in model.modules() if type(module) is PackedExperts]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("is_listed", [True, False], ids=["listed", "recorded"])
def test_tokens_are_those_of_dequantized_experts(device, name, is_listed):
    require_native(device)
    stock = build(name).to(device)
    ours = copy.deepcopy(stock)
    if is_listed:
        hf_fastpath.patch(ours, weights=FORMAT, quiet=True)
    else:
        with hidden_files():
            hf_fastpath.patch(ours, weights=FORMAT, quiet=True)
    assert experts_in(ours)
    with counting(ours) as counts:
        assert_equal_generation(ours, with_dequantized(stock, ours), fast=True)
    assert not counts.reasons


@pytest.mark.parametrize("model_type", ["deepseek_v2", "ernie4_5_moe", "granitemoe"])
def test_tokens_of_recorded_types(device, model_type):
    """Routers, and experts that every row goes through, are as without quantized ones."""
    require_native(device)
    stock = small_model(model_type).to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), weights=FORMAT, quiet=True)
    assert experts_in(ours)
    expected = with_dequantized(stock, ours)
    for batch in (1, 3):
        text = torch.randint(1, 40, (batch, 9), device=device, generator=torch.Generator(device).manual_seed(batch))
        with counting(ours) as counts:
            found = ours.generate(text, **SHORT)
        assert counts.fast == batch * SHORT["max_new_tokens"] and not counts.reasons
        assert_same_tokens(found, expected.generate(text, **SHORT))


@pytest.mark.every(3)
@pytest.mark.parametrize("format", FORMATS)
def test_tokens_of_every_format(device, format):
    require_native(device)
    stock = build("qwen3_moe").to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), weights=format, quiet=True)
    assert {each.format.name for each in experts_in(ours)} == {format}
    expected = with_dequantized(stock, ours)
    with counting(ours) as counts:
        assert_equal_generation(ours, expected, fast=True)
    assert not counts.reasons


def test_prompts_and_batches_of_many_rows(device):
    """Rows are more than the op takes: every expert's product is one of its rows."""
    require_native(device)
    stock = build("gpt_oss").to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), weights=FORMAT, quiet=True)
    expected = with_dequantized(stock, ours)
    text = prompt(device, 3, MAX_ROWS + 9)
    with torch.no_grad():
        found, wanted = ours(text).logits, expected(text).logits
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)
    assert torch.equal(ours.generate(text, **SHORT), expected.generate(text, **SHORT))


def test_they_are_saved_copied_and_taken_back(device, tmp_path):
    require_native(device)
    stock = build("gpt_oss").to(device)
    check_saved_copied_and_taken_back(stock, {"input_ids": prompt(device, 1, 9)}, tmp_path)


def test_gradients_reach_the_input(device):
    require_native(device)
    stock = build("mixtral").to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), weights=FORMAT, quiet=True)
    experts, expected = experts_in(ours)[0], with_dequantized(stock, ours).model.layers[0].mlp.experts
    x = torch.randn(5, experts.hidden_size, device=device)
    weights, ids = torch.randn(5, experts.num_experts, device=device).softmax(-1).topk(2)
    grads = []
    for each in (experts, expected):
        given = x.clone().requires_grad_()
        each(given, ids, weights).square().sum().backward()
        grads.append(given.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_a_step_reads_the_chosen_experts_alone():
    ours = hf_fastpath.patch(build("mixtral"), weights=FORMAT, quiet=True)
    chosen, experts = ours.config.num_experts_per_tok, experts_in(ours)
    counted = traffic.weight_bytes(ours)
    stacks = sum(each.nbytes for module in experts for each in module.packed.tensors)
    ours.config.num_experts_per_tok = experts[0].num_experts
    left = traffic.weight_bytes(ours) - counted
    assert left == stacks * (experts[0].num_experts - chosen) // experts[0].num_experts


def test_weights_that_would_not_be_read_are_refused():
    stock = build("mixtral")
    ours = hf_fastpath.patch(copy.deepcopy(stock), weights=FORMAT, quiet=True)
    with pytest.raises(ValueError, match="weights of layers that are quantized"):
        ours.load_state_dict(stock.state_dict())
    with pytest.raises(RuntimeError, match=r"gate_up_proj would not be read"):
        ours.model.layers[0].mlp.experts.load_state_dict(stock.model.layers[0].mlp.experts.state_dict())


# ---- checkpoints in MXFP4 -----------------------------------------------------------------------------------------


def mxfp4_experts(config, dtype: torch.dtype, seed: int) -> nn.Module:
    """Make the module that transformers has for such a checkpoint, with blocks and scales of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        module = mxfp4.Mxfp4GptOssExperts(config)
    experts, width, hidden = config.num_local_experts, config.intermediate_size, config.hidden_size
    for name, rows, columns in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        del module._parameters[name]
        groups = columns // 32
        blocks = torch.randint(256, (experts, rows, groups, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 123, (experts, rows, groups), generator=generator, dtype=torch.uint8)
        for part, tensor in (("blocks", blocks), ("scales", scales)):
            module.register_parameter(f"{name}_{part}", nn.Parameter(tensor, requires_grad=False))
        bias = torch.randn(experts, rows, generator=generator).to(dtype) / 8
        setattr(module, f"{name}_bias", nn.Parameter(bias, requires_grad=False))
    return module


def mxfp4_pair(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """Return a small gpt-oss whose experts are in MXFP4, and the same model with these dequantized by transformers."""
    stock = build("gpt_oss", hidden_size=96, intermediate_size=160).to(dtype)
    packed = copy.deepcopy(stock)
    count = len(stock.model.layers[0].mlp.router.weight)
    for seed, (layer, other) in enumerate(zip(packed.model.layers, stock.model.layers)):
        experts = mxfp4_experts(stock.config, dtype, seed)
        experts.down_proj_blocks[:, :count] = 0  # features that choose experts stay as they are
        experts.down_proj_bias[:, :count] = 0
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = (getattr(experts, f"{name}_{part}") for part in ("blocks", "scales"))
            matrices = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
            setattr(other.mlp.experts, name, nn.Parameter(matrices, requires_grad=False))
            bias = getattr(experts, f"{name}_bias").detach().clone()
            setattr(other.mlp.experts, f"{name}_bias", nn.Parameter(bias, requires_grad=False))
        layer.mlp.experts = experts
    return packed.to(device), stock.to(device)


def test_mxfp4_is_taken_over_and_given_back(device):
    require_native(device)
    packed, stock = mxfp4_pair(device)
    before = {name: tensor.clone() for name, tensor in packed.state_dict().items()}
    hf_fastpath.patch(packed, quiet=True)
    assert {each.format.name for each in experts_in(packed)} == {"mxfp4"}
    with counting(packed) as counts:
        assert_equal_generation(packed, stock, fast=True)
    assert not counts.reasons
    hf_fastpath.unpatch(packed)
    assert not experts_in(packed)
    after = packed.state_dict()
    assert before.keys() == after.keys()
    assert all(
        torch.equal(tensor, after[name]) and tensor.dtype == after[name].dtype for name, tensor in before.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mxfp4_has_the_values_of_transformers(dtype):
    """All exponents, and all numbers of four bits with each."""
    config = build("gpt_oss", hidden_size=96, intermediate_size=160).config
    module = mxfp4_experts(config, dtype, 0)
    scales = module.gate_up_proj_scales
    scales.copy_(torch.arange(scales.numel()).view(scales.shape) % 255)
    expected = {
        name: mxfp4.convert_moe_packed_tensors(
            getattr(module, f"{name}_blocks"), getattr(module, f"{name}_scales"), dtype=dtype
        )
        for name in ("gate_up_proj", "down_proj")
    }
    made = repacked_experts(module, dtype)
    for name, weight in (("gate_up_proj", made.packed.gate_up), ("down_proj", made.packed.down)):
        values = weight.dequantize(dtype).unflatten(0, (config.num_local_experts, -1)).mT
        torch.testing.assert_close(values, expected[name], rtol=0, atol=0, equal_nan=True)


def test_mxfp4_in_bfloat16_decodes_fast(device):
    require_native(device)
    packed, _ = mxfp4_pair(device, torch.bfloat16)
    hf_fastpath.patch(packed, quiet=True)
    with counting(packed) as counts:
        packed.generate(prompt(device, 1, 9), **SHORT)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
