"""Models that are not covered in full, what the options choose, and wrong arguments."""

from __future__ import annotations

import copy

import encoder_decoder_types
import pytest
import torch
from models import CPU, assert_same_instances, build, instances, prompt, require_native
from parity import assert_equal_generation
from said import lines, logged
from torch import nn
from transformers import BertConfig, BertModel

import hf_fastpath
from hf_fastpath import UnsupportedModelError


def _bert():
    sizes = dict(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=64, vocab_size=99)
    return BertModel(BertConfig(**sizes))


def _switch():
    """An encoder-decoder with experts that are modules, one of which each token needs."""
    return encoder_decoder_types.small_model("switch_transformers", num_sparse_decoder_layers=1)


def _of_its_own():
    """Make a subclass with layers of its own."""
    model = build("llama")
    of_its_own = {type(module) for module in model.modules() if type(module).__module__ == type(model).__module__}
    renamed = {cls: type(f"My{cls.__name__}", (cls,), {}) for cls in of_its_own}
    for module in model.modules():
        module.__class__ = renamed.get(type(module), type(module))
    return model


def _other_forwards():
    require_native(CPU)
    model = build("llama")
    for layer in model.model.layers:  # a package that replaces the layers' forwards does this
        for module in (layer, layer.mlp, layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm):
            module.forward = lambda *args, **kwargs: None
    model.model.norm.forward = lambda x: x
    return model


#: model that cannot be patched -> what the error's first line says, and one thing that the rest says
UNSUPPORTED = {
    "encoder": (_bert, "BertModel (bert) is an encoder", "hf_fastpath info"),
    "encoder-decoder": (
        _switch,
        "SwitchTransformersForConditionalGeneration (switch_transformers): not_recorded",
        "it belongs to the model",
    ),
    "module": (lambda: nn.Linear(4, 4), "Linear is no transformers model", "hf_fastpath info"),
    "other forwards": (
        _other_forwards,
        "instance_forward in this LlamaForCausalLM, model.layers.0",
        "del module.forward",
    ),
}


@pytest.mark.parametrize(("make", "first", "rest"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_model_raises_and_says_what_it_is(make, first, rest):
    """The first line has the one cause, what helps follows; the error is short enough to be read."""
    model = make()
    before = instances(model)
    with pytest.raises(UnsupportedModelError) as caught:
        hf_fastpath.patch(model, quiet=True)
    lines = str(caught.value).splitlines()
    assert first in lines[0] and len(lines[0]) < 200, lines[0]
    assert rest in "\n".join(lines[1:]) and len(str(caught.value)) < 600, str(caught.value)
    assert_same_instances(instances(model), before)


def test_partial_coverage_warns():
    require_native(CPU)
    model = build("gpt2", n_embd=84, n_head=4)  # an odd head_dim
    with logged("unsupported_head_dim.*What helps: unsupported_head_dim: nothing to set"):
        hf_fastpath.patch(model, quiet=True)
    report = hf_fastpath.report(model)
    assert (
        report.loop == "partial_patch"
        and report.patched == {"mlp": 2}
        and any("attention" in d for d in report.declined)
    )
    assert_equal_generation(model, hf_fastpath.unpatch(copy.deepcopy(model)), fast=False)
    with pytest.raises(UnsupportedModelError, match="strict=True"):
        hf_fastpath.patch(hf_fastpath.unpatch(model), strict=True, quiet=True)


def test_base_model_and_classifier_get_their_modules_patched(device):
    """A model without generate() is still patched, module by module."""
    from transformers import MistralForSequenceClassification, MistralModel

    require_native(device)
    config = build("mistral").config
    for cls in (MistralModel, MistralForSequenceClassification):
        stock = cls(config).to(device).eval()
        ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
        report = hf_fastpath.report(ours)
        assert report.loop == "class_not_supported" and report.patched["layer"] == 2
        with torch.no_grad():
            ids = prompt(device, 1, 20)
            for a, b in zip(ours(ids, use_cache=False).values(), stock(ids, use_cache=False).values()):
                torch.testing.assert_close(a, b)


def _with_a_method():
    model = build("llama")

    class Own(type(model)):
        def prepare_inputs_for_generation(self, input_ids, **kwargs):
            return super().prepare_inputs_for_generation(input_ids, **kwargs)

    model.__class__ = Own
    return model


@pytest.mark.parametrize("make", (_of_its_own, _with_a_method))
def test_subclass_of_a_known_class(make, device):
    """The file of the known class is no gate: the step is recorded."""
    require_native(device)
    stock = make().to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    assert hf_fastpath.report(ours).loop == "fast"
    assert_equal_generation(ours, stock, fast=True)


@pytest.mark.parametrize("ops", ("norm", ("mlp", "norm"), ("attention",), ["layer", "loop"], "loop"))
def test_ops_chooses_what_is_patched(ops, device):
    require_native(device)
    stock = build("llama").to(device)
    with lines() as said:
        ours = hf_fastpath.patch(copy.deepcopy(stock), ops=ops, quiet=True)
    assert not said, "modules that the user left out are not worth a warning"
    chosen = {ops} if isinstance(ops, str) else set(ops)
    report = hf_fastpath.report(ours)
    assert set(report.patched) == chosen - {"loop"}
    assert (report.loop == "fast") == ("loop" in chosen)
    assert_equal_generation(ours, stock, fast="loop" in chosen)


@pytest.mark.parametrize("ops", ("all", ("mlp", "loop")), ids=str)
@pytest.mark.parametrize("architecture", ("mistral", "gemma2"))
def test_window_of_one_token_is_left_to_stock(architecture, ops, device):
    """transformers' cache keeps everything there, so that single tokens see more than prompts do."""
    require_native(device)
    stock = build(architecture, sliding_window=1).to(device)
    stock.set_attn_implementation("eager")  # PyTorch's attention on CUDA refuses such masks
    ours = hf_fastpath.patch(copy.deepcopy(stock), ops=ops, quiet=True)
    assert hf_fastpath.report(ours).loop in ("partial_patch", "unsupported_config")
    assert_equal_generation(ours, stock, fast=False)
    with pytest.raises(ValueError, match="got sliding_window=1, expected 2 or more"):
        hf_fastpath.FastpathCache(stock.config)
    with pytest.raises(UnsupportedModelError, match="the decode loop: unsupported_config"):
        hf_fastpath.patch(stock, ops="loop", quiet=True)


@pytest.mark.parametrize("architecture", ("llama", "mixtral", "gpt2"))
def test_layers_in_another_order(architecture, device):
    """A layer goes on using the place of the cache that it was made with."""
    require_native(device)
    stock = build(architecture).to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    assert_equal_generation(ours, stock, fast=True)
    for model in (ours, stock):
        layers = model.transformer.h if architecture == "gpt2" else model.model.layers
        layers[0], layers[1] = layers[1], layers[0]
    for options in ({}, dict(num_beams=2)):
        assert_equal_generation(ours, stock, fast=True, **options)


def test_max_batch_size(device):
    require_native(device)
    stock = build("llama").to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), max_batch_size=1, quiet=True)
    assert_equal_generation(ours, stock, fast=False)
    assert hf_fastpath.report(ours).stats["reasons"]["batch_size"]


