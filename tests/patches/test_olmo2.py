"""OLMo 2: the common checks, and the switches of its config."""

from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("olmo2"))


def test_olmo2_attention_bias(device):
    assert_variant_right("olmo2", device, attention_bias=True)


def test_olmo2_multi_head(device):
    assert_variant_right("olmo2", device, num_key_value_heads=4)


def test_olmo2_tied_head(device):
    assert_variant_right("olmo2", device, tie_word_embeddings=True)
