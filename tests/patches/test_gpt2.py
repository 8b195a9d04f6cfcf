"""GPT-2: the common checks, and the switches of its config."""

import pytest
from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("gpt2"))


@pytest.mark.parametrize("activation", ("gelu", "relu", "gelu_pytorch_tanh", "silu"))
def test_gpt2_activations(activation, device):
    assert_variant_right("gpt2", device, activation_function=activation)


def test_gpt2_another_activation(device):
    assert_variant_right("gpt2", device, activation_function="tanh")


def test_gpt2_scales_scores_by_layer(device):
    assert_variant_right("gpt2", device, scale_attn_by_inverse_layer_idx=True)


def test_gpt2_unscaled_scores(device):
    assert_variant_right("gpt2", device, scale_attn_weights=False)


def test_gpt2_reordered_attention(device):
    assert_variant_right("gpt2", device, reorder_and_upcast_attn=True)


def test_gpt2_untied_head(device):
    assert_variant_right("gpt2", device, tie_word_embeddings=False)


def test_gpt2_eager_attention(device):
    assert_variant_right("gpt2", device, attn_implementation="eager")
