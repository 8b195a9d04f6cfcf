"""Every token that ``generate()`` gives is counted once, as fast or as stock, whatever the mode and the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import causal_lm_types
import encoder_decoder_types
import multimodal_types
import pytest
import torch
from models import CPU, Counts, Tokens, build, counting, prompt, require_native, skip_if_cache_is_named_otherwise
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

import hf_fastpath
from hf_fastpath.compat import sequences_of

NEW = 7


class CallsAtThird(LogitsProcessor):
    """Calls a function at its third token."""

    def __init__(self, function: Callable[[], None]):
        self.function, self.calls = function, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 3:
            self.function()
        return scores


@dataclass
class Case:
    """A patched model, and arguments of ``generate()`` for a number of prompts.

    Attributes:
        model: the model.
        inputs: makes the arguments.
        length: number of positions of what ``generate()`` gives that are the prompt's, of one prompt.
        channels: tokens of a position.
    """

    model: PreTrainedModel
    inputs: Callable[[int], dict[str, Any]]
    length: int
    channels: int = 1


def _text(batch: int) -> dict[str, Any]:
    return {"input_ids": prompt(CPU, batch, 9) % 150 + 3}


@cache
def case(name: str) -> Case:
    require_native(CPU)
    skip_if_cache_is_named_otherwise(name)
    made: dict[str, Callable[[], Case]] = {
        "llama": lambda: Case(build("llama"), _text, 9),
        "gpt2": lambda: Case(build("gpt2"), _text, 9),
        "glm4": lambda: Case(causal_lm_types.small_model("glm4"), _text, 9),
        "mamba": lambda: Case(causal_lm_types.small_model("mamba"), _text, 9),
        "bart": lambda: Case(encoder_decoder_types.small_model("bart"), _text, 1),
        "t5": lambda: Case(encoder_decoder_types.small_model("t5"), _text, 1),
        "dia": lambda: Case(encoder_decoder_types.small_model("dia"), _text, 1, 3),
        "llava": lambda: Case(
            multimodal_types.small_model("llava"), lambda batch: multimodal_types.prompt("llava", (1,) * batch), 12
        ),
    }
    found = made[name]()
    found.model = hf_fastpath.patch(copy.deepcopy(found.model), quiet=True)
    found.model.generation_config.eos_token_id = None
    return found


def by_hand(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
    """A user's own loop."""
    inputs = model.prepare_inputs_for_generation(input_ids, **model_kwargs)
    for _ in range(3):
        token = model(**inputs, return_dict=True).logits[:, -1:].argmax(-1)
        input_ids = torch.cat((input_ids, token), dim=1)
        inputs = {"input_ids": input_ids, "use_cache": False}
    return input_ids


