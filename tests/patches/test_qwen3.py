"""Qwen3: the common checks, and the switches of its config."""

from architecture_checks import architecture_tests, assert_variant_right
from models import WINDOW

globals().update(architecture_tests("qwen3"))


def test_qwen3_windows(device):
    assert_variant_right("qwen3", device, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)


def test_qwen3_attention_bias(device):
    assert_variant_right("qwen3", device, attention_bias=True)


def test_qwen3_tied_head(device):
    assert_variant_right("qwen3", device, tie_word_embeddings=True)
