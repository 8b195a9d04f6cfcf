"""Models whose cache holds states, one of each kind: recorded steps give stock's tokens in every way to generate, and
the cache holds what transformers' own would."""

from __future__ import annotations

import copy

import pytest
import torch
from causal_lm_types import small_model
from models import CPU, counting, require_native, skip_if_cache_is_named_otherwise
from test_recorded_families import GREEDY, assert_equal, assert_equal_beams, padded, plans_of, prompt
from test_recorded_families import pair as pair_of
from transformers import DynamicCache

import hf_fastpath
from hf_fastpath import FastpathCache
from hf_fastpath.cache.states import KeysAndStatesLayer, StateLayer
from hf_fastpath.compat import CACHE
from hf_fastpath.patching.state import state_of
from hf_fastpath.patching.twin_config import twin_config
from hf_fastpath.recording.recorded_model import RecordedModel

#: of each test every third case; all of them with ``--full``
pytestmark = pytest.mark.every(3)

#: type -> what its cache holds
TYPES = {
    "qwen3_5_text": "gated delta rule and attention, in layers of their own",
    "mamba": "a selective state space in every layer, no keys and values",
    "mamba2": "a state for each head in every layer, no keys and values",
    "falcon_h1": "keys, values and states in one layer",
    "granitemoehybrid": "attention without rotation between two layers of states",
    "lfm2": "windows of convolutions and no recurrent state",
    "nemotron_h": "layers that hold nothing, experts without a gate",
    "zaya": "keys, values, windows of convolutions of groups and of one token in one layer",
}
#: types whose states cannot be cropped even by what recorded its past
RECURRENT = tuple(each for each in TYPES if each != "lfm2")
#: calls that compute nothing
VIEWS = ("reshape", "slice.Tensor", "select.int", "split.Tensor", "split_with_sizes", "getitem", "run_angles")
over_types = pytest.mark.parametrize("model_type", TYPES)
over_recurrent = pytest.mark.parametrize("model_type", RECURRENT)


def pair(model_type: str):
    """Stock and patched, made once; tests do not change them."""
    skip_if_cache_is_named_otherwise(model_type)
    return pair_of(model_type)


@over_types
def test_every_way_to_choose_tokens(model_type):
    stock, ours = pair(model_type)
    assert_equal(ours, stock)
    assert_equal(ours, stock, padded(3), max_new_tokens=20)
    assert_equal(ours, stock, padded(2), do_sample=True, temperature=0.9, top_k=20)
    first, second = (stock.generate(prompt(seed=seed), **GREEDY)[:, 9:] for seed in (0, 1))
    assert not torch.equal(first, second), "the prompt has to matter"


@over_types
def test_a_page_size_changes_nothing(model_type):
    """Sequences of one prompt, beams and copies over pages; a cache of states alone has no pages to share."""
    skip_if_cache_is_named_otherwise(model_type)
    stock = small_model(model_type)
    ours = hf_fastpath.patch(copy.deepcopy(stock), page_size=16, quiet=True)
    for options in (dict(num_beams=3), dict(num_beams=2, num_return_sequences=2), dict(num_return_sequences=3)):
        found = []
        for model in (ours, stock):
            torch.manual_seed(0)
            sampling = dict(do_sample="num_beams" not in options)
            found.append(model.generate(prompt(), **GREEDY | options | sampling))
        assert torch.equal(*found), options
    cache = FastpathCache(ours.config, page_size=16)
    ours.generate(prompt(), **{CACHE: cache}, **GREEDY)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([1]))
    assert all(each.shape[0] == 1 for layer in cache.state_layers for each in layer.states)


@over_types
def test_a_prompt_of_one_token(model_type):
    stock, ours = pair(model_type)
    assert_equal(ours, stock, {"input_ids": prompt(2, 1)})


@over_types
def test_a_plan_serves_one_cache_after_the_other(model_type):
    stock, ours = copy.deepcopy(pair(model_type))
    assert_equal(ours, stock)
    (plan,) = plans_of(ours)
    assert_equal(ours, stock, {"input_ids": prompt(seed=3)})
    assert plans_of(ours) == [plan]


