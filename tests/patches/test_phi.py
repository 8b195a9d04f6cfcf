"""Phi: the common checks, and the switches of its config."""

from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("phi"))


def test_phi_multi_head(device):
    assert_variant_right("phi", device, num_key_value_heads=4)


def test_phi_whole_heads_turn(device):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    assert_variant_right("phi", device, rope_parameters=rope)


def test_phi_norms_of_heads(device):
    assert_variant_right("phi", device, qk_layernorm=True)


def test_phi_tied_head(device):
    assert_variant_right("phi", device, tie_word_embeddings=True)
