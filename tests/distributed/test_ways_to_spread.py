"""Ways to spread a model beside Llama's: features that all ranks gather, a KV head that all ranks have; the refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import assert_same_instances, build, instances, left_padded
from processes import (
    GREEDY,
    SIZES,
    assert_fast,
    assert_half_types,
    assert_tokens,
    attention_config,
    device,
    needs_processes,
    run,
    save,
    some_prompt,
    spread,
    tokens_of,
    with_whole_kv,
)

import hf_fastpath
from hf_fastpath import UnsupportedModelError

pytestmark = needs_processes
#: q, k and v in one and gate and up in one; norms over all heads; the same with experts
GATHERING = ("phi3", "olmo2", "olmo3", "olmoe")


def _equal_tokens(rank: int, folder: Path, families: tuple[str, ...]) -> None:
    repeated = {"input_ids": some_prompt(device(rank))[:, :6].repeat(1, 3)}
    for family in families:
        model = spread(folder / family)
        assert_tokens(rank, model, build(family, **SIZES))
        assert torch.equal(tokens_of(model, repeated, prompt_lookup_num_tokens=3), tokens_of(model, repeated))
        assert_fast(model)
    assert_half_types(rank, folder / "phi3", build("phi3", **SIZES))


def test_features_that_are_gathered(tmp_path, request):
    families = tuple(each for each in GATHERING if each != "olmo3" or request.config.getoption("--full"))
    for family in families:
        save(tmp_path / family, family)
    run(_equal_tokens, tmp_path, families)


def _one_kv_head(rank: int, folder: Path) -> None:
    """Stock code takes such a model with sdpa and without a mask alone."""
    here = device(rank)
    model = spread(folder, distributed_config=with_whole_kv(), attn_implementation="sdpa")
    whole = build("llama", **SIZES | dict(num_key_value_heads=1)).to(here)
    inputs, padded = {"input_ids": some_prompt(here, 2)}, left_padded(here, 3)
    padded["input_ids"] = padded["input_ids"] % (SIZES["vocab_size"] - 1) + 1
    cases = (inputs, {}), (inputs, dict(do_sample=True, top_k=20)), (padded, {})
    wanted = [tokens_of(whole, given, **options) for given, options in cases]
    assert torch.equal(tokens_of(model, inputs), wanted[0])
    hf_fastpath.patch(model, quiet=True)
    for (given, options), tokens in zip(cases, wanted):
        assert torch.equal(tokens_of(model, given, **options), tokens), options
    assert_fast(model)


def test_a_kv_head_that_all_ranks_have(tmp_path):
    save(tmp_path, num_key_value_heads=1)
    run(_one_kv_head, tmp_path)


def _refused(rank: int, folder: Path) -> None:
    two_kv_heads = spread(folder / "llama", distributed_config=with_whole_kv())
    with pytest.raises(UnsupportedModelError, match="q_proj is spread by colwise, which"):
        hf_fastpath.patch(two_kv_heads, quiet=True)
    with pytest.raises(UnsupportedModelError, match="4 heads and 1 KV heads do not divide over 2 ranks"):
        hf_fastpath.patch(spread(folder / "one_kv_head"), quiet=True)  # nor can stock code run this model
    with pytest.raises(ValueError, match="has colwise_gather_output and rowwise_split_input"):
        hf_fastpath.patch(spread(folder / "phi3"), weights="int8", quiet=True)
    whole = dict(q_proj="replicate", k_proj="replicate", v_proj="replicate")
    model = spread(folder / "llama", distributed_config=attention_config(whole, dict(o_proj="rowwise_split_input")))
    inputs = {"input_ids": some_prompt(device(rank))}
    expected, before = model.generate(**inputs, **GREEDY), instances(model)
    for options in ({}, dict(strict=True), dict(ops="norm"), dict(weights="int8")):
        with pytest.raises(UnsupportedModelError) as caught:
            hf_fastpath.patch(model, quiet=True, **options)
        assert type(model).__name__ in str(caught.value).splitlines()[0]
        assert_same_instances(instances(model), before)
    assert torch.equal(model.generate(**inputs, **GREEDY), expected)


def test_other_ways_are_refused(tmp_path):
    save(tmp_path / "llama")
    save(tmp_path / "phi3", "phi3")
    save(tmp_path / "one_kv_head", num_key_value_heads=1)
    run(_refused, tmp_path)
