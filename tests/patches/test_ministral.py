"""Ministral: the common checks, and the switches of its config."""

from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("ministral"))


def test_ministral_without_windows(device):
    assert_variant_right("ministral", device, layer_types=["full_attention"] * 2)
