"""The ways in which generate() and a model are used: each gives what it gives with stock, for every causal-LM type.

`make test` takes a few types, `make test-full` all. A way that stock refuses is not compared.
"""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from models import CPU, Tokens, require_native
from recorded_types import over_types, pair_or_skip
from torch import nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_fastpath.compat import CACHE

#: of each test every fourth case; all of them with ``--full``
pytestmark = pytest.mark.every(4)

GREEDY = dict(max_new_tokens=8, do_sample=False)
SAMPLED = dict(do_sample=True)
ENDS = dict(eos_token_id=list(range(40)), pad_token_id=0)
#: recorded, of states, of both, of experts in another order of calls, of a file
_USUAL = ("glm4", "mamba", "lfm2", "mpt", "mixtral")
Way = Callable[[PreTrainedModel], Any]


def ids(model: PreTrainedModel, batch: int = 1, length: int = 7, seed: int = 0) -> torch.Tensor:
    size = model.config.get_text_config().vocab_size - 1
    return torch.randint(3, size, (batch, length), generator=torch.Generator().manual_seed(seed))


def generate(model: PreTrainedModel, batch: int = 1, **options: Any) -> Any:
    return model.generate(ids(model, batch), **GREEDY | options)


def masked(model: PreTrainedModel, *zeros: tuple[int, int]) -> torch.Tensor:
    """Generate for two prompts, with zeros at these places of the mask."""
    mask = torch.ones(2, 7, dtype=torch.long)
    for place in zeros:
        mask[place] = 0
    return model.generate(ids(model, 2), attention_mask=mask, **GREEDY)


def scores(model: PreTrainedModel, **options: Any) -> list[Any]:
    out = generate(model, 2, return_dict_in_generate=True, output_scores=True, **options)
    return [out.sequences, *out.scores]


def hidden_states(model: PreTrainedModel) -> list[torch.Tensor]:
    out = generate(model, return_dict_in_generate=True, output_hidden_states=True)
    return [out.sequences, *(each for step in out.hidden_states for each in step if isinstance(each, torch.Tensor))]


def turns(
    model: PreTrainedModel, change: Callable[[Any], Any] = lambda cache: None, batch: int = 1, rows: Any = slice(None)
) -> torch.Tensor:
    """A conversation over the cache that the first turn gives back, which is changed in between so that it holds
    ``rows`` of the texts."""
    out = generate(model, batch, return_dict_in_generate=True)
    change(out[CACHE])
    texts = out.sequences[rows]
    text = torch.cat((texts, ids(model, len(texts), 3, seed=1)), dim=1)
    return model.generate(text, **{CACHE: out[CACHE]}, **GREEDY)


def over_a_dynamic_cache(model: PreTrainedModel) -> list[torch.Tensor]:
    cache = DynamicCache(config=model.config)
    first = generate(model, **{CACHE: cache})
    return [first, model.generate(torch.cat((first, ids(model, 1, 3, 1)), dim=1), **{CACHE: cache}, **GREEDY)]


def forwards(model: PreTrainedModel) -> list[torch.Tensor]:
    tokens = ids(model, 2)
    with torch.no_grad():
        out = model(tokens, use_cache=True)
        found = [out.logits]
        for place in range(3):
            found.append(model(tokens[:, place : place + 1], **{CACHE: out[CACHE]}, use_cache=True).logits)
    return found


def masked_forwards(model: PreTrainedModel) -> list[torch.Tensor]:
    tokens = ids(model, 2)
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        out = model(tokens, attention_mask=mask, use_cache=True)
        found = [out.logits]
        for place in range(3):
            mask = torch.cat((mask, mask[:, :1]), dim=1)
            token = tokens[:, place : place + 1]
            found.append(model(token, attention_mask=mask, **{CACHE: out[CACHE]}, use_cache=True).logits)
    return found


