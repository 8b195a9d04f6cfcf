"""SmolLM3: the common checks, and the switches of its config."""

from architecture_checks import architecture_tests, assert_variant_right
from models import WINDOW

globals().update(architecture_tests("smollm3"))


def test_smollm3_all_layers_rotate(device):
    assert_variant_right("smollm3", device, no_rope_layers=[1, 1])


def test_smollm3_no_layer_rotates(device):
    assert_variant_right("smollm3", device, no_rope_layers=[0, 0])


def test_smollm3_windows_where_nothing_rotates(device):
    assert_variant_right("smollm3", device, use_sliding_window=True, sliding_window=WINDOW)


def test_smollm3_biases(device):
    assert_variant_right("smollm3", device, attention_bias=True, mlp_bias=True)
