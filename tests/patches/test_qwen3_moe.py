"""Qwen3 MoE: the common checks, and the switches of its config."""

import pytest
from architecture_checks import architecture_tests, assert_variant_right
from models import fresh

from hf_fastpath.patching.api import report

globals().update(architecture_tests("qwen3_moe"))


def test_qwen3_moe_weights_that_sum_to_one(device):
    assert_variant_right("qwen3_moe", device, norm_topk_prob=True)


@pytest.mark.parametrize("changes", ({"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}), ids=("step", "list"))
def test_qwen3_moe_layers_without_a_mixture(changes, device):
    assert_variant_right("qwen3_moe", device, **changes)
    _, ours = fresh("qwen3_moe", device, **changes)
    assert report(ours).patched["mlp"] == 2


def test_qwen3_moe_one_expert(device):
    assert_variant_right("qwen3_moe", device, num_experts_per_tok=1)


def test_qwen3_moe_attention_bias(device):
    assert_variant_right("qwen3_moe", device, attention_bias=True)


def test_qwen3_moe_tied_head(device):
    assert_variant_right("qwen3_moe", device, tie_word_embeddings=True)
