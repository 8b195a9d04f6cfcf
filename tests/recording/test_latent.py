"""Models that attend over a latent: recorded steps give stock's tokens, over every kind of cache."""

from __future__ import annotations

import copy

import pytest
import torch
from models import counting
from test_recorded_families import GREEDY, assert_equal, assert_equal_drafts, padded, pair, prompt

import hf_fastpath
from hf_fastpath import FastpathCache
from hf_fastpath.choices import Rotation
from hf_fastpath.compat import CACHE
from hf_fastpath.patching.state import state_of

#: of each test every other case; all of them with ``--full``
pytestmark = pytest.mark.every(2)

#: type -> what is peculiar
TYPES = {
    "deepseek_v2": "complex rotations, softmax routers",
    "deepseek_v3": "grouped routers of sigmoids",
    "minicpm3": "factors, no experts",
    "kimi_linear": "layers of a gated delta rule besides, no rotation",
}
over_types = pytest.mark.parametrize("model_type", TYPES)
over_keys = pytest.mark.parametrize("model_type", [each for each in TYPES if each != "kimi_linear"])


@over_types
def test_every_way_to_choose_tokens(model_type):
    stock, ours = pair(model_type)
    assert_equal(ours, stock)
    assert_equal(ours, stock, padded(3), max_new_tokens=70)  # more than there is room for at first
    assert_equal(ours, stock, padded(2), do_sample=True, temperature=0.9, top_k=20)
    first, second = (stock.generate(prompt(seed=seed), **GREEDY)[:, 9:] for seed in (0, 1))
    assert not torch.equal(first, second), "the prompt has to matter"


@over_types
def test_a_conversation_goes_on(model_type):
    stock, ours = pair(model_type)
    ends = []
    for model in (ours, stock):
        ids, options = prompt(2), {}
        for turn in range(3):
            options["attention_mask"] = torch.ones_like(ids)
            with counting(ours) as counts:
                out = model.generate(ids, return_dict_in_generate=True, **GREEDY, **options)
            assert model is stock or counts.fast == 24, counts.reasons
            ids = torch.cat((out.sequences, prompt(2, 3, seed=turn)), dim=1)
            options = {CACHE: out[CACHE]}
        ends.append(ids)
    assert torch.equal(*ends)


@over_keys
def test_drafts(model_type):
    stock, ours = pair(model_type)
    assert_equal_drafts(ours, stock)


@over_types
def test_pages(model_type):
    stock, _ = pair(model_type)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True, page_size=16)
    assert_equal(ours, stock, padded(3), max_new_tokens=30)
    assert_equal(ours, stock, {"input_ids": prompt()}, num_return_sequences=3, do_sample=True)


@over_types
@pytest.mark.parametrize("kv_dtype", (torch.bfloat16, torch.int8))
def test_narrow_caches(kv_dtype, model_type):
    """What a prompt and steps store and read agrees: the tokens of one step more are those of a longer prompt."""
    stock, _ = pair(model_type)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True, kv_dtype=kv_dtype)
    options = dict(output_logits=True, return_dict_in_generate=True, do_sample=False)
    with counting(ours) as counts:
        out = ours.generate(prompt(), max_new_tokens=6, **options)
    assert counts.fast == 6, counts.reasons
    cache = FastpathCache(ours.config, kv_dtype)
    with torch.no_grad():
        logits = stock(out.sequences[:, :-1], **{CACHE: cache}, use_cache=True).logits[:, -6:]
    torch.testing.assert_close(torch.stack(out.logits, dim=1), logits, rtol=0.02, atol=0.02)


@pytest.mark.every(2)
@over_types
def test_half_precision_is_proven(model_type):
    stock, _ = pair(model_type)
    ours = hf_fastpath.patch(copy.deepcopy(stock).bfloat16(), quiet=True)
    with counting(ours) as counts:
        ours.generate(**padded(2), **GREEDY)
    assert counts.fast == 24 and not counts.fallback, counts.reasons


def test_no_keys_or_values_are_made_of_what_the_cache_holds():
    _, ours = copy.deepcopy(pair("deepseek_v3"))
    ours.generate(prompt(), **GREEDY)
    (plan,) = state_of(ours).plans
    names = [name.partition(".")[0] for name in plan.program.op_names()]
    assert names.count("latent_attention") == len(ours.model.layers)
    assert names.count("head_products") == 2 * len(ours.model.layers) and "append_states" not in names
    weights = {layer.self_attn.kv_b_proj.weight.data_ptr() for layer in ours.model.layers}
    angles = [call.arguments["rotation"] for call in plan.program.calls if call.name.startswith("latent_attention")]
    assert angles == [Rotation.NEIGHBORS_TO_HALVES] * len(weights)
    given = [(call.name, each) for call in plan.program.calls for each in call.arguments.values()]
    readers = [name for name, each in given if isinstance(each, torch.Tensor) and each.data_ptr() in weights]
    assert readers == ["head_products.default"] * len(weights)  # of queries; those of values begin behind other rows
