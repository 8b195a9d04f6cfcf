"""A model that has changed is recorded once more, and only for a call that our loops take."""

from __future__ import annotations

from typing import Any

import causal_lm_types
import encoder_decoder_types
import multimodal_types
import pytest
import torch
from in_thread import Call
from models import CPU, prompt, require_native, skip_if_cache_is_named_otherwise
from torch import nn
from transformers import PreTrainedModel

import hf_fastpath
from hf_fastpath.patching.state import state_of
from hf_fastpath.recording import step

TYPES = ("bart", "t5", "whisper", "dia", "glm4", "mamba", "llava")
_OUTPUTS = dict(return_dict_in_generate=True)
#: calls that stock code makes, whatever the model
STOCKS = {
    "beams with states": dict(num_beams=2, output_hidden_states=True) | _OUTPUTS,
    "states": dict(output_hidden_states=True) | _OUTPUTS,
    "attentions": dict(output_attentions=True) | _OUTPUTS,
    "no cache": dict(use_cache=False),
    "static cache": dict(cache_implementation="static", disable_compile=True),
}
#: and those of some models
OF_SOME = {
    "drafts": (dict(prompt_lookup_num_tokens=2), ("bart", "t5", "whisper", "llava")),
    "chunks": (dict(prefill_chunk_size=3), ("mamba",)),
}
OURS = {"greedy": {}, "beams": dict(num_beams=2), "several": dict(num_return_sequences=2, do_sample=True)}


@pytest.fixture
def recordings(monkeypatch, tmp_path) -> list:
    """The recordings that are made, as they are made; no file holds those of tests before."""
    monkeypatch.setenv("HF_FASTPATH_CACHE", str(tmp_path))
    made, record = [], step._record

    def noted(*arguments: Any) -> Any:
        made.append(arguments)
        return record(*arguments)

    monkeypatch.setattr(step, "_record", noted)
    return made


def changed(model_type: str) -> PreTrainedModel:
    """Return a patched model whose config has changed since, so that what was recorded counts no more."""
    model = patched(model_type)
    model.config.note = "changed"
    return model


def patched(model_type: str) -> PreTrainedModel:
    require_native(CPU)
    skip_if_cache_is_named_otherwise(model_type)
    kinds = {"glm4": causal_lm_types, "mamba": causal_lm_types, "llava": multimodal_types}
    model = hf_fastpath.patch(kinds.get(model_type, encoder_decoder_types).small_model(model_type), quiet=True)
    model.generation_config.eos_token_id = None
    return model


def call(model: PreTrainedModel, **options: Any) -> None:
    kind, config = model.config.model_type, model.config
    if kind == "whisper":
        given = {"input_features": torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions)}
    elif kind == "llava":
        given = multimodal_types.prompt("llava", (1,))
    else:
        given = {"input_ids": prompt(CPU, 1, 9) % 150 + 3}
    refused = kind == "dia" and ("num_beams" in options or "num_return_sequences" in options)
    refused |= kind == "mamba" and ("output_attentions" in options or "prefill_chunk_size" in options)
    if refused:
        with pytest.raises((ValueError, AttributeError)):
            model.generate(**given, max_new_tokens=4, **options)
    else:
        model.generate(**given, max_new_tokens=4, **options)


@pytest.mark.parametrize("model_type", TYPES)
def test_never_for_stock_code(model_type, recordings):
    model = patched(model_type)
    options = STOCKS | {name: options for name, (options, types) in OF_SOME.items() if model_type in types}
    for name, given in options.items():
        model.config.note = name  # what was recorded counts no more
        recordings.clear()
        for _ in range(2):
            call(model, **given)
        assert not recordings and not state_of(model).stats.fast_tokens, name  # report() would look at the model


@pytest.mark.every(2)
@pytest.mark.parametrize("model_type", TYPES)
def test_once_for_our_loops(model_type, recordings):
    model = patched(model_type)
    for name, options in OURS.items():
        model.config.note, before = name, state_of(model).stats.fast_tokens
        recordings.clear()
        for _ in range(2):  # the second one records prompts
            call(model, **options)
        assert recordings or (model_type == "dia" and options), name
        recordings.clear()
        call(model, **options)
        call(model, **STOCKS["states"])
        call(model, **options)
        assert not recordings, name
        assert state_of(model).stats.fast_tokens > before or (model_type == "dia" and options), name


class Looking(nn.Module):
    """A norm that looks at its numbers."""

    def forward(self, x):
        return x if x.sum().item() else -x


@pytest.mark.parametrize("model_type", ("bart", "glm4"))
def test_once_for_a_model_that_cannot_be_recorded(model_type, recordings):
    model = changed(model_type)
    decoder = model.get_decoder()
    if model_type == "bart":
        decoder.layers[1] = decoder.layers[0]
    else:
        decoder.norm = Looking()
    call(model)
    assert recordings
    recordings.clear()
    call(model)
    call(model, num_beams=2)
    assert not recordings and set(state_of(model).stats.reasons) == {"not_recorded"}


def test_times_of_words(recordings):
    """Whisper's own loop around ours calls it for every stretch of sound."""
    model = changed("whisper")
    config = model.generation_config
    known = dict(eos_token_id=99, pad_token_id=99, decoder_start_token_id=90, prev_sot_token_id=91)
    known |= dict(no_timestamps_token_id=100, is_multilingual=False, max_length=20, return_timestamps=False)
    known |= dict(max_initial_timestamp_index=20, alignment_heads=[[0, 0], [1, 1]])
    for name, value in known.items():
        setattr(config, name, value)
    model.config.eos_token_id = model.config.pad_token_id = 99
    sound = torch.randn(1, model.config.num_mel_bins, 5 * model.config.max_source_positions)
    mask = torch.ones(1, sound.shape[-1], dtype=torch.long)
    recordings.clear()
    model.generate(sound, attention_mask=mask, return_timestamps=True, return_token_timestamps=True)
    stats = state_of(model).stats
    assert not recordings and stats.fallback_tokens and set(stats.reasons) == {"attention_outputs"}


def test_threads_that_ask_at_once_have_the_same_recording(recordings):
    """A plan asks for its recording more than once, and would mix up two of the same step."""
    model = patched("mamba")
    part = state_of(model).plans.part_of(model)
    recordings.clear()
    calls = [Call(part.recording, 3, 1) for _ in range(4)]
    assert len({id(call.result()) for call in calls}) == 1 and len(recordings) == 1
