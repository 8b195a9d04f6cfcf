"""generate_batch() on a patched model uses transformers' scheduler and paged cache, and gives stock's tokens."""

from __future__ import annotations

import copy

import pytest
from models import build, prompt
from transformers import ContinuousBatchingConfig, GenerationConfig

import hf_fastpath

GREEDY = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
#: with the default sizes the cache would take most of the machine's memory
SMALL = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)


@pytest.mark.parametrize("options", ({}, {"page_size": 16}), ids=("", "pages"))
@pytest.mark.parametrize("architecture", ("llama", "mistral"))
def test_generate_batch(architecture, options, device):
    """Prompts of several lengths are in one row, then tokens follow; the reason says that stock's attention ran."""
    stock = build(architecture).to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True, **options)
    prompts = [prompt(device, 1, length, seed=length)[0].tolist() for length in (5, 9, 1)]
    found = []
    for model in (ours, stock):
        outputs = model.generate_batch(
            prompts, generation_config=GREEDY, continuous_batching_config=SMALL, warmup=False
        )
        found.append({tuple(out.prompt_ids): out.generated_tokens for out in outputs.values()})
    assert found[0] == found[1] and len(found[1]) == 3
    assert all(len(tokens) == 6 for tokens in found[1].values())
    assert hf_fastpath.report(ours).stats["reasons"]["continuous_batching"]
    with_cache = ours.generate(prompt(device), max_new_tokens=6, do_sample=False)  # generate() works as before
    assert with_cache.equal(stock.generate(prompt(device), max_new_tokens=6, do_sample=False))
    assert hf_fastpath.report(ours).stats["fast_tokens"] == 6