def _turns(model, count: int = 3) -> tuple[torch.Tensor, list[int]]:
    """The text of a padded conversation over one cache, and how many tokens of each turn were ours."""
    inputs = padded(2)
    ids, mask, options, ours = inputs["input_ids"], inputs["attention_mask"], {}, []
    for turn in range(count):
        before = hf_fastpath.report(model).stats["fast_tokens"] if hasattr(model, "_hf_fastpath") else 0
        out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY, **options)
        if hasattr(model, "_hf_fastpath"):
            ours.append(hf_fastpath.report(model).stats["fast_tokens"] - before)
            assert isinstance(out[CACHE], FastpathCache)
        ids = torch.cat((out.sequences, prompt(2, 3, seed=turn)), dim=1)
        mask = torch.cat((mask, mask.new_ones(2, ids.shape[1] - mask.shape[1])), dim=1)
        options = {CACHE: out[CACHE]}
    return ids, ours


@over_types
def test_a_conversation_goes_on(model_type):
    stock, ours = pair(model_type)
    (found, counts), (expected, _) = (_turns(model) for model in (ours, stock))
    assert torch.equal(found, expected)
    assert counts == [24, 24, 24]


@over_types
def test_a_copied_cache_goes_its_own_way(model_type):
    """What a plan does for one cache changes neither a copy of it nor the other way round."""
    stock, ours = pair(model_type)
    out = ours.generate(prompt(), return_dict_in_generate=True, **GREEDY)
    cache, twin = out[CACHE], copy.deepcopy(out[CACHE])
    texts = []
    for seed, held in ((1, cache), (1, twin)):
        ids = torch.cat((out.sequences, prompt(1, 3, seed=seed)), dim=1)
        texts.append(ours.generate(ids, **{CACHE: held}, **GREEDY))
        ours.generate(prompt(seed=9), **GREEDY)  # the same plan, over another cache
    assert torch.equal(*texts)
    plain = stock.generate(prompt(), return_dict_in_generate=True, **GREEDY)
    ids = torch.cat((plain.sequences, prompt(1, 3, seed=1)), dim=1)
    assert torch.equal(texts[0], stock.generate(ids, **{CACHE: plain[CACHE]}, **GREEDY))


@over_types
def test_the_cache_holds_what_stocks_does(model_type):
    stock, ours = pair(model_type)
    found, expected = (
        model.generate(**padded(2), return_dict_in_generate=True, **GREEDY)[CACHE].layers for model in (ours, stock)
    )
    compared = 0
    for one, other in zip(found, expected, strict=True):
        for name in ("conv_states", "recurrent_states"):
            for place, state in getattr(other, name, {}).items():
                if state is not None:
                    torch.testing.assert_close(getattr(one, name)[place], state, rtol=1e-4, atol=1e-5)
                    compared += 1
    assert compared


@over_types
def test_beams(model_type):
    """Stock's loop reorders our cache."""
    stock, ours = pair(model_type)
    assert_equal_beams(ours, stock)


@over_types
def test_drafts_are_left_to_stock(model_type):
    """Stock verifies drafts if all states are windows that record their past, and refuses if not."""
    stock, ours = pair(model_type)
    ids, options = prompt(1, 6).repeat(1, 4), dict(prompt_lookup_num_tokens=4, **GREEDY)
    if model_type in RECURRENT:
        for model in (ours, stock):
            with pytest.raises(ValueError, match="can be cropped|stateful"):
                model.generate(ids, **options)
        return
    with counting(ours) as counts:
        found = ours.generate(ids, **options)
    assert torch.equal(found, stock.generate(ids, **options))
    assert not counts.fast and counts.reasons["not_recorded"] == 1


@over_types
def test_ends_of_sequences(model_type):
    stock, ours = pair(model_type)
    text = stock.generate(**padded(3), **GREEDY)[:, 11:]
    end = int(text[0, 4])
    options = dict(eos_token_id=end, pad_token_id=0, max_new_tokens=12, do_sample=False)
    assert_equal(ours, stock, padded(3), **options)
    assert_equal(ours, stock, **options)


