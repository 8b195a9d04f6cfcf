"""gpt-oss: sinks, gates, and quantized experts."""

import copy
from types import MethodType

import pytest
import torch
from architecture_checks import assert_same_gradients
from models import build, counting, fresh, prompt, require_native
from parity import LogitRule, RoundingCache, assert_equal_generation, float64_copy, forced_logits, walk
from safetensors.torch import save_file
from said import logged
from transformers import GptOssForCausalLM, Mxfp4Config
from transformers.integrations import mxfp4
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import hf_fastpath


@pytest.mark.parametrize("change", ("values", "tensor"))
def test_gpt_oss_changed_sinks_are_read(change, device):
    stock, ours = fresh("gpt_oss", device)
    text = prompt(device, 8, 40)
    before = forced_logits(ours, text, 9)
    for model in (stock, ours):
        attention = model.model.layers[1].self_attn
        if change == "values":
            attention.sinks.data.add_(3)
        else:
            attention.sinks = torch.nn.Parameter(attention.sinks.detach() - 9)
    after = forced_logits(ours, text, 9)
    assert not torch.allclose(after, before, rtol=1e-2)
    ref, rule = float64_copy(stock), LogitRule()
    expected = walk(ref, text, [9] + [1] * 31, RoundingCache(ref.config, torch.float32))[:, 8:]
    rule.add(after, forced_logits(stock, text, 9), expected)
    rule.check(f"sinks: {change}")


@torch.no_grad()
def test_gpt_oss_mixture_gives_weights_too(device):
    stock, ours = fresh("gpt_oss", device)
    x = torch.randn(3, 1, 120, device=device)
    with counting(ours) as counts:
        found = ours.model.layers[0].mlp(x)
    assert not counts.reasons
    expected = stock.model.layers[0].mlp(x)
    assert type(found) is tuple and len(found) == 2
    for mine, theirs in zip(found, expected):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_gpt_oss_router_logits(device):
    stock, ours = fresh("gpt_oss", device)
    ids = prompt(device, 1, 5)
    with counting(ours) as counts:
        found = ours(ids, output_router_logits=True).router_logits
    assert counts.reasons["attention_outputs"] and len(found) == 2
    for mine, expected in zip(found, stock(ids, output_router_logits=True).router_logits):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("where", ("class", "instance"))
def test_gpt_oss_gate_of_the_users_own_runs(where, device, monkeypatch):
    def other(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.tanh(gate) * up

    stock, ours = fresh("gpt_oss", device)
    if where == "class":
        monkeypatch.setattr(GptOssExperts, "_apply_gate", other)
    else:
        for model in (stock, ours):
            for layer in model.model.layers:
                layer.mlp.experts._apply_gate = MethodType(other, layer.mlp.experts)
    with counting(ours) as counts:
        assert_equal_generation(ours, stock, fast=False)
    assert counts.reasons["class_forward"]


def test_gpt_oss_gradients(device):
    assert_same_gradients("gpt_oss", device)


def test_gpt_oss_verify(device):
    _, ours = fresh("gpt_oss", device)
    assert hf_fastpath.verify(ours, prompt(device, 1, 12), max_new_tokens=8).ok


def quantize(model, monkeypatch) -> None:
    """Put transformers' own modules for MXFP4 into the model; they compute as before: their kernels need a GPU."""

    def unquantized(self, hidden_states):
        return self.unquantized[0](hidden_states)

    for layer in model.model.layers:
        kept, experts = layer.mlp, mxfp4.Mxfp4GptOssExperts(model.config).to(model.device)
        if hasattr(mxfp4, "Mxfp4GptOssMLP"):
            monkeypatch.setattr(mxfp4.Mxfp4GptOssMLP, "forward", unquantized)
            layer.mlp = mxfp4.Mxfp4GptOssMLP(kept.router, experts)
        else:  # older versions of transformers leave the class and set a forward
            layer.mlp = copy.deepcopy(kept)
            layer.mlp.experts = experts
            layer.mlp.forward = MethodType(unquantized, layer.mlp)
        layer.mlp.unquantized = [kept]  # a list, so that it is no part of the model


def test_gpt_oss_quantized_experts_run_stock(device, monkeypatch):
    """The mixture and its layers run stock, with a reason; attention and norms around them are fast."""
    require_native(device)
    stock = build("gpt_oss").to(device)
    quantize(stock, monkeypatch)
    with logged("class_not_supported|instance_forward"):
        ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    with counting(ours) as counts:
        assert_equal_generation(ours, stock, fast=False)
    report = hf_fastpath.report(ours)
    assert report.patched == {"attention": 2, "norm": 5} and report.loop in ("partial_patch", "class_forward")
    assert {what.split(": ")[1] for what in report.declined} <= {"class_not_supported", "instance_forward"}
    assert counts.reasons[report.loop]


def test_gpt_oss_norms_in_float32_run_stock(device, tmp_path):
    """transformers loads norms so beside float16, but all parameters of our kernels have one type."""
    require_native(device)
    build("gpt_oss").save_pretrained(tmp_path)
    stock = GptOssForCausalLM.from_pretrained(tmp_path, dtype=torch.float16).eval().to(device)
    assert stock.model.norm.weight.dtype == torch.float32
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    with counting(ours) as counts:
        assert_equal_generation(ours, stock, fast=False)
    assert counts.reasons["dtype"]


def test_gpt_oss_unpacked_checkpoint_is_fast(device, tmp_path):
    """The checkpoint is in MXFP4, as published, and is dequantized when it is loaded."""
    require_native(device)
    model = build("gpt_oss", hidden_size=128, intermediate_size=64).to(torch.bfloat16)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, in_features, features = tensors.pop(name).shape
        blocks = experts, features, in_features // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full(blocks, 124, dtype=torch.uint8)  # times 2 ** -3
    model.config.quantization_config = {"quant_method": "mxfp4"}
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    unpacked = Mxfp4Config(dequantize=True)
    stock = GptOssForCausalLM.from_pretrained(tmp_path, quantization_config=unpacked, dtype="auto").eval().to(device)
    assert {parameter.dtype for parameter in stock.parameters()} == {torch.bfloat16}
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    ids = prompt(device)
    with counting(ours) as counts:
        found = ours.generate(ids, max_new_tokens=8, do_sample=False)
    assert counts.fast == 8 and not counts.fallback and found.shape == (1, ids.shape[1] + 8)
