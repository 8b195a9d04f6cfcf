"""Recorded models on several devices. On the CPU, layers claim to be elsewhere: calls are split, copies are made."""

from __future__ import annotations

import copy
import re

import causal_lm_types
import pytest
import torch
from models import CPU, SHORT, counting, require_native
from parity import assert_same_tokens, both
from recorded_types import TABLES, over_types, pair_or_skip

import hf_fastpath
from hf_fastpath.decode.calls.named_calls import tensors_in
from hf_fastpath.decode.placed.stages import Stages
from hf_fastpath.patching.state import state_of
from hf_fastpath.recording import placed_model
from hf_fastpath.recording.placed_model import PlacedModel

#: gated attention behind fused norms, states, latents and experts, keys and values that layers share, biases of scores,
#: a layer that is called twice, positions that are learned
_USUAL = ("glm4", "qwen3_5_text", "deepseek_v3", "gemma3n_text", "mpt", "zamba2", "gpt_bigcode")
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks)\.(\d+)\.")
#: of models around a decoder: biases that the first layer has for all, learned positions, sound, images
_AROUND = (
    *(("encoder_decoder_types.csv", each) for each in ("t5", "bart", "whisper", "fsmt")),
    ("multimodal_types.csv", "gemma3"),
)


def claimed(part: PlacedModel, tensor: torch.Tensor) -> torch.device:
    """Return a device of its own for the tensors of each layer, behind that of all others."""
    names = vars(part).setdefault("names", {id(each): name for name, each in _named(part.module)})
    layer = _LAYER.search(names.get(id(tensor), ""))
    return CPU if layer is None else torch.device("cpu", 1 + int(layer.group(1)))


def _named(model):
    yield from model.named_parameters()
    yield from model.named_buffers()


@pytest.fixture
def apart(monkeypatch):
    """Let every layer of recorded models claim a device of its own."""
    require_native(CPU)
    monkeypatch.setattr(placed_model, "is_placed", lambda model: True)
    monkeypatch.setattr(PlacedModel, "device_of", claimed)
    monkeypatch.setattr(placed_model, "_COPIED_BYTES", 1024)


def padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[0, :4] = mask[2, :7] = 0
    return dict(input_ids=causal_lm_types.prompt(3, 11, seed=3), attention_mask=mask)


def patched(model_type: str):
    """Return a small model, stock and patched; skip the test if its step is not recorded."""
    stock, ours = pair_or_skip(model_type)
    if hf_fastpath.report(ours).architecture != "recorded":
        pytest.skip(f"{model_type} has an architecture file")
    return stock, ours


def assert_placed(model) -> None:
    """Assert that every call reads the model's tensors where they claim to be."""
    plans = list(state_of(model).plans)
    assert plans
    for plan in plans:
        assert isinstance(plan.program, Stages)
        part = state_of(model).plans.part_of(model)
        for stage in plan.program._stages:
            for call in stage.program.calls:
                for tensor in tensors_in(call.arguments):
                    if tensor.untyped_storage()._cdata in part._weights:
                        assert part.read_at(tensor) == stage.device, call


@pytest.mark.every(2)
@over_types(_USUAL)
def test_a_step_moves_from_device_to_device(apart, model_type):
    stock, ours = patched(model_type)
    cases = (dict(input_ids=causal_lm_types.prompt(1, 11, seed=1)), SHORT), (padded(), SHORT)
    cases += ((dict(input_ids=causal_lm_types.prompt(2, 11, seed=2)), SHORT | dict(do_sample=True, top_k=20)),)
    for inputs, options in cases:
        with counting(ours) as counts:
            found, expected = both(stock, ours, **inputs, **options)
        assert_same_tokens(found, expected, stock, inputs.get("attention_mask"))
        if "attention_mask" not in inputs or not counts.reasons:
            assert counts.fast and not counts.reasons, counts.reasons
    assert_placed(ours)


@pytest.mark.parametrize("model_type", ("glm4", "deepseek_v3", "mpt"))
def test_drafts(apart, model_type):
    stock, ours = patched(model_type)
    ids = causal_lm_types.prompt(1, 9, seed=1).repeat(1, 4)
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=ids, **SHORT, prompt_lookup_num_tokens=3)
    assert_same_tokens(found, expected, stock)
    assert counts.fast == 12 and not counts.reasons, counts.reasons
    assert_placed(ours)


@pytest.mark.parametrize("model_type", ("glm4", "deepseek_v3"))
def test_quantized_weights(apart, model_type):
    stock = causal_lm_types.small_model(model_type)
    ours, alone = copy.deepcopy(stock), copy.deepcopy(stock)
    hf_fastpath.patch(ours, weights="int8", lm_head="int8", quiet=True)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(placed_model, "is_placed", lambda model: False)
        hf_fastpath.patch(alone, weights="int8", lm_head="int8", quiet=True)
        wanted = alone.generate(causal_lm_types.prompt(2, 11, seed=2), **SHORT)
    with counting(ours) as counts:
        found = ours.generate(causal_lm_types.prompt(2, 11, seed=2), **SHORT)
    assert torch.equal(found, wanted)
    assert counts.fast == 24 and not counts.reasons, counts.reasons
    assert_placed(ours)
    hf_fastpath.unpatch(ours)
    assert_same_tokens(*both(stock, ours, input_ids=causal_lm_types.prompt(1, 11, seed=1), **SHORT), stock)


@pytest.mark.parametrize(
    ("table", "model_type"),
    [
        pytest.param(table, each, marks=() if (table, each) in _AROUND else pytest.mark.full)
        for table in ("encoder_decoder_types.csv", "multimodal_types.csv")
        for each in TABLES[table][0]
    ],
)
def test_models_around_a_decoder(apart, table, model_type):
    found = TABLES[table][1](model_type)
    if found.how == "stock":
        assert (table, model_type) not in _AROUND and found.reason
    else:
        assert found.tokens == "equal", found
