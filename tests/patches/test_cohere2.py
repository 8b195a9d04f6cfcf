"""Cohere 2: the common checks, and the switches of its config."""

import pytest
from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("cohere2"))


@pytest.mark.parametrize("kind", ("sliding_attention", "full_attention"))
def test_cohere2_layers_of_one_kind(kind, device):
    assert_variant_right("cohere2", device, layer_types=[kind] * 2)


def test_cohere2_attention_bias(device):
    assert_variant_right("cohere2", device, attention_bias=True)


def test_cohere2_separate_head(device):
    assert_variant_right("cohere2", device, tie_word_embeddings=False)
