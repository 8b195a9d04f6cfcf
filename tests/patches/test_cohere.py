"""Cohere: the common checks, and the switches of its config."""

from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("cohere"))


def test_cohere_unscaled_logits(device):
    assert_variant_right("cohere", device, logit_scale=1.0)


def test_cohere_attention_bias(device):
    assert_variant_right("cohere", device, attention_bias=True)


def test_cohere_separate_head(device):
    assert_variant_right("cohere", device, tie_word_embeddings=False)


def test_cohere_norms_of_heads(device):
    assert_variant_right("cohere", device, use_qk_norm=True)
