"""Gemma 2: the common checks, and the switches of its config."""

import pytest
from architecture_checks import architecture_tests, assert_variant_right
from models import fresh, prompt
from parity import assert_same_tokens
from transformers import Gemma2ForCausalLM

globals().update(architecture_tests("gemma2"))


@pytest.mark.parametrize("kind", ("sliding_attention", "full_attention"))
def test_gemma2_layers_of_one_kind(kind, device):
    assert_variant_right("gemma2", device, layer_types=[kind] * 2)


def test_gemma2_without_soft_caps(device):
    assert_variant_right("gemma2", device, attn_logit_softcapping=None, final_logit_softcapping=None)


def test_gemma2_caps_as_the_attention_implementation_does(device):
    """Eager caps scores; sdpa does not, if a version of transformers has sdpa for Gemma 2."""
    for implementation in ("eager", "sdpa") if Gemma2ForCausalLM._supports_sdpa else ("eager",):
        assert_variant_right("gemma2", device, attn_implementation=implementation)


def test_gemma2_bidirectional_attention(device):
    assert_variant_right("gemma2", device, use_bidirectional_attention=True)


def test_gemma2_over_caches_that_grow(device):
    """The ops of soft-capped scores find the buffers of every call, and the larger buffers that a cache moves to."""
    stock, ours = fresh("gemma2", device)
    for length in (70, 5):
        ids = prompt(device, 1, length)
        options = dict(max_new_tokens=60, do_sample=False)
        assert_same_tokens(ours.generate(ids, **options), stock.generate(ids, **options), stock)
