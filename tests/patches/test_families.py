"""Every listed family: the common checks, the switches of its config, and dropout. What one family alone has is beside
this file, in ``test_<family>.py``."""

from __future__ import annotations

import pytest
import torch
from architecture_checks import architecture_tests, assert_variant_right
from models import fresh, prompt
from parity import assert_same_tokens
from transformers import Gemma2ForCausalLM
from variants import DROPOUT, VARIANTS

import hf_fastpath
from hf_fastpath.architecture import architectures

FAMILIES = [architecture.name for architecture in architectures()]
for _family in FAMILIES:
    globals().update(architecture_tests(_family))

CASES = [
    pytest.param(family, variant, id=f"{family}-{name}")
    for family, variants in VARIANTS.items()
    for name, variant in variants.items()
]


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_variant(family, variant, device):
    """A config that differs in a switch gives stock's tokens and logits, by the loop that the table names."""
    if variant.changes.get("attn_implementation") == "sdpa" and not Gemma2ForCausalLM._supports_sdpa:
        pytest.skip("this transformers has no sdpa for Gemma 2")
    ours = assert_variant_right(family, device, variant.fast, variant.reason, **variant.changes)
    patched = hf_fastpath.report(ours).patched
    assert variant.patched.items() <= patched.items()


def test_every_family_has_variants():
    assert VARIANTS.keys() == set(FAMILIES) and all(VARIANTS.values()) and DROPOUT.keys() <= set(FAMILIES)


@pytest.mark.parametrize("family", DROPOUT)
def test_dropout_in_training(family, device):
    """The patched model draws the same masks, whether modules or probabilities give the dropout."""
    losses = []
    for model in fresh(family, device, **DROPOUT[family]):
        torch.manual_seed(5)
        ids = prompt(device, batch=2, length=9)
        losses.append(model.train()(ids, labels=ids).loss)
    torch.testing.assert_close(losses[1], losses[0])


def test_ops_of_soft_capped_scores_find_caches_that_grow(device):
    """Gemma 2's ops find the buffers of every call, and the larger buffers that a cache moves to."""
    stock, ours = fresh("gemma2", device)
    for length in (70, 5):
        ids = prompt(device, 1, length)
        options = dict(max_new_tokens=60, do_sample=False)
        assert_same_tokens(ours.generate(ids, **options), stock.generate(ids, **options), stock)
