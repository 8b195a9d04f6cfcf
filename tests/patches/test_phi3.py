"""Phi-3: the common checks, and the switches of its config."""

import torch
from architecture_checks import architecture_tests, assert_variant_right
from models import WINDOW, fresh, prompt

globals().update(architecture_tests("phi3"))


def test_phi3_window(device):
    assert_variant_right("phi3", device, sliding_window=WINDOW)


def test_phi3_grouped_queries(device):
    assert_variant_right("phi3", device, num_attention_heads=4, num_key_value_heads=2, hidden_size=128)


def test_phi3_half_of_a_head_turns(device):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    assert_variant_right("phi3", device, rope_parameters=rope)


def test_phi3_dropout_in_training(device):
    losses = []
    for model in fresh("phi3", device, resid_pdrop=0.4):
        torch.manual_seed(5)
        ids = prompt(device, batch=2, length=9)
        losses.append(model.train()(ids, labels=ids).loss)
    torch.testing.assert_close(losses[1], losses[0])
