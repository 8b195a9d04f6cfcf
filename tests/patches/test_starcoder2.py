"""StarCoder2: the common checks, and the switches of its config."""

from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("starcoder2"))


def test_starcoder2_without_window(device):
    assert_variant_right("starcoder2", device, sliding_window=None)


def test_starcoder2_without_bias(device):
    assert_variant_right("starcoder2", device, use_bias=False)


def test_starcoder2_erf_gelu(device):
    assert_variant_right("starcoder2", device, hidden_act="gelu")


def test_starcoder2_separate_head(device):
    assert_variant_right("starcoder2", device, tie_word_embeddings=False)
