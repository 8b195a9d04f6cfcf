"""Models with layers of quantized checkpoints, made by the description of their layouts.

They decode with the checkpoint's weights, whatever the groups and their order, also several formats in one model, and
get their bytes back.
"""

from __future__ import annotations

import copy
import logging
import re
from contextlib import nullcontext

import pytest
import torch
from models import CPU, SHORT, build, counting, hidden_files, prompt, require_native
from parity import assert_same_tokens
from quantized import packed_in
from test_checkpoints import Case, awq, compressed, gptq
from torch import nn

import hf_fastpath

SIZES = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=384)
#: projections that take one input, whose order is one
TOGETHER = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gated", "up_proj": "gated"}


def symmetric(case: Case) -> nn.Module:
    return compressed(case, symmetric=True)


#: name -> for each projection what makes it, and its Case
KINDS = {
    "gptq, 4 bits of 32": lambda name: (gptq, dict(group=32)),
    "gptq, act order": lambda name: (gptq, dict(group=128, act_order=True)),
    "gptq, act order of 8 bits of 64": lambda name: (gptq, dict(bits=8, group=64, act_order=True)),
    "awq of 64": lambda name: (awq, dict(group=64)),
    "compressed, act order of 32": lambda name: (compressed, dict(group=32, act_order=True)),
    "compressed, rows of 8 bits": lambda name: (compressed, dict(bits=8, group=-1)),
    # queries and values in other formats than keys, and some with an order of their own
    "mixture": lambda name: {
        "q_proj": (gptq, dict(group=32, act_order=True)),
        "k_proj": (symmetric, dict(group=32, symmetric=True)),
        "v_proj": (gptq, dict(bits=8)),
        "up_proj": (gptq, dict(group=64, act_order="own")),
        "down_proj": (awq, dict()),
    }.get(name, (gptq, dict(group=128, act_order=True))),
}


