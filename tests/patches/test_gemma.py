"""Gemma: the common checks, and the switches of its config."""

from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("gemma"))


def test_gemma_multi_head(device):
    assert_variant_right("gemma", device, num_key_value_heads=2)


def test_gemma_erf_gelu(device):
    assert_variant_right("gemma", device, hidden_act="gelu")


def test_gemma_attention_bias(device):
    assert_variant_right("gemma", device, attention_bias=True)


def test_gemma_separate_head(device):
    assert_variant_right("gemma", device, tie_word_embeddings=False)


def test_gemma_bidirectional_attention(device):
    assert_variant_right("gemma", device, use_bidirectional_attention=True)
