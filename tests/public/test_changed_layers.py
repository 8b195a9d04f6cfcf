"""Models whose layers are used twice, swapped, taken out or shared: stock's tokens, and if there is a reason for stock
code, nothing of ours is in the call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import causal_lm_types
import encoder_decoder_types
import pytest
import torch
from models import CPU, build, counting, prompt, require_native
from torch import nn
from transformers import EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicCache

import hf_fastpath
from hf_fastpath import FastpathCache
from hf_fastpath.compat import CACHE, text_cache

LISTED = ("llama", "gpt2", "mistral", "gemma2", "mixtral", "opt")
#: families of which all edits are tried in any case; of others with --full
USUAL = ("llama", "gpt2", "glm4", "bart")
LENGTHS = (3, 19)  # the second is longer than windows
#: names of the number of layers in configs
_COUNTS = ("num_hidden_layers", "n_layer", "decoder_layers")


def small(name: str, seed: int = 0) -> PreTrainedModel:
    require_native(CPU)
    if name in LISTED:
        return build(name, seed=seed)
    model = (encoder_decoder_types if name == "bart" else causal_lm_types).small_model(name, seed)
    model.generation_config.eos_token_id = None
    return model


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a model, of its decoder if it has an encoder."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    return next(each for each in decoder.modules() if isinstance(each, nn.ModuleList) and len(each) > 1)


def count(model: PreTrainedModel, number: int) -> None:
    """Let the config tell of so many layers, of the kinds of the first ones over and over."""
    config = model.config
    setattr(config, next(name for name in _COUNTS if hasattr(config, name)), number)
    if getattr(config, "layer_types", None):
        config.layer_types = (list(config.layer_types) * number)[:number]


def twice(model):
    """0-1-0-1"""
    layers = layers_of(model)
    layers.extend(list(layers))
    count(model, len(layers))


def one_again(model):
    layers = layers_of(model)
    layers[1] = layers[0]


def swapped(model):
    layers = layers_of(model)
    layers[0], layers[1] = layers[1], layers[0]


def without_the_last(model):
    layers = layers_of(model)
    del layers[-1]
    count(model, len(layers))


def without_the_last_of_the_config(model):
    del layers_of(model)[-1]


def without_the_first(model):
    del layers_of(model)[0]


def one_more(model):
    layers_of(model).append(copy.deepcopy(layers_of(model)[1]))


def one_more_in_the_config(model):
    one_more(model)
    count(model, len(layers_of(model)))


def one_index(model):
    for each in layers_of(model)[1].modules():
        if hasattr(each, "layer_idx"):
            each.layer_idx = 0


def sharing(part: str) -> Callable[[PreTrainedModel], None]:
    def share(model):
        layers = layers_of(model)
        for name, child in layers[0].named_children():
            if part in name:
                setattr(layers[1], name, child)

    return share


EDITS: dict[str, Callable[[PreTrainedModel], None]] = {
    "0-1-0-1": twice,
    "one layer again": one_again,
    "swapped": swapped,
    "without the last": without_the_last,
    "without the last of the config": without_the_last_of_the_config,
    "without the first": without_the_first,
    "one more": one_more,
    "one more in the config": one_more_in_the_config,
    "one index": one_index,
    "one attention": sharing("attn"),
    "one mlp": sharing("mlp"),
    "one norm": sharing("norm"),
}
MODES = {}, dict(num_beams=2)
#: errors of stock code that such models may end in: ours has to end in the same
_ERRORS = (IndexError, RuntimeError, ValueError, AttributeError)


def answer(model: PreTrainedModel, length: int, **options):
    """Return the tokens and the cache that ``generate()`` gives, or the error in which it ends."""
    given = {"input_ids": prompt(CPU, 1, length) % 150 + 3} | options
    given |= dict(max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    try:
        found = model.generate(**given)
    except _ERRORS as error:
        return f"{type(error).__name__}: {error}", None
    return found.sequences.tolist(), found[CACHE]


def check(stock: PreTrainedModel, ours: PreTrainedModel) -> None:
    """Check that both models give the same, and that a call with a reason has nothing of ours."""
    is_fast = hf_fastpath.report(ours).loop == "fast"
    for options in MODES:
        for length in LENGTHS:
            expected, _ = answer(stock, length, **options)
            with counting(ours) as counts:
                found, cache = answer(ours, length, **options)
            assert found == expected, (length, options)
            assert bool(counts.fast) == is_fast and bool(counts.reasons) != is_fast
            if not is_fast and cache is not None:
                assert type(text_cache(cache)) is DynamicCache


def over(names: tuple[str, ...]) -> Any:
    """Return a decorator that gives a test families as ``name``."""
    full = [() if name in USUAL else (pytest.mark.full,) for name in names]
    return pytest.mark.parametrize("name", [pytest.param(*pair[:1], marks=pair[1]) for pair in zip(names, full)])


@pytest.mark.each_value
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@over(LISTED)
def test_changed_before_patch(name, edit):
    stock = small(name)
    edit(stock)
    check(stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True))


@pytest.mark.each_value
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@over((*LISTED, "glm4", "bart"))
def test_changed_between_calls(name, edit):
    stock = small(name)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    answer(ours, 5)
    edit(stock)
    edit(ours)
    check(stock, ours)


@pytest.mark.parametrize("edit", ("0-1-0-1", "one layer again", "one index", "one attention"))
@pytest.mark.parametrize("name", ("llama", "gpt2"))
def test_a_cache_of_the_users_own(name, edit):
    """The user's FastpathCache stays, and holds what stock's cache holds."""
    stock = small(name)
    EDITS[edit](stock)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    for length in (1, 3, 11, 19):
        expected, _ = answer(stock, length, **{CACHE: DynamicCache(config=stock.config)})
        own = FastpathCache(ours.config)
        found, cache = answer(ours, length, **{CACHE: own})
        assert found == expected and (cache is own or isinstance(found, str))


@pytest.mark.each_value
@pytest.mark.parametrize("order", ((0,), (1,), (0, 1), (1, 0)), ids=str)
@pytest.mark.parametrize("part", ("layer", "layer elsewhere", "attention", "mlp", "norm", "decoder", "head"))
@pytest.mark.parametrize("name", ("llama", "glm4"))
def test_modules_of_two_models(name, part, order):
    def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
        one, other = small(name), small(name, seed=4)
        layers, others = layers_of(one), layers_of(other)
        if part.startswith("layer"):
            others[int("elsewhere" in part)] = layers[0]
        elif part == "decoder":
            setattr(other, other.base_model_prefix, getattr(one, one.base_model_prefix))
        elif part == "head":
            other.set_output_embeddings(one.get_output_embeddings())
        else:
            wanted = {"attention": ("attn",), "mlp": ("mlp",), "norm": ("norm", "ln_")}[part]
            for child_name, child in layers[0].named_children():
                if any(each in child_name for each in wanted):
                    setattr(others[0], child_name, child)
        return one, other

    stock = pair()
    expected = [[answer(each, length)[0] for each in stock] for length in LENGTHS]
    ours = pair()
    for place in order:
        if name == "glm4" and part == "layer elsewhere" and place == 1:
            with pytest.raises(hf_fastpath.errors.UnsupportedModelError, match="not_recorded"):
                hf_fastpath.patch(ours[place], quiet=True)
            continue
        hf_fastpath.patch(ours[place], quiet=True)
    assert [[answer(each, length)[0] for each in ours] for length in LENGTHS] == expected
    hf_fastpath.unpatch(ours[order[0]])
    assert [[answer(each, length)[0] for each in ours] for length in LENGTHS] == expected


@pytest.mark.each_pair
@pytest.mark.parametrize("name", ("llama", "glm4", "bart"))
@pytest.mark.parametrize(
    ("options", "code"),
    [
        (dict(output_hidden_states=True), "attention_outputs"),
        (dict(num_beams=2, output_hidden_states=True), "attention_outputs"),
        (dict(position_ids=torch.arange(9.0)[None]), "position_ids"),
        (dict(token_type_ids=torch.zeros(1, 9, dtype=torch.long)), "unsupported_input"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_a_call_asks_for(name, options, code):
    """A request that is stock's is stock's wholly, too."""
    if (name == "bart" or "token_type_ids" in options) and code != "attention_outputs":
        pytest.skip("its generate() takes no such argument")
    ours = hf_fastpath.patch(small(name), quiet=True)
    with counting(ours) as counts:
        found, cache = answer(ours, 9, **options)
    assert isinstance(found, list), found
    assert set(counts.reasons) == {code} and not counts.fast
    assert type(text_cache(cache)) is DynamicCache and type(cache) in (DynamicCache, EncoderDecoderCache)