@over_types
def test_beside_the_users_code(model_type):
    """A callback that looks at states between tokens sees them, and what it puts into them takes effect."""
    stock, ours = pair(model_type)
    texts, seen = [], []
    for model in (ours, stock):
        cache = (FastpathCache if model is ours else DynamicCache)(config=model.config)
        layer = next(each for each in cache.layers if hasattr(each, "conv_states"))

        def change(ids, scores, layer=layer, **_):
            if ids.shape[1] == 12:
                seen.append(layer.conv_states[0].clone())
                layer.conv_states[0] = layer.conv_states[0] * -2.0
            if ids.shape[1] == 14:
                layer.conv_states[0].mul_(3.0)
            return torch.zeros(len(ids), dtype=torch.bool)

        texts.append(model.generate(prompt(), stopping_criteria=[change], **{CACHE: cache}, **GREEDY))
    assert torch.equal(*texts)
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-5)


@over_types
def test_an_interrupt_forgets_the_text(model_type):
    stock, ours = pair(model_type)
    cache = FastpathCache(ours.config)

    def stop(ids, scores, **_):
        if ids.shape[1] == 12:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        ours.generate(prompt(), stopping_criteria=[stop], **{CACHE: cache}, **GREEDY)
    assert cache.get_seq_length() == 0
    assert torch.equal(ours.generate(prompt(), **{CACHE: cache}, **GREEDY), stock.generate(prompt(), **GREEDY))


@pytest.mark.every(4)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@over_types
def test_half_precision_is_proven(dtype, model_type):
    stock, _ = pair(model_type)
    ours = hf_fastpath.patch(copy.deepcopy(stock).to(dtype), quiet=True)
    with counting(ours) as counts:
        ours.generate(**padded(2), **GREEDY)
    assert counts.fast == 24 and not counts.fallback, counts.reasons


# ---- the cache -----------------------------------------------------------------------------------------------------


def _filled(model_type: str, batch: int = 3) -> tuple[FastpathCache, DynamicCache]:
    stock, _ = pair(model_type)
    made = []
    with torch.no_grad():
        for kind in (FastpathCache, DynamicCache):
            made.append(kind(config=stock.config))
            stock(prompt(batch), **{CACHE: made[-1]}, use_cache=True)
    return made[0], made[1]


