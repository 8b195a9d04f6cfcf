"""StarCoder2: the common checks, and the switches of its config."""

import torch
from architecture_checks import architecture_tests, assert_variant_right
from models import fresh, prompt

globals().update(architecture_tests("starcoder2"))


def test_starcoder2_without_window(device):
    assert_variant_right("starcoder2", device, sliding_window=None)


def test_starcoder2_without_bias(device):
    assert_variant_right("starcoder2", device, use_bias=False)


def test_starcoder2_erf_gelu(device):
    assert_variant_right("starcoder2", device, hidden_act="gelu")


def test_starcoder2_separate_head(device):
    assert_variant_right("starcoder2", device, tie_word_embeddings=False)


def test_starcoder2_dropout_in_training(device):
    """Dropout is given by probabilities instead of modules: the patched model draws the same masks."""
    losses = []
    for model in fresh("starcoder2", device, residual_dropout=0.4, embedding_dropout=0.3):
        torch.manual_seed(5)
        ids = prompt(device, batch=2, length=9)
        losses.append(model.train()(ids, labels=ids).loss)
    torch.testing.assert_close(losses[1], losses[0])
