"""Llama: the common checks, and the switches of its config."""

import pytest
from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("llama"))

ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", ROPE)
def test_llama_scaled_rope(kind, device):
    assert_variant_right("llama", device, rope_parameters={"rope_theta": 10000.0, **ROPE[kind]})


def test_llama_dynamic_rope_runs_stock(device):
    rope = {
        "rope_type": "dynamic",
        "factor": 2.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
    }
    changes = {"rope_parameters": rope, "max_position_embeddings": 16}
    assert_variant_right("llama", device, fast=False, reason="dynamic_rope", **changes)


def test_llama_attention_bias(device):
    assert_variant_right("llama", device, attention_bias=True)


def test_llama_mlp_bias(device):
    assert_variant_right("llama", device, mlp_bias=True)


def test_llama_tied_head(device):
    assert_variant_right("llama", device, tie_word_embeddings=True)