def _assert_goes_on_alike(model_type: str, ours: FastpathCache, expected: DynamicCache, batch: int) -> None:
    stock, _ = pair(model_type)
    with torch.no_grad():
        logits = [stock(prompt(batch, 1), **{CACHE: each}, use_cache=True).logits for each in (ours, expected)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


@over_types
def test_reorder_and_reset(model_type):
    ours, expected = _filled(model_type)
    for cache in (ours, expected):
        cache.reorder_cache(torch.tensor([2, 0, 0]))
    _assert_goes_on_alike(model_type, ours, expected, 3)
    stock, _ = pair(model_type)
    ours.reset()
    expected = DynamicCache(config=stock.config)
    with torch.no_grad():
        for cache in (ours, expected):
            stock(prompt(3, seed=5), **{CACHE: cache}, use_cache=True)
    _assert_goes_on_alike(model_type, ours, expected, 3)


@over_types
def test_select_and_repeat(model_type):
    """Transformers' own layers of states have no such methods."""
    ours, _ = _filled(model_type, batch=2)
    ours.batch_select_indices(torch.tensor([1]))
    ours.batch_repeat_interleave(3)
    stock, _ = pair(model_type)
    expected = FastpathCache(stock.config)
    with torch.no_grad():
        stock(prompt(2)[1:].repeat(3, 1), **{CACHE: expected}, use_cache=True)
        logits = [stock(prompt(3, 1), **{CACHE: each}, use_cache=True).logits for each in (ours, expected)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


@over_types
def test_to_transformers_cache_and_back(model_type):
    ours, expected = _filled(model_type)
    back = FastpathCache.from_dynamic(ours.to_dynamic())
    assert back.kinds == ours.kinds and [type(each) for each in back.layers] == [type(each) for each in ours.layers]
    _assert_goes_on_alike(model_type, back, expected, 3)
    _assert_goes_on_alike(model_type, ours, copy.deepcopy(_filled(model_type)[1]), 3)


@over_recurrent
def test_no_token_is_taken_back_from_a_state(model_type):
    ours, _ = _filled(model_type)
    before = copy.deepcopy(ours)
    with pytest.raises(RuntimeError, match=r"cannot remove 2 tokens.*deepcopy"):
        ours.crop(-2)
    ours.crop(0)
    assert ours.get_seq_length() == before.get_seq_length()
    for one, other in zip(ours.state_layers, before.state_layers):
        assert all(map(torch.equal, one.states, other.states))


def test_windows_that_record_their_past_are_cropped():
    stock, _ = pair("lfm2")
    made = []
    with torch.no_grad():
        for kind in (FastpathCache, DynamicCache):
            made.append(kind(config=stock.config))
            made[-1].activate_past_recording()
            stock(prompt(3), **{CACHE: made[-1]}, use_cache=True)
            made[-1].crop(-2)
    assert made[0].get_seq_length() == 7
    _assert_goes_on_alike("lfm2", *made, 3)
    _, ours = pair("lfm2")
    with counting(ours) as counts:
        ours.generate(prompt(3, 12), **{CACHE: made[0]}, **GREEDY)
    assert counts.reasons["other_cache"] == 1 and not counts.fast


@over_types
def test_a_cache_of_another_batch_is_refused(model_type):
    _, ours = pair(model_type)
    cache, _ = _filled(model_type)
    with pytest.raises(RuntimeError, match="pass a cache of this batch"):
        ours.generate(prompt(2, 12), **{CACHE: cache}, **GREEDY)


def test_pytorch_computes_nothing_in_a_layer():
    """Of a gated delta rule, and of attention behind a gate: all but views is by ops of ours."""
    _, ours = pair("qwen3_5_text")
    assert_equal(ours, pair("qwen3_5_text")[0])
    names = [each.removesuffix(".default") for each in plans_of(ours)[0].program.op_names()]
    found = [each for each in names[names.index("joined_gemv") :] if each not in VIEWS]
    behind = ["gemv", "gemv_swiglu", "gemv"]
    delta = ["joined_gemv", "short_convolution", "gated_delta_step", "gated_rms_norm", *behind]
    attention = ["joined_gemv", "rope_append", "decode_attention", "fused_swiglu", *behind]
    assert found == [*delta, *attention, "gemv", "greedy_token"]


def test_pytorch_computes_nothing_in_a_layer_with_a_mixture():
    """Of experts, a shared expert behind a gate and the norm in front: all but views is by ops of ours."""
    stock = small_model("qwen3_5_moe_text")
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    assert_equal(ours, stock)
    names = [each.removesuffix(".default") for each in plans_of(ours)[0].program.op_names()]
    mixture = ["joined_gemv", "routed_experts"]
    assert [each for each in names if each not in VIEWS][-5:] == ["gemv", *mixture, "gemv", "greedy_token"]
    assert not {"add.Tensor", "mul.Tensor", "rms_norm"} & set(names[names.index("joined_gemv") :])


def test_layers():
    kinds = {
        name: {type(each) for each in FastpathCache(small_model(name).config).state_layers}
        for name in ("qwen3_5_text", "falcon_h1")
    }
    assert kinds == {"qwen3_5_text": {StateLayer}, "falcon_h1": {KeysAndStatesLayer}}


@over_types
def test_twins_are_small_and_have_layers_of_every_kind(model_type):
    require_native(CPU)
    stock, ours = pair(model_type)
    twin = type(stock)(twin_config(type(stock.config)()))  # of the published sizes
    assert twin.num_parameters() < 1_000_000
    assert isinstance(state_of(ours).plans.part_of(ours), RecordedModel)
