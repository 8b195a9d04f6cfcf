"""Models that PEFT and packages for quantization have changed: every reason that is given is true and names the whole
class, and what it says helps does help."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from causal_lm_types import small_model
from models import SHORT, build, counting, hidden_files, prompt, require_native
from torch import nn
from transformers import AutoModelForCausalLM, Glm4Config

import hf_fastpath
from hf_fastpath.errors import UnsupportedModelError
from hf_fastpath.reasons import REASONS

CPU = torch.device("cpu")
SIZES = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=384)


@pytest.fixture(autouse=True)
def native():
    require_native(CPU)


def generated(model: nn.Module, inside: nn.Module | None = None) -> tuple[torch.Tensor, dict[str, int], str]:
    """Return tokens, the reasons that were counted, and the report."""
    inside = model if inside is None else inside
    with counting(inside) as counts:
        found = model.generate(prompt(CPU) % 160, **SHORT)
    return found, dict(counts.reasons), str(hf_fastpath.report(inside))


# ---- adapters ----------------------------------------------------------------------------------------------


def adapters() -> dict:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    names = dict(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return {
        "lora": peft.LoraConfig(r=4, init_lora_weights=False, **names),
        "dora": peft.LoraConfig(r=4, init_lora_weights=False, use_dora=True, **names),
        "ia3": peft.IA3Config(feedforward_modules=["down_proj"], init_ia3_weights=False, **names),
        "loha": peft.LoHaConfig(r=4, init_weights=False, **names),
        "oft": peft.OFTConfig(r=4, oft_block_size=0, init_weights=False, **names),
        "embeddings": peft.LoraConfig(r=4, init_lora_weights=False, **names | {"target_modules": ["embed_tokens"]}),
        "a head that is trained whole": peft.LoraConfig(r=4, modules_to_save=["lm_head"], **names),
    }


#: adapter -> the class of PEFT that is named
CLASSES = {
    "lora": "peft.tuners.lora.layer.Linear",
    "dora": "peft.tuners.lora.layer.Linear",
    "ia3": "peft.tuners.ia3.layer.Linear",
    "loha": "peft.tuners.loha.layer.Linear",
    "oft": "peft.tuners.oft.layer.Linear",
    "embeddings": "peft.tuners.lora.layer.Embedding",
    "a head that is trained whole": "peft.utils.other.ModulesToSaveWrapper",
}


def adapted(model: nn.Module, name: str) -> nn.Module:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, adapters()[name]).eval()


@pytest.mark.each_value
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("when", ("before_patch", "after_patch"))
def test_an_adapter_of_a_listed_family_has_no_reason(name, when):
    """The file does not know the adapter's layers, so that the step is recorded."""
    model = build("llama")
    if when == "after_patch":
        hf_fastpath.patch(model, quiet=True)
    wrapped = adapted(model, name)
    hf_fastpath.patch(wrapped, quiet=True)
    for change in ("train", "merge_adapter", "merge_and_unload"):
        wrapped = (getattr(wrapped, change)() or wrapped).eval()
        _, reasons, report = generated(wrapped, model)
        assert not reasons and " fast, 0 stock" in report, report
        assert hf_fastpath.report(model).loop == "fast" and not hf_fastpath.report(model).declined


def test_an_adapter_that_cannot_be_recorded_is_named_and_merging_it_for_good_helps():
    lora = pytest.importorskip("peft.tuners.lora", reason="PEFT is not installed")

    class LooksAtNumbers(lora.Linear):
        def forward(self, x):
            return super().forward(x if bool((x == x).all()) else x * 0)

    model = build("llama")
    wrapped = adapted(model, "lora")
    for module in model.modules():
        if type(module) is lora.Linear:
            module.__class__ = LooksAtNumbers
    hf_fastpath.patch(wrapped, quiet=True)
    _, reasons, report = generated(wrapped, model)
    assert set(reasons) == {"adapter"}, reasons
    assert "LooksAtNumbers" in report and "model.merge_and_unload()" in report and "merge_adapter() leaves" in report
    wrapped.merge_adapter()  # PEFT's layers stay, so that the reason does
    assert set(generated(wrapped, model)[1]) == {"adapter"}
    merged = wrapped.merge_and_unload()
    _, reasons, report = generated(merged)
    assert not reasons and hf_fastpath.report(merged).loop == "fast"


@pytest.mark.parametrize("name", ("lora", "dora", "ia3"))
def test_an_adapter_of_a_recorded_model_has_no_reason(name):
    """Its products are recorded. So are those of a family with a file, if the file is hidden."""
    glm4, llama = small_model("glm4"), build("llama")
    for model in (glm4, llama):
        with hidden_files():
            wrapped = hf_fastpath.patch(adapted(model, name), quiet=True)
        for _ in range(2):
            _, reasons, report = generated(wrapped, model)
        assert not reasons and "24 fast, 0 stock" in report
        assert "hf_fastpath on recorded: a step recorded from the model's own forward; decode loop: fast" in report
        assert not hf_fastpath.report(model).patched


# ---- quantized weights -------------------------------------------------------------------------------------


def torchao(directory: Path) -> nn.Module:
    library = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    from transformers import TorchAoConfig

    return load(directory, quantization_config=TorchAoConfig(library.Int8DynamicActivationInt8WeightConfig()))


