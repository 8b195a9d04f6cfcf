"""generate_batch() on a patched model is a batch of ours, and gives stock's tokens."""

from __future__ import annotations

import copy

import pytest
from models import build, prompt
from transformers import ContinuousBatchingConfig, GenerationConfig

import hf_fastpath

GREEDY = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
#: with the default sizes the cache would take most of the machine's memory
SMALL = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)


def both(architecture, device, config, settings=SMALL, options=None, **changes):
    """Return what generate_batch() gives on a patched model and on its original, and the patched model."""
    stock = build(architecture).to(device)
    for name, value in changes.items():
        setattr(stock.generation_config, name, value)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True, **(options or {}))
    prompts = [prompt(device, 1, length, seed=length)[0].tolist() for length in (5, 9, 1)]
    given = dict(generation_config=config, continuous_batching_config=settings, warmup=False)
    return ours.generate_batch(prompts, **given), stock.generate_batch(prompts, **given), ours


@pytest.mark.parametrize("options", ({}, {"kv_dtype": "float16"}), ids=str)
@pytest.mark.parametrize("architecture", ("llama", "mistral"))
def test_generate_batch(architecture, options, device):
    found, expected, ours = both(architecture, device, GREEDY, options=options)
    assert list(found) == list(expected) and len(found) == 3
    for name, output in expected.items():
        assert found[name].generated_tokens == output.generated_tokens and len(output.generated_tokens) == 6
        assert found[name].prompt_ids == output.prompt_ids
        assert (found[name].status, found[name].error, found[name].request_id) == (output.status, None, name)
        assert found[name].lifespan[0] <= found[name].lifespan[1]
    stats = hf_fastpath.report(ours).stats
    assert stats["fast_tokens"] == 18 and "continuous_batching" not in stats["reasons"]


def test_end_tokens_log_probabilities_and_copies(device):
    """An end token ends a request; log-probabilities are those of stock; copies have stock's names."""
    greedy = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=-1)
    greedy.num_return_sequences = 2  # which a new config refuses of greedy search
    settings = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64, return_logprobs=True)
    found, expected, _ = both("llama", device, greedy, settings)
    assert list(found) == list(expected) and len(found) in (3, 6)  # older releases of transformers give one a prompt
    for name, output in expected.items():
        assert found[name].generated_tokens == output.generated_tokens
        assert found[name].logprobs == pytest.approx(output.logprobs, abs=1e-3)
    end = found["req_1"].generated_tokens[4]
    ended = copy.deepcopy(greedy)
    ended.eos_token_id, ended.num_return_sequences = end, 1
    found, expected, _ = both("llama", device, ended)
    assert {n: o.generated_tokens for n, o in found.items()} == {n: o.generated_tokens for n, o in expected.items()}
    assert found["req_1"].generated_tokens[-1] == end and len(found["req_1"].generated_tokens) <= 5


def test_samples_and_the_models_own_settings(device):
    """What generate() would take from the model's config, and generate_batch() does not, is not taken."""
    sampled = GenerationConfig(max_new_tokens=6, do_sample=True, top_k=1, pad_token_id=0, eos_token_id=-1)
    found, expected, ours = both("llama", device, sampled, temperature=0.3, top_p=0.5)
    assert {n: o.generated_tokens for n, o in found.items()} == {n: o.generated_tokens for n, o in expected.items()}
    assert not hf_fastpath.report(ours).stats["reasons"]


@pytest.mark.parametrize(
    ("options", "config", "what"),
    (
        ({"page_size": 16}, {}, None),
        ({}, {"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor"),
    ),
    ids=("pages", "processors"),
)
def test_what_a_batch_does_otherwise_is_left_to_stock(options, config, what, device):
    given = GenerationConfig(**(GREEDY.to_diff_dict() | config))
    found, expected, ours = both("llama", device, given, options=options)
    assert {n: o.generated_tokens for n, o in found.items()} == {n: o.generated_tokens for n, o in expected.items()}
    details = hf_fastpath.report(ours).stats["details"]
    assert what is None or what in details["continuous_batching"][0]
    with_cache = ours.generate(prompt(device), max_new_tokens=6, do_sample=False)  # generate() works as before
    assert with_cache.equal(build("llama").to(device).generate(prompt(device), max_new_tokens=6, do_sample=False))
