"""Texts of which a position has several tokens (Dia's codebooks): transformers' loop chooses, a plan runs its steps."""

from __future__ import annotations

import copy

import encoder_decoder_types
import pytest
import torch
from conftest import needs_cuda
from models import CPU, counting, require_native
from parity import assert_same_tokens
from quantized import packed_in, with_dequantized
from torch import nn
from transformers import LogitsProcessor

import hf_fastpath
from hf_fastpath.patching.state import state_of

FEW = dict(max_new_tokens=12, do_sample=False)
CHANNELS = 3


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def models(request) -> tuple[nn.Module, nn.Module]:
    """A small random Dia, and a patched copy of it."""
    device = torch.device(request.param)
    require_native(device)
    stock = encoder_decoder_types.small_model("dia").to(device)
    return stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True)


def of(model: nn.Module, *sizes: int, **others: int) -> dict[str, torch.Tensor]:
    return {name: each.to(model.device) for name, each in encoder_decoder_types.text(*sizes, **others).items()}


def beginning(model: nn.Module, batch: int, padding: int = 0) -> dict[str, torch.Tensor]:
    """Return what the text begins with, [batch, seq_len, channels], and its mask."""
    ids = encoder_decoder_types.start(batch, 5, channels=(CHANNELS,))
    mask = torch.ones(batch, 5, dtype=torch.long)
    mask[0, :padding] = 0
    given = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    return {name: each.to(model.device) for name, each in given.items()}


@pytest.mark.parametrize("guidance", (None, 3.0), ids=("plain", "guided"))
@pytest.mark.parametrize(("batch", "length", "padding"), [(1, 9, 0), (3, 14, 5)])
def test_tokens_are_stocks_and_of_our_loop(models, batch, length, padding, guidance):
    stock, ours = models
    inputs = of(stock, batch, length, padding)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **FEW, guidance_scale=guidance)
    assert found.shape == (batch, 13, CHANNELS)
    assert counts.fast == 12 * batch * CHANNELS and not counts.fallback and not counts.reasons
    assert_same_tokens(found, stock.generate(**inputs, **FEW, guidance_scale=guidance))


@pytest.mark.parametrize("padding", (0, 2))
@pytest.mark.parametrize("guidance", (None, 2.0), ids=("plain", "guided"))
def test_a_beginning_and_its_padding(models, guidance, padding):
    stock, ours = models
    inputs = of(stock, 2, 9) | beginning(stock, 2, padding)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **FEW, guidance_scale=guidance)
    assert counts.fast and not counts.fallback and not counts.reasons
    assert_same_tokens(found, stock.generate(**inputs, **FEW, guidance_scale=guidance))


def test_every_channel_and_what_is_read_matter(models):
    """Else equal tokens would say nothing of them."""
    stock, ours = models
    given = of(stock, 1, 9) | beginning(stock, 1)
    first = ours.generate(**given, **FEW)[:, 5:]
    for channel in range(CHANNELS):
        other = given | {"decoder_input_ids": given["decoder_input_ids"].clone()}
        other["decoder_input_ids"][:, :, channel] += 1
        assert not torch.equal(first, ours.generate(**other, **FEW)[:, 5:]), channel
    assert not torch.equal(first, ours.generate(**given | of(stock, 1, 9, seed=1), **FEW)[:, 5:])


def test_one_plan_serves_texts_of_any_length(models):
    stock, ours = models
    ours.generate(**of(stock, 1, 9), **FEW)
    plans = list(state_of(ours).plans)
    for length in (3, 40, 9):
        inputs = of(stock, 1, length, seed=length)
        assert_same_tokens(ours.generate(**inputs, **FEW), stock.generate(**inputs, **FEW))
    assert list(state_of(ours).plans) == plans


class _Own(LogitsProcessor):
    """A user's own code, behind which the model is looked at again."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 0.01 * (torch.arange(scores.shape[-1], device=scores.device) % 7)


def test_samples_and_results(models):
    stock, ours = models
    inputs, results = of(stock, 2, 9, 3), []
    for model in (ours, stock):
        torch.manual_seed(0)
        with counting(ours) as counts:
            options = dict(do_sample=True, top_k=20, guidance_scale=2.0, temperature=1.3, logits_processor=[_Own()])
            options |= dict(return_dict_in_generate=True, output_scores=True)
            results.append(model.generate(**inputs, **FEW | options))
        if model is ours:
            assert counts.fast and not counts.fallback and set(counts.reasons) <= {"custom_logits_processor"}
    found, expected = results
    assert_same_tokens(found.sequences, expected.sequences)
    assert len(found.scores) == len(expected.scores) == 12


def test_the_decoder_is_quantized(models):
    stock, _ = models
    ours = hf_fastpath.patch(copy.deepcopy(stock), weights="int8", lm_head="int8", quiet=True)
    assert "logits_dense" in packed_in(ours) and "model.decoder.layers.0.mlp.down_proj" in packed_in(ours)
    inputs = of(stock, 2, 9)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **FEW)
    assert counts.fast and not counts.reasons
    assert_same_tokens(found, with_dequantized(stock, ours).generate(**inputs, **FEW))


def test_what_is_left_to_stock():
    require_native(CPU)
    stock = encoder_decoder_types.small_model("dia")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    inputs = of(stock, 1, 9)
    for options, code in ((dict(use_cache=False), "no_cache"), (dict(output_attentions=True), "attention_outputs")):
        options |= dict(return_dict_in_generate=True)
        with counting(ours) as counts:
            found = ours.generate(**inputs, **FEW | options)
        assert counts.reasons == {code: 1} and not counts.fast, code
        assert_same_tokens(found.sequences, stock.generate(**inputs, **FEW | options).sequences)
    with pytest.raises(ValueError, match="generates 3 tokens at a position"):
        hf_fastpath.verify(ours, inputs["input_ids"])
