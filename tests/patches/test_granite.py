"""Granite: the common checks, and the switches of its config."""

from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("granite"))


def test_granite_without_factors(device):
    ones = dict(embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0)
    assert_variant_right("granite", device, attention_multiplier=0.125, **ones)


def test_granite_biases(device):
    assert_variant_right("granite", device, attention_bias=True, mlp_bias=True)


def test_granite_tied_head(device):
    assert_variant_right("granite", device, tie_word_embeddings=True)
