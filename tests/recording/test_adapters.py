"""LoRA in recorded steps: the base model's calls, with two small ones at each input."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import causal_lm_types
import pytest
import torch
from models import CPU, build, counting, hidden_files, require_native
from torch import nn

import hf_fastpath
from hf_fastpath.architecture import architectures
from hf_fastpath.linears.packed_linear import PackedLinear
from hf_fastpath.patching.state import state_of
from hf_fastpath.recording import stand_ins

peft = pytest.importorskip("peft")
LISTED = {each.name for each in architectures()}
#: what stays PyTorch's if an adapter's products are not recognized
OF_PYTORCH = ("mul.Tensor", "add.Tensor", "_to_copy")


def small(name: str) -> nn.Module:
    return build(name) if name in LISTED else causal_lm_types.small_model(name)


def adapted(model: nn.Module, names: tuple[str, ...] = ("default",), **options: Any) -> nn.Module:
    """Return the model with adapters on all its linear layers (or ``target_modules``) that change tokens."""
    torch.manual_seed(4)
    config = dict(target_modules="all-linear", r=4, lora_alpha=6) | options
    model = peft.get_peft_model(model, peft.LoraConfig(**config), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, peft.LoraConfig(**config))
    for path, parameter in model.named_parameters():
        if "lora_B" in path:
            nn.init.normal_(parameter, std=0.08)
    if len(names) > 1:
        model.base_model.set_adapter(list(names))
    return model.eval()


def generated(model: nn.Module, **options: Any) -> torch.Tensor:
    inputs = torch.arange(5, 14)[None] if "input_ids" not in options else options.pop("input_ids")
    return model.generate(input_ids=inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)


def calls_of(model: nn.Module) -> Counter:
    whole = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    plan = next(iter(state_of(whole).plans))
    return Counter(call.name.removesuffix(".default") for call in plan.program.calls)


def assert_alike(model: nn.Module, **options: Any) -> nn.Module:
    """Return the patched model, whose tokens are the model's, and all in our loop."""
    require_native(CPU)
    ours = hf_fastpath.patch(copy.deepcopy(model), quiet=True)
    with counting(ours) as counts:
        found = generated(ours, **options)
    assert torch.equal(found, generated(model, **options))
    assert counts.fast and not counts.fallback, (counts.reasons, str(hf_fastpath.report(ours)))
    return ours


def assert_no_more_of_pytorch(calls: Counter, plain: nn.Module) -> None:
    """``plain`` is the model without adapters; its step is recorded."""
    with hidden_files():
        before = hf_fastpath.patch(plain, quiet=True)
        generated(before)
    for name in OF_PYTORCH:
        assert calls[name] <= calls_of(before)[name], f"an adapter has calls of PyTorch's: {name}"


FAMILIES = ("llama", "gpt2", "qwen3", "gemma2", "phi3", "falcon", "cohere", "glm4", "granitemoe", "bloom", "lfm2")


@pytest.mark.every(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_input_has_two_more_calls(name):
    calls = calls_of(assert_alike(adapted(small(name))))
    assert calls["lora_down"] == calls["lora_up"] > 0
    assert_no_more_of_pytorch(calls, small(name))


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "options",
    (
        dict(target_modules=["q_proj", "v_proj"]),
        dict(target_modules=["up_proj"]),
        dict(target_modules=["o_proj", "down_proj"], use_rslora=True),
        dict(r=1),
        dict(r=19, lora_alpha=19),
        dict(r=400, lora_alpha=40, target_modules=["q_proj", "v_proj", "o_proj"]),
        dict(rank_pattern={"k_proj": 2, "gate_proj": 7}),
        dict(lora_dropout=0.4),
        dict(init_lora_weights="olora"),
    ),
    ids=lambda each: ",".join(each),
)
def test_options_of_adapters(options):
    calls = calls_of(assert_alike(adapted(small("llama"), **options)))
    assert calls["lora_up"] + calls["with_adapters"] > 0
    assert_no_more_of_pytorch(calls, small("llama"))


@pytest.mark.parametrize("count", (2, 5, 17))
def test_several_adapters_at_once(count):
    """More than sixteen of one weight stay PyTorch's, and right."""
    names = tuple(f"adapter {place}" for place in range(count))
    calls = calls_of(assert_alike(adapted(small("llama"), names, target_modules=["q_proj", "down_proj"])))
    assert (calls["lora_up"] > 0) == (count <= 16)


@pytest.mark.parametrize("options", (dict(use_dora=True), dict(lora_bias=True)), ids=lambda each: ",".join(each))
def test_what_is_more_than_two_products_is_right(options):
    assert_alike(adapted(small("llama"), **options))


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ("llama", "gpt2", "glm4"))
@pytest.mark.parametrize("rows", (1, 3, 20))
def test_rows(name, rows):
    """Batches for which products are those of many rows, and drafts."""
    model = adapted(small(name))
    ids = torch.randint(5, 90, (rows, 7), generator=torch.Generator().manual_seed(rows))
    ours = assert_alike(model, input_ids=ids)
    if rows == 1:
        options = dict(input_ids=torch.arange(5, 9).repeat(4)[None], prompt_lookup_num_tokens=3)
        assert torch.equal(generated(ours, **options), generated(model, **options))


def test_a_weight_that_is_read_otherwise_is_none_with_adapters(monkeypatch, tmp_path):
    """Marks to come may read a matrix in other ways than by a product."""
    monkeypatch.setenv("HF_FASTPATH_CACHE", str(tmp_path))  # other tests have left steps in theirs
    monkeypatch.setattr(stand_ins, "_OF_PRODUCTS", ())
    calls = calls_of(assert_alike(adapted(small("llama"))))
    assert not calls["lora_up"] and calls["mul.Tensor"] > 2