def by_a_loop_of_transformers(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    """A user's own loop that calls one of transformers' and adds a token."""
    found = model._sample(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
    return torch.cat((found, found[:, -1:]), dim=1)


def twice(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
    """A user's own loop that calls ``generate()``."""
    return model.generate(input_ids, max_new_tokens=NEW, do_sample=False)


def own_sample(self, input_ids, *args, **kwargs):
    """A loop of a class, three tokens long."""
    return torch.cat((input_ids, input_ids[:, :3]), dim=1)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": dict(do_sample=True),
    "several texts": dict(do_sample=True, num_return_sequences=2),
    "beams": dict(num_beams=3, num_return_sequences=2),
    "sampled beams": dict(num_beams=2, do_sample=True),
    "beams and states": dict(num_beams=2, output_hidden_states=True, return_dict_in_generate=True),
    "drafts of the prompt": dict(prompt_lookup_num_tokens=2),
    "without a cache": dict(use_cache=False),
    "beams without a cache": dict(num_beams=2, use_cache=False),
    "states": dict(output_hidden_states=True, return_dict_in_generate=True),
    "scores": dict(output_scores=True, return_dict_in_generate=True),
    "an end": dict(eos_token_id=list(range(40, 90)), pad_token_id=0),
    "beams and an end": dict(num_beams=3, eos_token_id=list(range(40, 90)), pad_token_id=0),
    "chunks": dict(prefill_chunk_size=4),
    "a static cache": dict(cache_implementation="static", disable_compile=True),
}
#: modes that stock refuses of a model
REFUSED = {
    "mamba": {"drafts of the prompt", "chunks"},
    "dia": {"several texts", "drafts of the prompt", *(mode for mode in MODES if "beams" in mode)},
}


def check(name: str, batch: int, most_kinds: int = 1, **options: Any) -> Counts:
    """Check that a call of ``generate()`` counts as many tokens as it gives, and return the counts."""
    of = case(name)
    given = of.inputs(batch) | dict(max_new_tokens=NEW, do_sample=False) | options
    with counting(of.model) as counts:
        found = sequences_of(of.model.generate(**given))
    made = (found.shape[1] - (0 if "inputs_embeds" in given else of.length)) * len(found) * of.channels
    assert made > 0 and counts.fast + counts.fallback == made
    assert (counts.fast > 0) + (counts.fallback > 0) <= most_kinds
    return counts


@pytest.mark.every(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ("llama", "gpt2", "glm4", "mamba", "bart", "t5", "llava", "dia"))
def test_every_mode(name, mode):
    batch = 1 if "drafts" in mode else 2
    if mode in REFUSED.get(name, ()):
        with pytest.raises(ValueError, match="stateful models|Attention layers|incompatible"):
            check(name, batch, **MODES[mode])
        return
    check(name, batch, **MODES[mode])


@pytest.mark.parametrize("name", ("llama", "glm4"))
def test_streamed_tokens_and_embeddings(name):
    streamer = Tokens()
    assert check(name, 1, streamer=streamer).fast == NEW == len(streamer.tokens) - 9
    ids = _text(2)["input_ids"]
    check(name, 2, input_ids=None, inputs_embeds=case(name).model.get_input_embeddings()(ids).detach())
    check(name, 1, input_ids=None, inputs_embeds=case(name).model.get_input_embeddings()(ids[:1]), num_beams=2)


@pytest.mark.parametrize("name", ("llama", "glm4"))
@pytest.mark.parametrize("is_patched", (False, True), ids=("stock assistant", "patched assistant"))
def test_drafts_of_an_assistant(name, is_patched):
    """The drafts are counted of the assistant alone."""
    assistant = build("llama", seed=3, vocab_size=case(name).model.config.vocab_size)
    assistant.generation_config.eos_token_id = None
    check(name, 1, assistant_model=hf_fastpath.patch(assistant, quiet=True) if is_patched else assistant)
    check(name, 1, assistant_model=assistant, output_hidden_states=True, return_dict_in_generate=True)


def test_drafts_of_an_early_exit():
    """What a model drafts for itself is not counted twice."""
    assert check("llama", 1, assistant_early_exit=1).fallback == NEW


@pytest.mark.parametrize("loop", (by_hand, by_a_loop_of_transformers, twice))
@pytest.mark.parametrize("name", ("llama", "glm4"))
def test_loops_of_the_user(name, loop):
    counts = check(name, 2, most_kinds=2, custom_generate=loop)
    assert counts.fallback == {by_hand: 6, by_a_loop_of_transformers: 2, twice: 0}[loop]


@pytest.mark.parametrize("name", ("llama", "glm4"))
def test_loops_in_folders(name, tmp_path):
    """Transformers has moved contrastive search, DoLa, and beams with constraints or in groups to such files."""
    (tmp_path / "custom_generate").mkdir()
    lines = "def generate(model, input_ids, **kwargs):", "    import torch", "    return torch.cat((input_ids,) * 2, 1)"
    (tmp_path / "custom_generate" / "generate.py").write_text("\n".join(lines))
    (tmp_path / "config.json").write_text("{}")
    assert check(name, 2, custom_generate=str(tmp_path), trust_remote_code=True).fallback == 18


@pytest.mark.parametrize(
    "options", ({}, dict(num_beams=2), dict(prompt_lookup_num_tokens=2)), ids=("", "beams", "drafts")
)
@pytest.mark.parametrize("name", ("llama", "glm4"))
def test_stock_takes_over(name, options):
    """A hook that comes at the third token: the tokens behind it are stock's."""
    layer, hooks = case(name).model.model.layers[0].mlp, []
    reminder = CallsAtThird(lambda: hooks.append(layer.register_forward_hook(lambda *_: None)))
    try:
        counts = check(name, 1, most_kinds=2, logits_processor=LogitsProcessorList([reminder]), **options)
    finally:
        for hook in hooks:
            hook.remove()
    assert counts.fast and counts.fallback


def test_requests_in_one_row():
    """generate_batch(), and the kind of cache that leads to it."""
    model, small = case("llama").model, ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    options = dict(continuous_batching_config=small, warmup=False)
    config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    for stock, expected in (({}, (10, 0)), ({"record_timestamps": True}, (0, 10))):
        with counting(model) as counts:
            model.generate_batch([[5, 6, 7], [8, 9]], generation_config=config, **options, **stock)
        assert (counts.fast, counts.fallback) == expected
    with counting(model) as counts:
        found = model.generate(
            torch.tensor([[5, 6, 7]]), generation_config=config, cache_implementation="paged", **options
        )
    assert found.shape == (1, 1, 8) and (counts.fast, counts.fallback) == (0, 5)


def test_a_class_with_a_loop_of_its_own():
    """Such a class passes by our loops, and its tokens are stock's."""
    model = copy.deepcopy(build("llama"))
    model.__class__ = type("OwnLoop", (type(model),), {"_sample": own_sample})
    hf_fastpath.patch(model, quiet=True)
    ids = _text(2)["input_ids"]
    with counting(model) as counts:
        assert model.generate(ids, max_new_tokens=NEW).shape == (2, 12)
    assert (counts.fast, counts.fallback) == (0, 6)
    with counting(model) as counts:
        assert model.generate(ids, max_new_tokens=NEW, do_sample=False, num_beams=2).shape == (2, 16)
    assert (counts.fast, counts.fallback) == (0, 14)
