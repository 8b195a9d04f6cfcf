"""explain: what patch() would make of a model, from its config alone."""

from __future__ import annotations

import json

import pytest
import torch
from causal_lm_types import small_config, small_model
from models import VOCAB, WINDOW, assert_same_instances, build, fresh, instances, skip_if_cache_is_named_otherwise
from transformers import CONFIG_MAPPING, BertConfig, GenerationMixin, LlavaForConditionalGeneration, PreTrainedConfig

import hf_fastpath
from hf_fastpath import compat, traffic
from hf_fastpath.architecture import architectures
from hf_fastpath.check.explain import examine, explain, explain_config
from hf_fastpath.cli import main as cli

FLOAT = 4


def saved(tmp_path, architecture: str, **changes) -> str:
    build(architecture, **changes).config.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("architecture", [architecture.name for architecture in architectures()])
def test_examine_says_what_patch_does(architecture):
    stock, ours = fresh(architecture)
    before, sample = instances(stock), GenerationMixin._sample
    found, expected = examine(stock)[1], hf_fastpath.report(ours)
    assert (found.architecture, found.patched, found.declined, found.loop) == (
        expected.architecture,
        expected.patched,
        expected.declined,
        expected.loop,
    )
    assert_same_instances(instances(stock), before)
    assert GenerationMixin._sample is sample


@pytest.mark.parametrize("place", ("", "/config.json"), ids=("folder", "file"))
def test_explain_a_config(place, tmp_path):
    found = explain(saved(tmp_path, "llama") + place, bandwidth=1e9)
    parameters = list(build("llama").parameters())
    assert found.fast and found.report.patched["layer"] == 2 and found.dtype == "float32"
    assert found.parameters == sum(parameter.numel() for parameter in parameters)
    assert found.weight_bytes == FLOAT * found.parameters
    assert [(step.batch, step.context) for step in found.steps] == [(1, 1024), (1, 2048), (8, 1024), (8, 2048)]
    for step in found.steps:  # two layers with one KV head of 80; a sequence reads one row of the embedding table
        assert step.weight_bytes == found.weight_bytes - FLOAT * 112 * (VOCAB - step.batch)
        assert step.kv_bytes == step.batch * 2 * 2 * 80 * FLOAT * step.context
        assert step.tokens_per_second == pytest.approx(step.batch * 1e9 / (step.weight_bytes + step.kv_bytes))
    for part in ("LlamaForCausalLM", "patches/llama.py", "2 layer", "decode loop: fast", "tok/s at 1 GB/s"):
        assert part in str(found)


def test_explain_over_several_gpus(tmp_path):
    """A rank reads its shards; there are two sums a layer, one for the embedding where that is spread, and a gather."""
    sizes = dict(num_attention_heads=4, num_key_value_heads=2)
    folder = saved(tmp_path, "llama", **sizes)
    one, two = explain(folder, bandwidth=1e9), explain(folder, bandwidth=1e9, gpus=2)
    for alone, shared in zip(one.steps, two.steps):
        assert alone.weight_bytes / 2 < shared.weight_bytes < 0.51 * alone.weight_bytes
        assert shared.kv_bytes == alone.kv_bytes // 2 and shared.sums in (5, 6)
        assert alone.tokens_per_second < shared.tokens_per_second < 2 * alone.tokens_per_second
    assert two.fast and two.report.patched == {} and "predicted tok/s at 1 GB/s a GPU" in str(two)
    refused = explain(folder, gpus=3)
    assert not refused.fast and "do not divide over 3 GPUs" in str(refused)
    assert "has no tp_plan" in str(explain(saved(tmp_path, "gpt2"), gpus=2))
    whole_heads = saved(tmp_path, "phi3")  # all GPUs gather q, k and v, and gate and up
    one, two = explain(whole_heads), explain(whole_heads, gpus=2)
    for alone, shared in zip(one.steps, two.steps):
        assert shared.kv_bytes == alone.kv_bytes and shared.sums in (9, 10)
    assert two.fast
    small_config("deepseek_v3").save_pretrained(tmp_path / "recorded")  # all GPUs have the latents
    one, two = explain(tmp_path / "recorded"), explain(tmp_path / "recorded", gpus=2)
    assert two.fast and two.report.architecture == "recorded"
    for alone, shared in zip(one.steps, two.steps):
        assert shared.kv_bytes == alone.kv_bytes and alone.weight_bytes / 2 < shared.weight_bytes < alone.weight_bytes


