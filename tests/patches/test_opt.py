"""OPT: the common checks, and the switches of its config."""

from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("opt"))


def test_opt_gelu(device):
    assert_variant_right("opt", device, activation_function="gelu")


def test_opt_without_biases(device):
    assert_variant_right("opt", device, enable_bias=False)


def test_opt_norms_without_parameters(device):
    assert_variant_right("opt", device, layer_norm_elementwise_affine=False)


def test_opt_separate_head(device):
    assert_variant_right("opt", device, tie_word_embeddings=False)


def test_opt_norms_behind_attention_and_mlp(device):
    assert_variant_right("opt", device, do_layer_norm_before=False)


def test_opt_without_final_norm(device):
    assert_variant_right("opt", device, _remove_final_layer_norm=True)


def test_opt_projected_embeddings(device):
    assert_variant_right("opt", device, word_embed_proj_dim=64)
