"""Small twins of models with the sizes that their types have by default: checkpoints have such sizes, the small models
of other tests do not."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
import transformers
from models import CPU, require_native
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from hf_fastpath import compat
from hf_fastpath.options import Options
from hf_fastpath.patching import analyse, passed_twins, selftest

DATA = Path(__file__).resolve().parents[2] / "docs" / "data"
#: table of types -> transformers' lists of their classes
LISTS = {
    "recorded_types": ("CAUSAL_LM",),
    "encoder_decoder_types": ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
    "multimodal_types": ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
}
#: of these every run tries a twin: each has sizes, groups or lists that have to go with others
SOME = {
    "recorded_types": "axk1 codegen deepseek_v3 gptj plbart whisper zamba2".split(),
    "encoder_decoder_types": "led t5gemma t5gemma2".split(),
    "multimodal_types": "ernie4_5_vl_moe qwen2_5_vl".split(),
}
#: types whose default is no model that anybody has, and why
UNLIKE = {
    **dict.fromkeys(("bamba", "granitemoehybrid"), "no layer with attention"),
    "deepseek_v2": "no number of groups",
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glmga"), "sections of half a head, all of which is rotated"),
    **dict.fromkeys(
        ("qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), "no token in front of an image"
    ),
    "step3p7": "no window",
    "switch_transformers": "experts that are modules, in half of its layers",
}


def recorded(table):
    with (DATA / f"{table}.csv").open() as file:
        return [row["model_type"] for row in csv.DictReader(file) if row["how"] == "recorded"]


def model_of(table, model_type):
    """A model without data; the test is skipped if there is none of the default config."""
    lists = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}) for name in LISTS[table]]
    name = next((each[model_type] for each in lists if model_type in each), None)
    if name is None:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    try:
        config = CONFIG_MAPPING[model_type]()
        if table == "recorded_types" and hasattr(config, "is_decoder"):
            config.is_decoder = True
        with torch.device("meta"):
            return getattr(transformers, name if isinstance(name, str) else name[0])(config)
    except Exception as error:  # whatever a class makes of a config that lacks something
        pytest.skip(f"the default config makes no model: {type(error).__name__}: {error}")


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
        pytest.skip(f"its default has {UNLIKE[model_type]}")
    twins = []
    monkeypatch.setattr(passed_twins, "find", lambda key: None)
    monkeypatch.setattr(passed_twins, "keep", lambda key, difference, twin: twins.append(twin))
    model = compat.generating_model(model_of(table, model_type))
    plan = analyse.analyse(model, Options.parse())
    found, _ = selftest.run(model, plan.recorded)
    assert found is None, plan.loop_reason
    of_model, of_twin = ({type(each) for each in compat.text_decoder(each).modules()} for each in (model, *twins))
    assert not of_model - of_twin
