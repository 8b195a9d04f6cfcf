"""Mistral: the common checks, and the switches of its config."""

import pytest
from architecture_checks import architecture_tests, assert_variant_right

globals().update(architecture_tests("mistral"))


def test_mistral_without_window(device):
    assert_variant_right("mistral", device, sliding_window=None)


def test_mistral_tied_head(device):
    assert_variant_right("mistral", device, tie_word_embeddings=True)


@pytest.mark.parametrize("head_dim", (6, 32, 64, 72))
def test_mistral_head_dims(head_dim, device):
    assert_variant_right("mistral", device, head_dim=head_dim)


def test_mistral_unsupported_head_dim_runs_stock(device):
    assert_variant_right("mistral", device, fast=False, reason="declined", head_dim=514)


def test_mistral_gelu_gate(device):
    assert_variant_right("mistral", device, hidden_act="gelu")


def test_mistral_eager_attention(device):
    assert_variant_right("mistral", device, attn_implementation="eager")