BAD = {
    "kv_dtype_word": (dict(kv_dtype="int99"), ValueError, "kv_dtype is 'int99', expected 'auto'"),
    "kv_dtype_type": (dict(kv_dtype=torch.float64), ValueError, "kv_dtype is torch.float64"),
    "kv_dtype_none": (dict(kv_dtype=None), ValueError, "kv_dtype is None"),
    "weights": (dict(weights="int3"), ValueError, "weights is 'int3', expected None or one of int8"),
    "lm_head": (dict(weights="int4", lm_head="int4"), ValueError, "lm_head is 'int4', expected one of fp16, int8"),
    "lm_head_alone": (dict(lm_head="int8"), ValueError, "weights= beside it"),
    "ops": (dict(ops="atention"), ValueError, "Did you mean 'attention'"),
    "ops_list": (dict(ops=["mlp", "everything"]), ValueError, "ops names 'everything'"),
    "ops_empty": (dict(ops=()), ValueError, "ops"),
    "ops_number": (dict(ops=3), (ValueError, TypeError), "ops"),
    "max_batch_size": (dict(max_batch_size=257), ValueError, "max_batch_size is 257, expected .* from 1 to 256"),
    "max_batch_size_0": (dict(max_batch_size=0), ValueError, "max_batch_size is 0"),
    "max_batch_size_text": (dict(max_batch_size="4"), ValueError, "max_batch_size is '4'"),
    "unknown": (dict(kv_type="auto"), TypeError, "kv_type"),
}


@pytest.mark.parametrize(("options", "error", "match"), BAD.values(), ids=BAD)
def test_bad_arguments_give_clear_errors(options, error, match):
    model = build("llama")
    before = instances(model)
    with pytest.raises(error, match=match):
        hf_fastpath.patch(model, quiet=True, **options)
    assert_same_instances(instances(model), before)


def test_patch_of_something_else_gives_a_clear_error():
    for thing in (None, "mistral", dict(model=1)):
        with pytest.raises(TypeError, match=f"patch\\(\\) got {type(thing).__name__}"):
            hf_fastpath.patch(thing)
    with pytest.raises(TypeError):
        hf_fastpath.patch(build("llama"), "float16")


def test_report_of_a_stock_model_gives_a_clear_error():
    with pytest.raises(ValueError, match="not patched: call hf_fastpath.patch"):
        hf_fastpath.report(build("llama"))
