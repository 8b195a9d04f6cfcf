"""OLMo 3: the common checks, and the switches of its config."""

import pytest
from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("olmo3"))


@pytest.mark.parametrize("kind", ("sliding_attention", "full_attention"))
def test_olmo3_layers_of_one_kind(kind, device):
    assert_variant_right("olmo3", device, layer_types=[kind] * 2)


def test_olmo3_scaled_rope_in_full_layers(device):
    full = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": full}
    assert_variant_right("olmo3", device, rope_parameters=rope)


def test_olmo3_grouped_queries(device):
    assert_variant_right("olmo3", device, num_key_value_heads=1)


def test_olmo3_attention_bias(device):
    assert_variant_right("olmo3", device, attention_bias=True)