@pytest.mark.every(2)
@pytest.mark.parametrize("autocast", (True, False))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_adapters_in_float32_and_in_16_bits(dtype, autocast):
    require_native(CPU)
    model = peft.get_peft_model(
        small("llama").to(dtype),
        peft.LoraConfig(target_modules="all-linear", r=8),
        autocast_adapter_dtype=autocast,
    ).eval()
    for path, parameter in model.named_parameters():
        if "lora_B" in path:
            nn.init.normal_(parameter, std=0.05)
    result = hf_fastpath.verify(hf_fastpath.patch(model, quiet=True), torch.arange(5, 14)[None], max_new_tokens=6)
    assert result.ok, str(result)
    assert calls_of(model)["lora_up"] > 0
    assert_no_more_of_pytorch(calls_of(model), small("llama").to(dtype))


def test_adapters_of_two_types():
    """Of projections of one input, some in float32 and some in the model's 16 bits."""
    require_native(CPU)
    model = adapted(small("llama").to(torch.bfloat16))
    for path, each in model.named_parameters():
        if "lora_" in path and ("v_proj" in path or "up_proj" in path):
            each.data = each.data.to(torch.bfloat16)
    result = hf_fastpath.verify(hf_fastpath.patch(model, quiet=True), torch.arange(5, 14)[None], max_new_tokens=6)
    assert result.ok and not result.stock_loop, str(result)
    calls = calls_of(model)
    assert calls["with_adapters"] and calls["lora_up"], "projections behind attention have adapters of one type"


def test_weights_of_adapters_are_read_as_they_are():
    """Training steps, and a scale that is set, between two calls."""
    model = adapted(small("llama"))
    ours = assert_alike(model)
    for each in (model, ours):
        with torch.no_grad():
            for path, parameter in each.named_parameters():
                if "lora_" in path:
                    parameter.mul_(-1.5)
    assert torch.equal(generated(ours), generated(model))
    for each in (model, ours):
        for module in each.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["default"] = 0.25
    assert torch.equal(generated(ours), generated(model))


@pytest.mark.every(2)
@pytest.mark.parametrize("weights", ("int8", "int4_g32"))
@pytest.mark.parametrize("name", ("llama", "glm4"))
def test_the_base_alone_is_quantized(name, weights):
    """Adapters stay as they are: their matrices have few inputs or few outputs."""
    require_native(CPU)
    model = hf_fastpath.patch(adapted(small(name)), weights=weights, quiet=True)
    packed = [path for path, each in model.named_modules() if type(each) is PackedLinear]
    assert packed and all(path.endswith("base_layer") for path in packed)
    result = hf_fastpath.verify(model, torch.arange(5, 14)[None], max_new_tokens=6)
    assert result.ok and not result.stock_loop, str(result)
    with counting(model) as counts:
        generated(model)
    assert counts.fast and not counts.fallback, counts.reasons
    calls = calls_of(model)
    assert calls["lora_up"] and calls["packed_gemv"]
    assert_no_more_of_pytorch(calls, small(name))


def test_weights_below_a_merged_adapter_are_not_quantized():
    """PEFT would change its lists before it found that the weight is gone."""
    require_native(CPU)
    model = adapted(small("llama"))
    expected = generated(model)
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"unmerge_adapter\(\) before patch\(\)"):
        hf_fastpath.patch(model, weights="int8", quiet=True)
    model.unmerge_adapter()
    assert torch.equal(generated(model), expected)
    ours = hf_fastpath.patch(model, weights="int8", quiet=True)
    with pytest.raises(AttributeError, match="unpatch"):
        ours.merge_adapter()
    assert not any(getattr(each, "merged", False) for each in ours.modules())
    hf_fastpath.unpatch(ours)
    assert torch.equal(generated(ours), expected)


def test_layers_are_found_where_peft_has_moved_them():
    require_native(CPU)
    expected = generated(small("llama"))
    model = hf_fastpath.patch(adapted(small("llama")), weights="int8", quiet=True)
    inner = model.unload()
    hf_fastpath.unpatch(inner)
    assert not any(type(each) is PackedLinear for each in inner.modules())
    assert torch.equal(generated(inner), expected)


class Sums(nn.Module):
    """A product and others of the same input that look like adapters."""

    def __init__(self, base: nn.Module, outs: tuple[int, ...]):
        super().__init__()
        self.base = base
        torch.manual_seed(7)
        self.down = nn.ModuleList(nn.Linear(base.in_features, 3, bias=False) for _ in outs)
        self.up = nn.ModuleList(nn.Linear(3, out, bias=False) for out in outs)

    def forward(self, x):
        out = self.base(x)
        for place, (down, up) in enumerate(zip(self.down, self.up)):
            rows = x.reshape(-1, x.shape[-1]) if place % 2 else x  # which hides that the input is the same
            out = out + 0.7 * up(down(rows)).reshape(*x.shape[:-1], -1)
        return out


@pytest.mark.parametrize("outs", ((1,), (None, 1), (None, None), (None,) * 5), ids=str)
def test_sums_that_look_like_adapters(outs):
    """One number for all features, and adapters that are found one after the other."""
    model = small("llama")
    for layer in model.model.layers:
        for name in ("down_proj", "up_proj"):
            base = getattr(layer.mlp, name)
            setattr(layer.mlp, name, Sums(base, tuple(each or base.out_features for each in outs)))
    assert_alike(model.eval())