def backward(model: PreTrainedModel) -> list[torch.Tensor]:
    tokens = ids(model, 2)
    loss = model(tokens, labels=tokens).loss
    model.zero_grad()
    loss.backward()
    found = [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
    model.zero_grad()
    return found


class _Processor(LogitsProcessor):
    """An object of the user's, which calls ``function`` with the tokens so far and the scores."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
        self.function = function

    def __call__(self, input_ids, scores):
        return self.function(input_ids, scores)


class _Criterion(StoppingCriteria):
    """The same, which is asked whether texts end."""

    def __init__(self, function: Callable[[torch.Tensor, Any], torch.Tensor]):
        self.function = function

    def __call__(self, input_ids, scores, **kwargs):
        return self.function(input_ids, scores)


def processed(model: PreTrainedModel, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return generate(model, 2, logits_processor=LogitsProcessorList([_Processor(function)]))


def stopped(model: PreTrainedModel, function: Callable[[torch.Tensor, Any], torch.Tensor]) -> torch.Tensor:
    return generate(model, 2, stopping_criteria=StoppingCriteriaList([_Criterion(function)]))


def edited_meanwhile(model: PreTrainedModel) -> torch.Tensor:
    weight = [each for each in model.parameters() if each.dim() == 2][-1]
    before = weight.detach().clone()

    def edit(tokens, found):
        if tokens.shape[1] == 10:
            weight.data.mul_(-1.5)
        return found

    try:
        return processed(model, edit)
    finally:
        weight.data.copy_(before)


def nested(model: PreTrainedModel) -> torch.Tensor:
    def also(tokens, found):
        model.generate(tokens[:1, -3:], max_new_tokens=2, do_sample=False)
        return torch.zeros(len(tokens), dtype=torch.bool)

    return stopped(model, also)


def broken_off(model: PreTrainedModel) -> torch.Tensor:
    def fail(tokens, found):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped(model, fail)
    return generate(model, 2)


def streamed(model: PreTrainedModel) -> torch.Tensor:
    streamer = Tokens()
    generate(model, streamer=streamer)
    return torch.tensor(streamer.tokens)


def in_threads(model: PreTrainedModel) -> list[torch.Tensor]:
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda length: model.generate(ids(model, 1, length), **GREEDY), (5, 6, 7)))


def pickled(model: PreTrainedModel) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return generate(torch.load(file, weights_only=False))


#: name -> what is done with a model that nothing changes
WAYS: dict[str, Way] = {
    "one token": lambda model: model.generate(ids(model, 1, 1), **GREEDY),
    "a long prompt": lambda model: model.generate(ids(model, 1, 70), **GREEDY),
    "one new token": lambda model: generate(model, 2, max_new_tokens=1),
    "no more than a length": lambda model: model.generate(ids(model), max_length=11, do_sample=False),
    "at least a length": lambda model: generate(model, min_length=12, **ENDS),
    "ids of 32 bits": lambda model: model.generate(ids(model, 2).int(), **GREEDY),
    "every other id": lambda model: model.generate(ids(model, 2, 14)[:, ::2], **GREEDY),
    "embeddings": lambda model: model.generate(inputs_embeds=model.get_input_embeddings()(ids(model, 2)), **GREEDY),
    "padding in front": lambda model: masked(model, (0, slice(0, 3))),
    "padding behind": lambda model: masked(model, (0, slice(5, 7))),
    "holes": lambda model: masked(model, (0, 3)),
    "several texts": lambda model: generate(model, num_return_sequences=3, top_k=5, **SAMPLED),
    "ends": lambda model: generate(model, 2, temperature=3.0, **ENDS, **SAMPLED),
    "min_p": lambda model: generate(model, 2, min_p=0.05, **SAMPLED),
    "typical_p": lambda model: generate(model, 2, typical_p=0.5, **SAMPLED),
    "top_k and top_p": lambda model: generate(model, 2, top_k=7, top_p=0.6, temperature=1.4, **SAMPLED),
    "beams": lambda model: scores(model, num_beams=3, num_return_sequences=2),
    "sampled beams": lambda model: generate(model, 2, num_beams=2, **SAMPLED),
    "prompt lookup": lambda model: generate(model, prompt_lookup_num_tokens=2),
    "an assistant": lambda model: generate(model, assistant_model=copy.deepcopy(model)),
    "processors": lambda model: scores(model, repetition_penalty=1.3, no_repeat_ngram_size=2, bad_words_ids=[[5]]),
    "a bias": lambda model: generate(model, 2, sequence_bias={(7,): 5.0}, suppress_tokens=[3, 4]),
    "guidance": lambda model: generate(model, 2, guidance_scale=1.7),
    "allowed tokens": lambda model: generate(model, 2, prefix_allowed_tokens_fn=lambda row, _: [4, 5, 6, 7 + row]),
    "a config": lambda model: model.generate(ids(model), GenerationConfig(max_new_tokens=5, pad_token_id=0)),
    "no cache": lambda model: generate(model, use_cache=False),
    "a static cache": lambda model: generate(model, cache_implementation="static"),
    "pieces of a prompt": lambda model: generate(model, 2, prefill_chunk_size=3),
    "a copy": lambda model: generate(copy.deepcopy(model), 2),
    "a pickled copy": pickled,  # before hooks are left behind, which cannot be pickled, by what comes next
    "hidden states": hidden_states,
    "a conversation": turns,
    "a copied conversation": lambda model: turns(model, lambda cache: cache.batch_repeat_interleave(3), rows=[0, 0, 0]),
    "a reordered conversation": lambda model: turns(
        model, lambda cache: cache.reorder_cache(torch.tensor([1, 0])), batch=2, rows=[1, 0]
    ),
    "transformers' own cache": over_a_dynamic_cache,
    "forwards": forwards,
    "masked forwards": masked_forwards,
    "a backward": backward,
    "scores changed in place": lambda model: processed(model, lambda _, found: found[:, 3:40].neg_() is None or found),
    "a criterion": lambda model: stopped(model, lambda tokens, _: torch.full((2,), tokens.shape[1] > 10)),
    "an edit meanwhile": edited_meanwhile,
    "a call in a call": nested,
    "a call that was broken off": broken_off,
    "a streamer": streamed,
    "threads": in_threads,
}
#: what stock refuses of a type that `make test` takes
REFUSED = {
    "mamba": {"prompt lookup", "an assistant", "pieces of a prompt", "a copied conversation"},
    "lfm2": {"a copied conversation"},
}


def edited(model: PreTrainedModel) -> None:
    for each in model.parameters():
        each.data.mul_(1.01)


def swapped_data(model: PreTrainedModel) -> None:
    for each in model.parameters():
        each.data = (each.data * 0.98).clone()


def loaded(model: PreTrainedModel) -> None:
    model.load_state_dict({name: each.roll(1, 0) if each.dim() else each for name, each in model.state_dict().items()})


def rounded(model: PreTrainedModel) -> None:
    model.bfloat16().float()


def other_norms(model: PreTrainedModel) -> None:
    for module in model.modules():
        for name in ("variance_epsilon", "eps"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.3)


def hooked(model: PreTrainedModel) -> None:
    linears(model)[-2].register_forward_hook(lambda module, given, out: out * 1.5)


def linears(model: PreTrainedModel) -> list[nn.Linear]:
    return [each for each in model.modules() if isinstance(each, nn.Linear)]


def other_linear(model: PreTrainedModel) -> None:
    """A layer with an own forward takes the place of one."""

    class Louder(nn.Linear):
        def forward(self, x):
            return 1.25 * super().forward(x)

    found = linears(model)[0]
    found.__class__ = Louder


def new_head(model: PreTrainedModel) -> None:
    head = copy.deepcopy(model.get_output_embeddings())
    head.weight = nn.Parameter(head.weight.detach().flip(0))
    model.set_output_embeddings(head)


def layers_in_another_order(model: PreTrainedModel) -> None:
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) > 1]
    lists[0][0], lists[0][1] = lists[0][1], lists[0][0]


def eager(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")


def resized(model: PreTrainedModel) -> None:
    model.resize_token_embeddings(model.config.get_text_config().vocab_size + 5, mean_resizing=False)


def other_forward(model: PreTrainedModel) -> None:
    forward = model.forward

    def negated(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = -out.logits
        return out

    model.forward = negated


#: what is changed in a model that has been patched and has decoded
CHANGES = (
    *(edited, swapped_data, loaded, rounded, other_norms, hooked, other_linear, new_head),
    *(layers_in_another_order, eager, resized, other_forward),
)


@functools.cache
def pair(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Stock and patched, made once."""
    require_native(CPU)
    return pair_or_skip(model_type)


def assert_same(way: Way, ours: PreTrainedModel, stock: PreTrainedModel) -> bool:
    """Assert that both give the same; return whether stock gives anything."""
    torch.manual_seed(5)
    try:
        expected = way(stock)
    except Exception:  # of any model's code
        return False
    torch.manual_seed(5)
    found = way(ours)
    for one, other in zip(*(each if isinstance(each, list) else [each] for each in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    return True


@over_types(_USUAL)
def test_every_way_gives_what_stock_gives(model_type):
    stock, ours = pair(model_type)
    refused = set()
    for name, way in WAYS.items():
        try:
            if not assert_same(way, ours, stock):
                refused.add(name)
        except Exception as error:
            error.add_note(f"{model_type}, {name}")
            raise
    assert model_type not in _USUAL or refused == REFUSED.get(model_type, set())


@over_types(_USUAL)
def test_every_change_takes_effect(model_type):
    for change in CHANGES:
        stock, ours = (copy.deepcopy(each) for each in pair(model_type))
        generate(ours)
        try:
            torch.manual_seed(3)
            change(stock)
            generate(stock)
        except Exception:  # stock takes no such change
            assert model_type not in _USUAL
            continue
        torch.manual_seed(3)
        change(ours)
        try:
            assert assert_same(generate, ours, stock)
        except Exception as error:
            error.add_note(f"{model_type}, {change.__name__}")
            raise
