"""Seed-OSS: the common checks, and the switches of its config."""

import torch
from architecture_checks import architecture_tests, assert_variant_right
from models import fresh, prompt

globals().update(architecture_tests("seed_oss"))


def test_seed_oss_without_biases(device):
    assert_variant_right("seed_oss", device, mlp_bias=False, attention_bias=False, attention_out_bias=False)


def test_seed_oss_dropout_in_training(device):
    losses = []
    for model in fresh("seed_oss", device, residual_dropout=0.4):
        torch.manual_seed(5)
        ids = prompt(device, batch=2, length=9)
        losses.append(model.train()(ids, labels=ids).loss)
    torch.testing.assert_close(losses[1], losses[0])
