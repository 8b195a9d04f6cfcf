"""Small twins of models with the sizes that their types have by default, or are published with: checkpoints have such
sizes, the small models of other tests do not. And twins of these small models, which other tests take for passed."""

from __future__ import annotations

import csv
import functools
from pathlib import Path

import causal_lm_types
import encoder_decoder_types
import multimodal_types
import pytest
import torch
import transformers
from models import CPU, require_native, skip_if_cache_is_named_otherwise
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from hf_fastpath import compat
from hf_fastpath.options import Options
from hf_fastpath.patching import analyse, passed_twins, selftest
from hf_fastpath.recording import prompts

DATA = Path(__file__).resolve().parents[2] / "docs" / "data"
#: table of types -> transformers' lists of their classes
LISTS = {
    "recorded_types": ("CAUSAL_LM",),
    "encoder_decoder_types": ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
    "multimodal_types": ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
}
#: of these every run tries a twin: each has sizes, groups or lists that have to go with others
SOME = {
    "recorded_types": "axk1 codegen deepseek_v2 deepseek_v3 gptj plbart whisper zamba2".split(),
    "encoder_decoder_types": "led t5gemma t5gemma2".split(),
    "multimodal_types": "ernie4_5_vl_moe glm4v qwen2_5_vl".split(),
}
_TURNED = dict(rope_type="default", rope_theta=1e4)
_HALF_TURNED = _TURNED | dict(partial_rotary_factor=0.5, mrope_section=[8, 12, 12])
#: what published configs say where the default makes no model, or one that nobody has
PUBLISHED = {
    "bamba": dict(attn_layer_indices=[9, 18, 27]),
    "deepseek_v2": dict(
        **dict(n_routed_experts=160, num_experts_per_tok=6, first_k_dense_replace=1),
        **dict(n_group=8, topk_group=3, topk_method="group_limited_greedy"),
    ),
    "dots1": dict(
        **dict(n_routed_experts=128, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408),
        **dict(first_k_dense_replace=3, head_dim=128),
    ),
    **dict.fromkeys(
        ("glm4v", "glm4v_moe", "glm46v", "glmga"), dict(text_config=dict(head_dim=128, rope_parameters=_HALF_TURNED))
    ),
    "granitemoehybrid": dict(layer_types=(["mamba"] * 5 + ["attention"]) * 4, num_hidden_layers=24),
    "hunyuan_v1_dense": dict(head_dim=128),
    "hunyuan_vl": dict(text_config=dict(head_dim=128, rope_parameters=_TURNED | dict(mrope_section=[16] * 4))),
    "hunyuan_v1_moe": dict(head_dim=128, num_experts=64, moe_topk=8),
    "lfm2_moe": dict(layer_types=(["conv"] * 2 + ["full_attention"]) * 8, num_hidden_layers=24),
    "ministral": dict(head_dim=128),
    "nemotron": dict(num_key_value_heads=8),
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), dict(vision_start_token_id=151652)),
    "step3p7": dict(text_config=dict(sliding_window=512)),
}
#: types of which no twin is tried here, and why
UNLIKE = {
    "qwen2_5_omni": "the thinker inside is tried by itself",
    "switch_transformers": "half of its layers have experts that are modules",
}


@functools.cache
def recorded(table):
    """Types that are recorded, with the version of transformers for which the table says so."""
    with (DATA / f"{table}.csv").open() as file:
        return {row["model_type"]: row["transformers"] for row in csv.DictReader(file) if row["how"] == "recorded"}


def model_of(table, model_type):
    """A model without data; the test is skipped if the default config makes none."""
    lists = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}) for name in LISTS[table]]
    name = next((each[model_type] for each in lists if model_type in each), None)
    if name is None:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    try:
        config = CONFIG_MAPPING[model_type](**PUBLISHED.get(model_type, {}))
        if table == "recorded_types" and hasattr(config, "is_decoder"):
            config.is_decoder = True
        with torch.device("meta"):
            return getattr(transformers, name if isinstance(name, str) else name[0])(config)
    except Exception as error:  # whatever a class makes of a config that lacks something
        pytest.skip(f"the default config makes no model: {type(error).__name__}: {error}")


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("table", "model_type"),
    [
        pytest.param(table, each, marks=() if each in SOME[table] else pytest.mark.full)
        for table in LISTS
        for each in recorded(table)
    ],
)
def test_twins_of_default_sizes(table, model_type, monkeypatch):
    """A twin decodes as stock does, and lacks no kind of module that the model's decoder has."""
    require_native(CPU)
    if model_type in UNLIKE:
        pytest.skip(UNLIKE[model_type])
    twins = []
    monkeypatch.setattr(passed_twins, "find", lambda key: None)
    monkeypatch.setattr(passed_twins, "keep", lambda key, difference, twin: twins.append(twin))
    model = compat.generating_model(model_of(table, model_type))
    plan = analyse.analyse(model, Options.parse())
    if plan.loop_reason is not None and transformers.__version__ != recorded(table)[model_type]:
        pytest.skip(f"{plan.loop_reason} on transformers {transformers.__version__}")
    found, _ = selftest.run(model, plan.recorded)
    assert found is None, plan.loop_reason
    of_model, of_twin = ({type(each) for each in compat.text_decoder(each).modules()} for each in (model, *twins))
    assert not of_model - of_twin


#: types of the small models that tests patch, each unlike the others in what its twin needs
SMALL = {
    causal_lm_types: "aria_text bert codegen ctrl cwm deepseek_v3 exaone4 falcon_h1 glm4 gpt_neo granitemoe jais2 "
    "kimi_linear llama4_text mamba2 minimax_m2 mpt nemotron qwen2_moe qwen3_5_text whisper zamba2",
    encoder_decoder_types: "bart fsmt marian moonshine prophetnet t5 t5gemma2 whisper",
    multimodal_types: "gemma3 idefics3 internvl llava paligemma qwen2_5_vl qwen2_audio qwen3_5 smolvlm voxtral",
}


@pytest.mark.every(5)
@pytest.mark.parametrize(("kind", "model_type"), [(kind, each) for kind in SMALL for each in SMALL[kind].split()])
def test_twins_of_small_models(kind, model_type, monkeypatch):
    """A twin decodes as stock does, with the same logits but for rounding: tokens alone would not show an activation,
    a cap or a factor that is nearly right."""
    require_native(CPU)
    skip_if_cache_is_named_otherwise(model_type)
    monkeypatch.setattr(passed_twins, "find", lambda key: None)
    monkeypatch.setattr(passed_twins, "keep", lambda key, difference, twin: None)
    model = kind.small_model(model_type)
    plan = analyse.analyse(compat.generating_model(model), Options.parse())
    if plan.recorded is None and transformers.__version__ != recorded("recorded_types").get("glm4"):
        pytest.skip(f"{plan.loop_reason} on transformers {transformers.__version__}")
    found, of_logits = selftest.run(plan.model, plan.recorded)
    assert found is None and of_logits < 1e-5, (found, plan.loop_reason)


def test_prompts_of_a_twin_are_left_to_its_modules(monkeypatch):
    """Each model's own are proven when they are recorded, so that a twin's would only take time."""
    require_native(CPU)
    made = []
    monkeypatch.setattr(prompts, "whole_prompt", lambda *given: made.append(given))
    monkeypatch.setattr(prompts, "FIRST_RECORDED", 2)
    monkeypatch.setattr(passed_twins, "find", lambda key: None)
    model = causal_lm_types.small_model("glm4")
    plan = analyse.analyse(model, Options.parse())
    assert selftest.run(model, plan.recorded)[0] is None and not made