def with_layers(stock: nn.Module, kind: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Return a model with a checkpoint's layers, and one with the weights that they stand for."""
    model, same = copy.deepcopy(stock), copy.deepcopy(stock)
    places: dict[str, torch.Tensor] = {}
    for name, linear in list(model.named_modules()):
        if not name.endswith("_proj"):
            continue
        parent, _, attribute = name.rpartition(".")
        make, how = KINDS[kind](attribute)
        act_order = how.get("act_order")
        how = {key: value for key, value in how.items() if key != "act_order"}
        case = Case(rows=linear.out_features, columns=linear.in_features, dtype=dtype, **how)
        if act_order:
            case.shuffled()
            if act_order != "own":
                case.places = places.setdefault(f"{parent}.{TOGETHER.get(attribute, attribute)}", case.places)
            case.weight = case.stands_for()
        layer = make(case)
        layer.bias = linear.bias
        setattr(model.get_submodule(parent), attribute, layer)
        same.get_submodule(name).weight = nn.Parameter(case.weight.to(linear.weight.dtype), requires_grad=False)
    return model, same


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("how", ("file", "recorded"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_decodes_fast_and_comes_back(kind, how, tmp_path):
    require_native(CPU)
    torch.manual_seed(1)
    model, same = with_layers(build("llama", attention_bias=True, **SIZES), kind, torch.float16)
    before, ids = tensors_of(model), prompt(CPU)
    with hidden_files() if how == "recorded" else nullcontext():
        hf_fastpath.patch(model, quiet=True)
        for name, layer in packed_in(model).items():
            assert torch.equal(layer.packed.dequantize(), same.get_submodule(name).weight), name
        copied = copy.deepcopy(model)
        expected = same.generate(ids, **SHORT)
        for each in (model, copied):
            with counting(each) as counts:
                assert_same_tokens(each.generate(ids, **SHORT), expected, same)
            assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    hf_fastpath.save_packed(model, tmp_path)
    loaded = hf_fastpath.load_packed(tmp_path, quiet=True)
    assert torch.equal(loaded.generate(ids, **SHORT), model.generate(ids, **SHORT))
    long = torch.randint(0, 100, (2, 70))
    torch.testing.assert_close(model(long).logits, same(long).logits, rtol=1e-4, atol=1e-4)
    originals = [each.original for each in vars(model)["_hf_fastpath"].ledger.replaced]
    large = [each for each in originals for each in (*each.parameters(), *each.buffers()) if each.dim() == 2]
    assert len(originals) == 14 and not any(each.numel() for each in large)  # nothing is kept twice
    for each in (model, copied):
        hf_fastpath.unpatch(each)
        after = tensors_of(each)
        assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_products_of_one_input_gather_it_once():
    """Queries, keys and values are one product behind one gather, and so are gate and up."""
    require_native(CPU)
    model, _ = with_layers(build("llama", **SIZES), "gptq, act order", torch.float16)
    hf_fastpath.patch(model, quiet=True)
    layers = list(packed_in(model).values())
    assert len({id(layer.order) for layer in layers}) == 2 * 4 and len(layers) == 2 * 7
    model.generate(prompt(CPU), **SHORT)
    assert hf_fastpath.report(model).torch_calls["aten.index_select"] == 2 * 4


def test_what_was_repacked_is_announced_with_memory_and_time(caplog):
    require_native(CPU)
    model, _ = with_layers(build("llama", **SIZES), "mixture", torch.float16)
    logs = logging.getLogger("hf_fastpath")
    logs.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger="hf_fastpath"):  # whatever other tests have asked for
            hf_fastpath.patch(model)
    finally:
        logs.removeHandler(caplog.handler)
    (said,) = [each.getMessage() for each in caplog.records if "repacked" in each.getMessage()]
    size = sum(tensor.nbytes for layer in packed_in(model).values() for tensor in layer.packed.tensors)
    assert re.search(rf"repacked in [\d.]+ s: 6 as int4, .*2 as int8_g32_zeros.*; {size / 1e9:.2f} GB, ", said), said


@pytest.mark.parametrize("kind", ("gptq, act order", "awq of 64"))
def test_lora_over_a_checkpoint(kind):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    require_native(CPU)
    torch.manual_seed(1)
    stock = build("llama", **SIZES)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(copy.deepcopy(stock), config).eval()
    _, same = with_layers(stock, kind, torch.float16)
    torch.manual_seed(1)
    model, same = with_layers(stock, kind, torch.float16)
    with_base = {}
    for whole, layers in ((theirs, model), (copy.deepcopy(theirs), same)):
        for name, layer in layers.named_modules():
            if name.endswith("_proj"):
                parent, _, attribute = name.rpartition(".")
                inside = whole.base_model.model.get_submodule(name)
                if hasattr(inside, "base_layer"):
                    inside._modules["base_layer"] = layer
                else:
                    setattr(whole.base_model.model.get_submodule(parent), attribute, layer)
        with_base[layers is same] = whole
    ids = prompt(CPU)
    hf_fastpath.patch(with_base[False], quiet=True)
    assert len(packed_in(with_base[False])) == 14
    with counting(with_base[False]) as counts:
        found = with_base[False].generate(ids, **SHORT)
    assert counts.fast == SHORT["max_new_tokens"] and not counts.reasons
    assert_same_tokens(found, with_base[True].generate(ids, **SHORT), with_base[True])


def test_an_order_that_is_none_is_refused(tmp_path):
    require_native(CPU)
    model, _ = with_layers(build("llama", **SIZES), "gptq, act order", torch.float16)
    hf_fastpath.patch(model, quiet=True)
    order = next(iter(packed_in(model).values())).order
    order[0] = order[1]
    hf_fastpath.save_packed(model, tmp_path)
    with pytest.raises(ValueError, match="order is no permutation of 256 inputs"):
        hf_fastpath.load_packed(tmp_path, quiet=True)
