"""Models that read images or sound around a decoder: stock code reads the prompt, our loop all tokens behind it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator

import multimodal_types
import pytest
import torch
from models import CPU, counting, require_native
from multimodal_types import MEDIA, PLACE, small_model
from parity import assert_same_tokens
from torch import nn
from transformers import TextIteratorStreamer

import hf_fastpath
from hf_fastpath import FastpathCache
from hf_fastpath.compat import CACHE, PROMPT_NOTES
from hf_fastpath.patching.state import state_of

FEW = dict(max_new_tokens=12, do_sample=False)
#: media of each prompt, padding of the last one
PROMPTS = {
    "text": ((0,), 0),
    "padded texts": ((0, 0), 2),
    "one": ((1,), 0),
    "two": ((2,), 0),
    "one and two": ((1, 2), 0),
    "padded": ((1, 1), 2),
}


@pytest.fixture(scope="module", params=MEDIA)
def models(request) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """A type, a small random model of it, and a patched copy of that."""
    require_native(CPU)
    stock = small_model(request.param)
    yield request.param, stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True)


def of(model_type: str, *media: int, padding: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    return multimodal_types.prompt(model_type, media or (1,), padding, seed)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_are_stocks_and_of_our_loop(models, prompt):
    model_type, stock, ours = models
    media, padding = PROMPTS[prompt]
    inputs = of(model_type, *media, padding=padding)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **FEW, return_dict_in_generate=True)
    assert counts.fast == 12 * len(media) and not counts.fallback and not counts.reasons
    assert isinstance(found[CACHE], FastpathCache)
    assert_same_tokens(found.sequences, stock.generate(**inputs, **FEW))


def test_what_is_seen_or_heard_matters(models):
    """Else equal tokens would say nothing of images and sound."""
    model_type, stock, ours = models
    inputs = of(model_type)
    name = next(name for name in ("pixel_values", "input_features") if name in inputs)
    other = inputs | {name: -inputs[name]}
    found, expected = (model.generate(**other, **FEW) for model in (ours, stock))
    assert_same_tokens(found, expected)
    assert not torch.equal(found, ours.generate(**inputs, **FEW))


def test_a_conversation_goes_on_with_text_and_with_another(models):
    """The cache of a turn is given to the next one, which brings text, and then one with an image or a clip."""
    model_type, stock, ours = models
    caches = {}
    for turn in range(3):
        results = {}
        for model in (stock, ours):
            inputs = of(model_type, *((2,) if turn == 2 else (1,)))
            if turn:
                before = caches[id(model)]
                tail = before.sequences[:, :-1] if turn == 1 else before.sequences
                new = of(model_type, 0, seed=turn) if turn == 1 else of(model_type, seed=turn)
                ids = torch.cat((tail, new["input_ids"]), 1)
                inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: before[CACHE]}
                marks = MEDIA[model_type].marks
                if marks is not None:
                    inputs[marks] = (ids == PLACE).long()
                if turn == 2:
                    inputs |= {name: each for name, each in new.items() if name not in inputs}
            try:
                results[id(model)] = model.generate(**inputs, **FEW, return_dict_in_generate=True)
            except (ValueError, RuntimeError, IndexError) as error:
                results[id(model)] = type(error), str(error)
        expected, found = results[id(stock)], results[id(ours)]
        if isinstance(expected, tuple):  # stock cannot read this turn, and neither can we
            assert found == expected
            return
        assert_same_tokens(found.sequences, expected.sequences)
        caches = results


def test_embeddings_of_a_prompt(models):
    model_type, stock, ours = models
    embeds = stock.get_input_embeddings()(of(model_type, 0, 0)["input_ids"]).detach()
    if "inputs_embeds" not in inspect.signature(stock.prepare_inputs_for_generation).parameters:
        for model in (ours, stock):  # transformers' own rule
            with pytest.raises(ValueError, match="doesn't have its forwarding implemented"):
                model.generate(inputs_embeds=embeds, **FEW)
        return
    with counting(ours) as counts:
        found = ours.generate(inputs_embeds=embeds, **FEW)
    assert counts.fast == 24 and not counts.reasons
    assert_same_tokens(found, stock.generate(inputs_embeds=embeds, **FEW))


def test_calls_of_one_kind_use_one_recording(models):
    """What a forward notes about a prompt (Qwen's rope_deltas) is no change of the model."""
    model_type, _, ours = models
    inputs = of(model_type)
    ours.generate(**inputs, **FEW)
    part = state_of(ours).plans.part_of(ours)
    ours.generate(**of(model_type, 2), **FEW)
    assert state_of(ours).plans.part_of(ours) is part


def test_samples_beams_and_drafts(models):
    model_type, stock, ours = models
    inputs = of(model_type)
    for options in (dict(do_sample=True, top_k=5), dict(num_beams=2), dict(prompt_lookup_num_tokens=2)):
        results = []
        for model in (ours, stock):
            torch.manual_seed(0)
            results.append(model.generate(**inputs, **FEW | options))
        assert_same_tokens(*results)


def test_all_else_of_a_patched_model(models):
    """Report, streams, verify, copies, unpatch."""
    model_type, stock, given = models
    ours = copy.deepcopy(given)
    report = hf_fastpath.report(ours)
    assert (report.architecture, report.loop, report.patched) == ("recorded", "fast", {})
    inputs = of(model_type)
    tokens: list[int] = []

    class Streamer(TextIteratorStreamer):
        def __init__(self):
            pass

        def put(self, value):
            tokens.extend(value.flatten().tolist())

        def end(self):
            pass

    found = ours.generate(**inputs, **FEW, streamer=Streamer())
    assert tokens == found[0].tolist()
    ids = multimodal_types.prompt(model_type, (0,), seed=3)["input_ids"]
    assert hf_fastpath.verify(ours, ids.repeat(1, 4), max_new_tokens=4).ok
    hf_fastpath.unpatch(ours)
    assert vars(ours).keys() - PROMPT_NOTES == vars(stock).keys() - PROMPT_NOTES
    assert_same_tokens(ours.generate(**inputs, **FEW), found)


# ---- what is left to stock code --------------------------------------------------------------------------------------


def test_axes_that_go_on_from_different_places():
    """A prompt that ends in an image: its axes do not end at one position."""
    require_native(CPU)
    stock = small_model("qwen2_vl")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    inputs = of("qwen2_vl")
    ids = inputs["input_ids"][:, :6]
    inputs |= dict(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == PLACE).long())
    positions = torch.arange(6).repeat(3, 1, 1)
    positions[1, :, -1] = 9
    with counting(ours) as counts:
        found = ours.generate(**inputs, **FEW, position_ids=positions)
    assert counts.reasons == {"position_ids": 1} and not counts.fast
    assert "axes" in hf_fastpath.report(ours).stats["details"]["position_ids"][0]
    assert_same_tokens(found, stock.generate(**inputs, **FEW, position_ids=positions))


def test_an_argument_that_every_token_reads(monkeypatch):
    """``bias`` comes to the forward with every token: a step without it would be another."""
    require_native(CPU)
    model = small_model("llava")
    inner = type(model).forward

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, bias=None, **others):
        found = inner(self, input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **others)
        if bias is not None:
            found.logits = found.logits + bias
        return found

    forward.__module__ = inner.__module__
    monkeypatch.setattr(type(model), "forward", forward)
    stock = model
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    inputs = of("llava") | dict(bias=torch.randn(multimodal_types.VOCAB) * 3)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **FEW)
    assert counts.reasons == {"unsupported_input": 1} and not counts.fast
    assert "bias is read with every token" in hf_fastpath.report(ours).stats["details"]["unsupported_input"][0]
    assert_same_tokens(found, stock.generate(**inputs, **FEW))


def test_quantized_weights_are_refused():
    require_native(CPU)
    with pytest.raises(ValueError, match="the step of this LlavaForConditionalGeneration is recorded"):
        hf_fastpath.patch(small_model("llava"), weights="int8", quiet=True)