def test_explain_takes_the_dtype_and_needs_no_bandwidth(tmp_path):
    found = explain(saved(tmp_path, "llama"), torch.float16)
    assert found.weight_bytes == 2 * found.parameters and found.dtype == "float16"
    assert {step.tokens_per_second for step in found.steps} == {None} and "tok/s" not in str(found)


def test_windows_bound_the_kv_bytes():
    all_windows, one_window, none = build("mistral"), build("ministral"), build("mistral", sliding_window=None)
    for context in (WINDOW - 3, 500):
        seen = min(context, WINDOW)
        assert traffic.kv_bytes(all_windows.config, context, torch.float16) == 2 * 2 * (2 * seen) * 2 * 40
        assert traffic.kv_bytes(one_window.config, context, torch.float16) == 2 * 2 * (seen + context) * 2 * 48
        assert traffic.kv_bytes(none.config, context, torch.float16) == 2 * 2 * (2 * context) * 2 * 40


def test_explain_layers_of_two_head_sizes():
    """Gemma 4: every third layer here sees all positions, with longer heads; the other two see a window."""
    config = small_config("gemma4_text")
    sizes = [compat.layer_config(config, layer).head_dim for layer in range(config.num_hidden_layers)]
    kinds = compat.layer_kinds(config)
    assert len(set(sizes)) == 2 and len({kind.window for kind in kinds}) == 2
    seen = sum(size * min(500, kind.window or 500) for size, kind in zip(sizes, kinds))
    assert traffic.kv_bytes(config, 500, torch.float16) == 2 * 2 * config.num_key_value_heads * seen


STOCK = {
    "head_dim": (dict(head_dim=514), "partial_patch", "unsupported_head_dim"),
    "rope": (dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "dynamic_rope", ""),
}


@pytest.mark.parametrize(("changes", "loop", "declined"), STOCK.values(), ids=STOCK)
def test_explain_says_what_stays_stock_and_why(changes, loop, declined, tmp_path, capsys):
    source = saved(tmp_path, "llama", **changes)
    found = explain(source)
    assert not found.fast and found.report.loop == loop and f"decode loop: stock ({loop} (" in str(found)
    assert bool(declined) == bool(found.report.declined) and declined in str(found)
    assert cli.main(["explain", source]) == 1
    assert loop in capsys.readouterr().out


def test_explain_a_model_without_an_architecture(tmp_path, capsys):
    BertConfig(num_hidden_layers=1, is_decoder=True).save_pretrained(tmp_path)
    assert cli.main(["explain", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for part in ("BertLMHeadModel", "hf_fastpath on recorded", "recorded from the model's own forward"):
        assert part in printed


RECORDED = "hf_fastpath on recorded: a step recorded from the model's own forward; decode loop: fast"
#: type of a config -> the model that is made of it, and what is said about the model
TYPES = {
    "gemma3": ("Gemma3ForConditionalGeneration", RECORDED),
    "llava": ("LlavaForConditionalGeneration", RECORDED),
    "mistral3": ("Mistral3ForConditionalGeneration", RECORDED),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", RECORDED),
    "t5": ("T5ForConditionalGeneration", RECORDED),
    "bart": ("BartForConditionalGeneration", RECORDED),
    "whisper": ("WhisperForConditionalGeneration", RECORDED),
    "blip-2": ("Blip2ForConditionalGeneration", "decode loop: fast"),
    "qwen2_audio": (
        "Qwen2AudioForConditionalGeneration",
        RECORDED,
    ),
    "vit": ("ViTModel", "generates no tokens"),
    "clip": ("CLIPModel", "generates no tokens"),
    "minicpm3": ("MiniCPM3ForCausalLM", RECORDED),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "its cache holds more than keys, values and states)"),
    "rwkv": ("RwkvForCausalLM", "aten.div_.Tensor writes into a tensor of the model"),
    "llama": ("LlamaForCausalLM", "decode loop: fast"),
}
LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "depth",
)


def two_layers(config):
    """Return ``config``, and the configs inside it, with two layers each."""
    for name in LAYERS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 2)
    if isinstance(vars(config).get("layer_types"), list):
        config.layer_types = config.layer_types[:2]
    for inner in vars(config).values():
        if isinstance(inner, PreTrainedConfig):
            two_layers(inner)
    return config


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", TYPES)
def test_explain_a_config_of_every_sort(kind):
    """Each says in words what it is, and no type of model ends in an error."""
    name, said = TYPES[kind]
    found = explain_config(two_layers(CONFIG_MAPPING[kind]()), kind, bandwidth=1e9)
    assert name in found.model and said in str(found), str(found)
    assert found.fast == ("decode loop: fast" in said)
    json.dumps(found.to_dict())


