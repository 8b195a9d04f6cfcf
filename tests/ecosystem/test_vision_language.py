"""Vision-language models whose text part is a known architecture."""

from __future__ import annotations

import copy

import pytest
import torch
from models import GREEDY, VOCAB, build, counting, prompt, require_native
from parity import assert_same_tokens
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

import hf_fastpath
from hf_fastpath import FastpathCache
from hf_fastpath.compat import CACHE

IMAGE, PATCHES = VOCAB - 1, 4


def llava(architecture: str, device: torch.device) -> LlavaForConditionalGeneration:
    """Make a random LLaVA around the text model of ``architecture``."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, projection_dim=32)
    vision = CLIPVisionConfig(image_size=16, patch_size=8, **sizes)
    config = LlavaConfig(
        vision_config=vision,
        text_config=build(architecture).config,
        image_token_index=IMAGE,
        image_seq_length=PATCHES,
        pad_token_id=0,
    )
    return LlavaForConditionalGeneration(config).eval().to(device)


@pytest.mark.parametrize("images", (True, False))
@pytest.mark.parametrize("architecture", ("llama", "mistral"))
def test_text_part_is_patched(architecture, images, device):
    """The text layers are ours, over our cache; the loop is stock's, and says why."""
    require_native(device)
    stock = llava(architecture, device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    report = hf_fastpath.report(ours)
    assert report.patched["layer"] == 2 and report.loop == "class_not_supported" and report.architecture == architecture
    ids = prompt(device, 2, 12)
    ids[ids == IMAGE] = 5
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    if images:
        ids[:, 2 : 2 + PATCHES] = IMAGE
        inputs["pixel_values"] = torch.randn(2, 3, 16, 16, device=device)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert counts.fallback == 40 and "other_cache" not in counts.reasons and counts.reasons["class_not_supported"] == 1
    assert isinstance(found[CACHE], FastpathCache)
    assert_same_tokens(found.sequences, stock.generate(**inputs, **GREEDY))
