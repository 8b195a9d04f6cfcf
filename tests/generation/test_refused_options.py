"""What stock code refuses is refused with the same words, and what it takes gives its tokens: options of ``generate()``
alone and together, over keys, states, both, and encoders."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import causal_lm_types
import encoder_decoder_types
import pytest
import torch
from models import CPU, build, prompt, require_native, skip_if_cache_is_named_otherwise
from transformers import DynamicCache, PreTrainedModel, StaticCache

import hf_fastpath
from hf_fastpath.compat import CACHE

MODELS = ("llama", "gpt2", "mamba", "falcon_mamba", "mamba2", "bamba", "lfm2", "glm4", "bart", "t5")
_CHUNKS = tuple(dict(prefill_chunk_size=size) for size in (0, -1, 1, 4, 64, 2.0, True, "a"))
_WITH_CHUNKS = (
    *(dict(num_beams=2), dict(do_sample=True), dict(prompt_lookup_num_tokens=2), dict(use_cache=False)),
    *(dict(cache_implementation="static"), dict(output_scores=True), dict(output_attentions=True)),
    dict(num_return_sequences=2, do_sample=True),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    *_CHUNKS,
    *(each | dict(prefill_chunk_size=4) for each in _WITH_CHUNKS),
    *(dict(cache_implementation=each) for each in ("static", "offloaded", "quantized", "nope", "sliding_window")),
    *(
        dict(prompt_lookup_num_tokens=2),
        dict(prompt_lookup_num_tokens=0),
        dict(prompt_lookup_num_tokens=2, num_beams=2),
    ),
    *(dict(prompt_lookup_num_tokens=2, use_cache=False), dict(stop_strings=["a"]), dict(token_healing=True)),
    *(dict(num_beams=2, num_return_sequences=3), dict(num_return_sequences=2), dict(num_beams=0), dict(num_beams=-1)),
    *(dict(num_beam_groups=2, num_beams=2), dict(penalty_alpha=0.6, top_k=4), dict(dola_layers="low")),
    *(dict(force_words_ids=[[5]]), dict(constraints=[]), dict(early_stopping="x", num_beams=2), dict(low_memory=True)),
    *(dict(temperature=0.0, do_sample=True), dict(top_p=2.0, do_sample=True), dict(top_k=-3, do_sample=True)),
    *(dict(min_p=2.0, do_sample=True), dict(repetition_penalty=0.0), dict(no_repeat_ngram_size=-2)),
    *(dict(bad_words_ids=[[]]), dict(forced_bos_token_id=500), dict(suppress_tokens=[500])),
    *(
        dict(max_new_tokens=0),
        dict(max_new_tokens=-1),
        dict(max_new_tokens=2.5),
        dict(max_length=2),
        dict(min_length=30),
    ),
    *(dict(eos_token_id=[]), dict(eos_token_id=5000), dict(eos_token_id=-1), dict(pad_token_id=-100, eos_token_id=3)),
    *(dict(unknown_argument=3), dict(output_attentions=True), dict(position_ids=torch.arange(4)[None])),
    *(dict(attention_mask=torch.ones(1, 4).long()), dict(attention_mask=torch.ones(1, 1, 9, 9))),
    *(dict(attention_mask=torch.zeros(1, 9).long()), dict(synced_gpus=True), dict(streamer=3, num_beams=2)),
    *(dict(logits_to_keep=0), dict(logits_to_keep=3), dict(guidance_scale=1.5), dict(encoder_repetition_penalty=1.5)),
    *({CACHE: each} for each in ("another", "static", "filled", ((1, 2),))),
)


@cache
def pair(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    require_native(CPU)
    skip_if_cache_is_named_otherwise(name)
    if name in ("llama", "gpt2"):
        stock = build(name)
    else:
        kind = encoder_decoder_types if name in ("bart", "t5") else causal_lm_types
        stock = kind.small_model(name).eval()
    return stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True)


def answer(model: PreTrainedModel, ids: torch.Tensor, options: dict[str, Any]) -> Any:
    """Return the tokens, or the error in which the call ends."""
    given = {"input_ids": ids, "max_new_tokens": 6, "do_sample": False} | options
    if "max_length" in options:
        del given["max_new_tokens"]
    if given.get(CACHE) == "another":
        given[CACHE] = DynamicCache()
    elif given.get(CACHE) == "static":
        given[CACHE] = StaticCache(config=model.config, max_cache_len=40)
    torch.manual_seed(0)
    try:
        if given.get(CACHE) == "filled":
            given[CACHE] = DynamicCache(config=model.config)
            model(ids[:, :5], use_cache=True, **{CACHE: given[CACHE]})
        return model.generate(**given).tolist()
    except Exception as error:  # whatever stock code ends in
        return type(error), str(error)


@pytest.mark.every(5)
@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("name", MODELS)
def test_the_same_words(name, batch):
    stock, ours = pair(name)
    ids, refused = prompt(CPU, batch, 9) % 150 + 3, 0
    for options in OPTIONS:
        expected = answer(stock, ids, options)
        assert answer(ours, ids, options) == expected, options
        refused += isinstance(expected, tuple)
    assert 20 < refused < len(OPTIONS) - 20


@pytest.mark.parametrize("length", (1, 4, 9))
@pytest.mark.parametrize("name", ("mamba", "falcon_mamba", "mamba2"))
def test_chunks_over_states_alone(name, length):
    """Transformers asks such a cache for its length, which it has none of."""
    ours = pair(name)[1]
    for size in (1, 3, 100):
        with pytest.raises(ValueError, match="get_seq_length"):
            ours.generate(prompt(CPU, 1, length) % 150 + 3, max_new_tokens=3, prefill_chunk_size=size)