def test_cli_explain_of_images_and_text(tmp_path, capsys):
    two_layers(CONFIG_MAPPING["llava"]()).save_pretrained(tmp_path)
    assert cli.main(["explain", str(tmp_path), "--bandwidth", "50"]) == 0
    printed = capsys.readouterr().out
    assert "LlavaForConditionalGeneration" in printed and "KV read" in printed
    weights = sum(each.numel() * 4 for each in _decoder_weights(CONFIG_MAPPING["llava"]()))
    assert f"{weights / 1e9:,.4f} GB" in printed


def _decoder_weights(config):
    """Return the weights of a two-layer LLaVA that a step reads, on the meta device: a row of the embeddings, too."""
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(two_layers(config))
    row = model.get_input_embeddings().weight[:1]
    layers = model.model.language_model
    return [row, *layers.layers.parameters(), *layers.norm.parameters(), model.lm_head.weight]


def test_an_error_that_nobody_foresaw_has_a_status_of_its_own(tmp_path, monkeypatch, capsys):
    def fails(*arguments):
        raise RuntimeError("in the middle")

    monkeypatch.setattr("hf_fastpath.check.explain.examine", fails)
    assert cli.main(["explain", saved(tmp_path, "llama")]) == 3
    monkeypatch.setattr(cli, "_load_model", fails)
    assert cli.main(["verify", "anything", "--device", "cpu"]) == 3
    assert capsys.readouterr().err.count("RuntimeError: in the middle") == 2


def test_cli_explain_of_what_transformers_cannot_build(tmp_path, monkeypatch, capsys):
    """The usage error says what transformers said."""
    source = saved(tmp_path, "llama")

    def fails(config, **arguments):
        raise ImportError("this model needs the package timm")

    monkeypatch.setattr("hf_fastpath.compat.model_of_config", fails)
    with pytest.raises(SystemExit) as caught:
        cli.main(["explain", source])
    assert caught.value.code == 2
    assert "(LlamaConfig): ImportError: this model needs the package timm" in capsys.readouterr().err


def test_explain_does_not_promise_speed_for_quantized_weights(tmp_path):
    quantized = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_has_fp16_weight": True}
    found = explain(saved(tmp_path, "llama", quantization_config=quantized))
    assert not found.fast and "no exact counterpart" in str(found)


def test_cli_explain_a_model(tmp_path, capsys):
    source = saved(tmp_path, "mistral")
    assert cli.main(["explain", source, "--dtype", "bfloat16", "--bandwidth", "50", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fast"] and found["dtype"] == "bfloat16" and found["report"]["architecture"] == "mistral"
    assert found["bandwidth"] == 50e9 and found["steps"][0]["tokens_per_second"] > 0


def test_cli_explain_measures_the_bandwidth(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hf_fastpath.bandwidth.measure_read_bandwidth", lambda device: {"cpu": 12e9}[device])
    assert cli.main(["explain", saved(tmp_path, "llama"), "--bandwidth", "measure", "--device", "cpu"]) == 0
    assert "tok/s at 12 GB/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    (
        (["batchsize"], "Did you mean 'batch_size'"),
        (["no/such/folder"], "'no/such/folder' is no folder, config.json, GGUF file or model id"),
        (["autocast", "--bandwidth", "fast"], "got 'fast', expected GB/s or 'measure'"),
        (["autocast", "--bandwidth", "-1"], "got '-1', expected GB/s"),
    ),
)
def test_cli_explain_refuses(arguments, text, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as caught:
        cli.main(["explain", *arguments])
    assert caught.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "qwen3_5_text", "lfm2", "granitemoehybrid", "llama"])
def test_states_are_what_the_cache_holds_of_them(model_type):
    skip_if_cache_is_named_otherwise(model_type)
    model = hf_fastpath.patch(small_model(model_type), quiet=True)
    ids = torch.ones(2, 5, dtype=torch.long)
    cache = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)["past_key_values"]
    held = sum(each.nbytes for layer in cache.state_layers for each in layer.states)
    assert traffic.state_bytes(model, 2) == held and (held > 0) == (model_type != "llama")
