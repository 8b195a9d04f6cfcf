"""GPT-NeoX: the common checks, and the switches of its config."""

import torch
from architecture_checks import architecture_tests, assert_variant_right
from models import fresh, prompt

globals().update(architecture_tests("gpt_neox"))


def test_gpt_neox_mlp_follows_attention(device):
    assert_variant_right("gpt_neox", device, use_parallel_residual=False)


def test_gpt_neox_whole_heads_turn(device):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    assert_variant_right("gpt_neox", device, rope_parameters=rope)


def test_gpt_neox_without_attention_bias(device):
    assert_variant_right("gpt_neox", device, attention_bias=False)


def test_gpt_neox_tied_head(device):
    assert_variant_right("gpt_neox", device, tie_word_embeddings=True)


def test_gpt_neox_dropout_in_training(device):
    losses = []
    for model in fresh("gpt_neox", device, hidden_dropout=0.4):
        torch.manual_seed(5)
        ids = prompt(device, batch=2, length=9)
        losses.append(model.train()(ids, labels=ids).loss)
    torch.testing.assert_close(losses[1], losses[0])
