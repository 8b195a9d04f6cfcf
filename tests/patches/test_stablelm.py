"""StableLM: the common checks, and the switches of its config."""

from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("stablelm"))


def test_stablelm_whole_heads_turn(device):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    assert_variant_right("stablelm", device, rope_parameters=rope)


def test_stablelm_qkv_bias(device):
    assert_variant_right("stablelm", device, use_qkv_bias=True)


def test_stablelm_norms_of_heads(device):
    assert_variant_right("stablelm", device, qk_layernorm=True)


def test_stablelm_mlp_beside_attention(device):
    assert_variant_right("stablelm", device, use_parallel_residual=True)
