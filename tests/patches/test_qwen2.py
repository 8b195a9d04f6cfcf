"""Qwen2: the common checks, and the switches of its config."""

import pytest
from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("qwen2"))


@pytest.mark.parametrize("window_layers", [0, 2])
def test_qwen2_windows_in_all_layers_or_none(window_layers, device):
    assert_variant_right("qwen2", device, max_window_layers=window_layers)


def test_qwen2_without_windows(device):
    assert_variant_right("qwen2", device, use_sliding_window=False)


def test_qwen2_tied_head(device):
    assert_variant_right("qwen2", device, tie_word_embeddings=True)