#: what quantizes -> the model, the class that is named, and the code
QUANTIZED = {
    "torchao with activations": (torchao, "torchao.quantization.", "quantized_activations"),
}


def load(directory: Path, **options) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **options).eval()


def is_cut(text: str) -> bool:
    """Whether a line of a text ends before it has said all."""
    return re.search(r"\.\.\.[.)]?$", text, re.MULTILINE) is not None


def about_other_things(text: str) -> bool:
    """Whether a text has advice that helps no quantized model."""
    return any(each in text for each in ("merge", "one device", "torch.float16", "adapter", "remove the hooks"))


@pytest.mark.filterwarnings("ignore:hf_fastpath:UserWarning")
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_get_one_true_reason(name, tmp_path):
    """And no advice about types, adapters or devices; verify() compares what is patched."""
    make, named, code = QUANTIZED[name]
    build("llama", **SIZES).save_pretrained(tmp_path)
    model = hf_fastpath.patch(make(tmp_path), quiet=True)
    _, reasons, report = generated(model)
    assert set(reasons) == {code} and named in report and not about_other_things(report), report
    assert REASONS[code].remedy in report
    result = hf_fastpath.verify(model, prompt(CPU), max_new_tokens=4)
    assert result.ok and result.stock_loop.startswith(code)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_recorded_model_of_quantized_weights_is_refused_by_name(name, tmp_path):
    make, named, code = QUANTIZED[name]
    small_model("glm4").save_pretrained(tmp_path)
    model = make(tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"Glm4ForCausalLM \(glm4\): {code}") as caught:
        hf_fastpath.patch(model, quiet=True)
    text = str(caught.value)
    assert named in text and not is_cut(text) and not about_other_things(text)


def save_compressed(directory: Path, preset: str, model: nn.Module) -> None:
    """Let compressed-tensors write a checkpoint in one of its own schemes."""
    library = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    schemes = {"all": library.preset_name_to_scheme(preset, ["Linear"])}
    config = library.QuantizationConfig(config_groups=schemes, ignore=["lm_head"], quantization_status="frozen")
    library.apply_quantization_config(model, config)
    for module in model.modules():
        for name, value in (("input_scale", 0.05), ("input_global_scale", 100.0), ("weight_global_scale", 100.0)):
            if hasattr(module, name):
                getattr(module, name).data.fill_(value)
        if hasattr(module, "weight_scale"):
            module.weight_scale.data.fill_(1.0 if hasattr(module, "weight_global_scale") else 0.01)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(directory)


@pytest.mark.filterwarnings("ignore:hf_fastpath:UserWarning", "ignore:You passed")
@pytest.mark.parametrize("preset", ("FP8", "FP8_DYNAMIC", "W8A8", "NVFP4"))
@pytest.mark.parametrize("family", ("llama", "glm4"))
def test_compressed_tensors_in_layouts_of_its_own(family, preset, tmp_path):
    """What is advised helps, before and after a call of the model."""
    sizes = SIZES | dict(num_hidden_layers=2, vocab_size=160, pad_token_id=0, eos_token_id=None)
    glm4 = AutoModelForCausalLM.from_config(Glm4Config(**sizes))
    save_compressed(tmp_path, preset, build("llama", **SIZES) if family == "llama" else glm4)
    for is_called in (False, True):
        model, said = load(tmp_path), ""
        if is_called:
            model.generate(prompt(CPU) % 160, **SHORT)
        try:
            hf_fastpath.patch(model, quiet=True)
            _, reasons, said = generated(model)
            assert set(reasons) <= {"compressed_tensors", "partial_patch"} and reasons
        except UnsupportedModelError as error:
            said = str(error)
        assert "quantization_config=CompressedTensorsConfig(run_compressed=False)" in said
        assert "compressed_tensors." in said and not is_cut(said) and not about_other_things(said)
    from transformers import CompressedTensorsConfig

    model = load(tmp_path, quantization_config=CompressedTensorsConfig(run_compressed=False))
    assert not generated(hf_fastpath.patch(model, quiet=True))[1]


# ---- names are whole ---------------------------------------------------------------------------------------


def a_hook_whose_name_is_as_long_as_those_of_packages_that_compress_and_decompress_weights_for_every_single_call(*_):
    return None


@pytest.mark.parametrize("how", ("hook", "forward", "hook of the model"))
@pytest.mark.parametrize("family", ("llama", "glm4"))
def test_names_are_not_cut(family, how):
    model = build("llama") if family == "llama" else small_model("glm4")
    function = (
        a_hook_whose_name_is_as_long_as_those_of_packages_that_compress_and_decompress_weights_for_every_single_call
    )
    layers = model.model.layers if how != "hook of the model" else [model]
    for each in layers:
        if how == "forward":
            each.mlp.forward = each.self_attn.forward = each.forward = function
        else:
            each.register_forward_hook(function)
    said = ""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hf_fastpath.patch(model, quiet=True)
        said = "\n".join([str(hf_fastpath.report(model)), *(str(each.message) for each in caught)])
    except UnsupportedModelError as error:
        said = str(error)
    assert f"test_foreign_reasons.{function.__name__}" in said and not is_cut(said)
