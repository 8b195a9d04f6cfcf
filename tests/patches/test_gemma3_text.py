"""Gemma 3: the common checks, and the switches of its config."""

import pytest
from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("gemma3_text"))


@pytest.mark.parametrize("kind", ("sliding_attention", "full_attention"))
def test_gemma3_text_layers_of_one_kind(kind, device):
    assert_variant_right("gemma3_text", device, layer_types=[kind] * 2)


def test_gemma3_text_scaled_rope_in_full_layers(device):
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    }
    assert_variant_right("gemma3_text", device, rope_parameters=rope)


def test_gemma3_text_dynamic_rope_runs_stock(device):
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    }
    assert_variant_right("gemma3_text", device, fast=False, reason="dynamic_rope", rope_parameters=rope)


def test_gemma3_text_soft_capped_logits(device):
    assert_variant_right("gemma3_text", device, final_logit_softcapping=0.7)


def test_gemma3_text_soft_capped_scores(device):
    assert_variant_right("gemma3_text", device, attn_logit_softcapping=20.0)
