"""Loops of the user's own over ``model()``: they get our cache, and new tokens over it are steps of a plan."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import causal_lm_types
import pytest
import torch
from models import (
    SHORT,
    WINDOW,
    build,
    counting,
    hidden_files,
    instances,
    left_padded,
    prompt,
    require_native,
)
from parity import LogitRule, RoundingCache, float64_copy, positions, walk
from transformers import DynamicCache, PreTrainedModel

import hf_fastpath
from hf_fastpath import FastpathCache
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.loops import own_loop
from hf_fastpath.patching.state import state_of

#: of each test every other case; all of them with ``--full``
pytestmark = pytest.mark.every(2)

LISTED = ("gpt2", "llama", "mistral", "gemma3_text", "qwen3_moe")
RECORDED = ("glm4", "lfm2", "bloom")
#: families whose forwards do not count on from the cache where they get no position ids -> whether without padding
COUNT_OTHERWISE = {"roberta": True, "bamba": True, "opt": False}


def pair(name: str, device: torch.device, **options) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return (stock, patched): the same random model twice."""
    require_native(device)
    is_listed = name in LISTED or name == "opt"
    stock = (build(name) if is_listed else causal_lm_types.small_model(name)).to(device)
    return stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True, **options)


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """Write down how many tokens of a sequence each step of a plan reads, in forwards alone."""
    found: list[int] = []
    one, several = own_loop._logits, own_loop.DraftReader.read_piece
    monkeypatch.setattr(own_loop, "_logits", lambda *given: (found.append(1), one(*given))[1])
    monkeypatch.setattr(
        own_loop.DraftReader, "read_piece", lambda self, tokens: (found.append(len(tokens)), several(self, tokens))[1]
    )
    return found


@torch.no_grad()
def own_loop_of(
    model: PreTrainedModel,
    ids: torch.Tensor,
    count: int = 20,
    mask: torch.Tensor | None = None,
    gives_positions: bool = False,
    edit: Callable[[Any], Any] = lambda cache: None,
    text: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and logits of a loop as people write it.

    Args:
        count: forwards behind the prompt's.
        edit: called with the cache before each forward.
        text: the tokens to go on with, [batch, count], instead of the most likely ones.
    """
    given: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
    if gives_positions:
        given["position_ids"] = positions(mask)
    out = model(ids, use_cache=True, **given)
    cache, tokens, rows = out[CACHE], [], [out.logits[:, -1]]
    for place in range(count):
        token = out.logits[:, -1:].argmax(-1) if text is None else text[:, place : place + 1]
        edit(cache)
        if mask is not None:
            mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
            given["attention_mask"] = mask
        if gives_positions:
            given["position_ids"] = positions(mask)[:, -1:]
        out = model(token, **{CACHE: cache}, **given)
        assert out[CACHE] is cache
        tokens.append(token)
        rows.append(out.logits[:, -1])
    return torch.cat(tokens, dim=1), torch.stack(rows, dim=1)


def assert_alike(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(found[0], expected[0])
    assert (found[1] - expected[1]).abs().max() <= 1e-4 * expected[1].abs().max()


# ---- tokens and logits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", (*LISTED, *RECORDED))
@pytest.mark.parametrize("batch", (1, 3))
def test_tokens_and_logits_are_stocks(name, batch, device, steps):
    """Texts cross the windows; the first steps follow padding, with and without position ids."""
    stock, ours = pair(name, device)
    given = left_padded(device, batch, WINDOW - 4)
    ids, mask = given["input_ids"] % stock.config.vocab_size, given["attention_mask"]
    assert_alike(own_loop_of(ours, ids), own_loop_of(stock, ids))
    assert steps == [1] * 20
    assert_alike(own_loop_of(ours, ids, 4, mask), own_loop_of(stock, ids, 4, mask))
    if "position_ids" in inspect.signature(stock.forward).parameters:
        assert_alike(own_loop_of(ours, ids, 4, mask, True), own_loop_of(stock, ids, 4, mask, True))
        assert steps == [1] * 28
    assert not hf_fastpath.report(ours).stats["reasons"]


@pytest.mark.parametrize("name", COUNT_OTHERWISE)
@pytest.mark.parametrize("is_padded", (False, True))
def test_positions_that_are_not_given(name, is_padded, device, steps):
    stock, ours = pair(name, device)
    given = left_padded(device, 3, 8)
    ids, mask = given["input_ids"] % stock.config.vocab_size, given["attention_mask"]
    options = (4, mask) if is_padded else (4,)
    assert_alike(own_loop_of(ours, ids, *options), own_loop_of(stock, ids, *options))
    assert not steps if is_padded or COUNT_OTHERWISE[name] else len(steps) == 4


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", ("llama", "mistral", "glm4"))
def test_logits_are_as_near_to_the_truth_as_stocks(name, dtype, device, steps):
    require_native(device)
    stock = (causal_lm_types.small_model(name) if name in RECORDED else build(name)).to(device, dtype)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    ref, rule = float64_copy(stock), LogitRule()
    for seed in range(3):
        text = prompt(device, 2, 60, seed) % stock.config.vocab_size
        lengths = [10] + [1] * 50
        caches = FastpathCache(ours.config), DynamicCache(config=stock.config), RoundingCache(stock.config, dtype)
        rule.add(*(walk(each, text, lengths, cache)[:, 10:] for each, cache in zip((ours, stock, ref), caches)))
    rule.check(name)
    assert len(steps) >= 3 * 50 - 1


def test_logits_are_the_callers(device):
    _, ours = pair("llama", device)
    with torch.no_grad():
        out = ours(prompt(device), use_cache=True)
        token, kept = prompt(device, 1, 1), []
        for _ in range(4):
            out = ours(token, **{CACHE: out[CACHE]})
            kept.append((out.logits, out.logits.clone()))
    assert all(torch.equal(now, before) for now, before in kept)
    assert not kept[0][0].is_inference() and not kept[0][0].requires_grad


@pytest.mark.parametrize("name", ("llama", "lfm2"))
def test_inference_mode_and_no_grad_in_turns(name, device, steps):
    stock, ours = pair(name, device)
    ids = prompt(device) % stock.config.vocab_size
    with torch.inference_mode():
        out, row = ours(ids, use_cache=True), []
    for place in range(6):
        with torch.inference_mode() if place % 2 else torch.no_grad():
            out = ours(ids[:, place : place + 1], **{CACHE: out[CACHE]})
        row.append(out.logits.clone())
    with torch.no_grad():
        expected = stock(torch.cat((ids, ids[:, :6]), dim=1), use_cache=False).logits[:, -6:]
    assert torch.allclose(torch.cat(row, dim=1), expected, rtol=1e-4, atol=1e-4) and len(steps) == 6


# ---- what a forward is given, and gives ---------------------------------------------------------------------------


def of_token(ids: torch.Tensor, past: int) -> dict[str, dict[str, Any]]:
    """Arguments of the forward of one token -> whether it is a step."""
    ones, device = ids.new_ones(1, past + 1), ids.device
    return {
        "nothing": {},
        "dict": dict(return_dict=True),
        "no dict": dict(return_dict=False),
        "None": dict(return_dict=None, output_attentions=None, output_hidden_states=False, inputs_embeds=None),
        "mask": dict(attention_mask=ones),
        "bool mask": dict(attention_mask=ones.bool()),
        "padding": dict(attention_mask=(torch.arange(past + 1, device=device) > 2).long()[None]),
        "positions": dict(position_ids=torch.tensor([[past]], device=device)),
        "other positions": dict(position_ids=torch.tensor([[past + 7]], device=device)),
        "logits to keep": dict(logits_to_keep=1),
        "use_cache": dict(use_cache=True),
        "cache_position": dict(cache_position=torch.tensor([past], device=device)),
    }


NO_STEPS = {
    "hidden states": lambda model, past: dict(output_hidden_states=True),
    "attentions": lambda model, past: dict(output_attentions=True),
    "labels": lambda model, past: dict(labels=torch.ones(1, 1, dtype=torch.long, device=model.device)),
    "tensor of logits to keep": lambda model, past: dict(logits_to_keep=torch.tensor([0], device=model.device)),
    "hole": lambda model, past: dict(attention_mask=(torch.arange(past + 1, device=model.device) != 3).long()[None]),
    "4D mask": lambda model, past: dict(attention_mask=torch.zeros(1, 1, 1, past + 1, device=model.device)),
    "embeddings": lambda model, past: dict(
        input_ids=None, inputs_embeds=model.get_input_embeddings()(torch.tensor([[5]], device=model.device))
    ),
}


def outputs_after(model: PreTrainedModel, ids: torch.Tensor, **given: Any) -> Any:
    """Return the output of a forward of one token behind others, over a cache whose class is known."""
    with torch.no_grad():
        cache = model(ids, use_cache=True)[CACHE]
        model(ids[:, :1], **{CACHE: cache})
        return model(**({"input_ids": ids[:, 1:2]} | given), **{CACHE: cache})


def assert_same_outputs(found: Any, expected: Any) -> None:
    assert type(found) is type(expected) and len(found) == len(expected)
    pairs = (
        zip(found.items(), expected.items()) if isinstance(found, dict) else zip(enumerate(found), enumerate(expected))
    )
    for (name, one), (other_name, other) in pairs:
        assert name == other_name
        if isinstance(one, torch.Tensor):
            assert one.shape == other.shape and one.dtype == other.dtype
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", ("gpt2", "llama", "glm4"))
def test_arguments_of_a_step(name, device, steps):
    stock, ours = pair(name, device)
    ids = prompt(device) % stock.config.vocab_size
    for what, given in of_token(ids, ids.shape[1] + 1).items():
        steps.clear()
        assert_same_outputs(outputs_after(ours, ids, **given), outputs_after(stock, ids, **given))
        assert len(steps) == 2, what


@pytest.mark.parametrize("what", NO_STEPS)
@pytest.mark.parametrize("name", ("llama", "glm4"))
def test_what_is_more_than_a_step(name, what, device, steps):
    stock, ours = pair(name, device)
    for model in (stock, ours):
        if "attentions" in what:
            model.set_attn_implementation("eager")
    ids = prompt(device) % stock.config.vocab_size
    given = NO_STEPS[what](stock, ids.shape[1] + 1)
    assert_same_outputs(outputs_after(ours, ids, **given), outputs_after(stock, ids, **given))
    assert len(steps) == 1


def test_masks_of_kinds_of_layers(device, steps):
    stock, ours = pair("gemma3_text", device)
    given = dict(attention_mask={"full_attention": None, "sliding_attention": None})
    assert_same_outputs(outputs_after(ours, prompt(device), **given), outputs_after(stock, prompt(device), **given))
    assert len(steps) == 1
    with torch.no_grad():
        assert type(ours(prompt(device), **given)[CACHE]) is DynamicCache


def test_a_config_that_asks_for_more(device, steps):
    stock, ours = pair("llama", device)
    ids = prompt(device)
    for model in (stock, ours):
        model.config.output_hidden_states = True
    assert_same_outputs(outputs_after(ours, ids), outputs_after(stock, ids))
    assert len(steps) == 0


@pytest.mark.parametrize("count", (2, 5, 16))
@pytest.mark.parametrize("name", ("gpt2", "llama", "mistral", "glm4"))
def test_several_tokens_of_one_sequence(name, count, device, steps):
    stock, ours = pair(name, device)
    ids, rows = prompt(device, 1, 9) % stock.config.vocab_size, []
    new = prompt(device, 1, count, seed=2) % stock.config.vocab_size
    for model in (stock, ours):
        with torch.no_grad():
            cache = model(ids, use_cache=True)[CACHE]
            first = model(ids[:, :1], **{CACHE: cache}).logits
            several = model(new, **{CACHE: cache}, logits_to_keep=2).logits
            row = [first, several, model(new, **{CACHE: cache}).logits, model(ids[:, :1], **{CACHE: cache}).logits]
        rows.append(torch.cat(row, dim=1))
        assert several.shape[1] == 2 and cache.get_seq_length() == 9 + 1 + 2 * count + 1
    assert torch.allclose(*rows, rtol=1e-4, atol=1e-4)
    if name in ("gpt2", "llama"):
        assert steps == [1, count, count, 1]


# ---- which cache is handed out ------------------------------------------------------------------------------------


def test_who_gets_our_cache(device):
    _, ours = pair("llama", device)
    ids = prompt(device)
    with torch.no_grad():
        assert type(ours(ids)[CACHE]) is FastpathCache
        assert type(ours(input_ids=ids, use_cache=True, attention_mask=torch.ones_like(ids))[CACHE]) is FastpathCache
        assert ours(ids, use_cache=False).get(CACHE) is None
        for given in (
            {CACHE: DynamicCache(config=ours.config)},
            dict(output_hidden_states=True),
            dict(labels=ids),
            dict(attention_mask=torch.arange(11, 0, -1, device=device)[None] > 3),  # padding on the right
        ):
            assert type(ours(ids, **given)[CACHE]) is DynamicCache
        assert type(ours(prompt(device, 65, 2))[CACHE]) is DynamicCache
        ours.config.use_cache = False
        assert ours(ids).get(CACHE) is None and type(ours(ids, use_cache=True)[CACHE]) is FastpathCache
        ours.config.use_cache = True
        ours.train()
        assert type(ours(ids)[CACHE]) is DynamicCache
        ours.eval()
    assert type(ours(ids)[CACHE]) is DynamicCache, "with gradients"


def test_texts_that_are_scored_in_training_run_stock_code(device):
    """Without gradients they give the log-probabilities that they have with gradients."""
    _, ours = pair("llama", device)
    ids = prompt(device)
    expected = ours(ids).logits.detach()
    with torch.no_grad():
        out = ours(ids)
        assert type(out[CACHE]) is DynamicCache and torch.equal(out.logits, expected)
        assert type(ours(ids, use_cache=True)[CACHE]) is FastpathCache


@pytest.mark.parametrize("options", (dict(kv_dtype="int8"), dict(page_size=16), dict(ops=("mlp", "attention"))))
def test_options(options, device, steps):
    stock, ours = pair("llama", device, **options)
    tokens = own_loop_of(ours, prompt(device, 2))[0]
    assert torch.equal(tokens[:, :4], own_loop_of(stock, prompt(device, 2))[0][:, :4])
    with torch.no_grad():
        cache = ours(prompt(device), use_cache=True)[CACHE]
        assert type(ours(prompt(device))[CACHE]) is (FastpathCache if "page_size" in options else DynamicCache)
    if "ops" in options:
        assert type(cache) is DynamicCache and not steps
    else:
        assert len(steps) == 20 and cache.kv_dtype is state_of(ours).options.kv_dtype
        assert cache.page_size == options.get("page_size")


# ---- caches that are changed between forwards ---------------------------------------------------------------------


def at(step: int, edit: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return ``edit`` for the forward at this place."""
    calls = iter(range(1000))
    return lambda cache: edit(cache) if next(calls) == step else None


def doubled(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys.mul_(0.5)
        layer.values = layer.values * 2


EDITS: dict[str, Callable[[Any], Any]] = {
    "crop": lambda cache: cache.crop(-2),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1, 1, 2])),
    "in place": doubled,
}


@pytest.mark.parametrize("what", EDITS)
@pytest.mark.parametrize("name", ("gpt2", "gemma3_text", "glm4"))
@pytest.mark.parametrize("step", (0, 3))
def test_an_edit_between_two_forwards(name, what, step, device, steps):
    stock, ours = pair(name, device)
    ids = prompt(device, 3, 8) % stock.config.vocab_size
    found, expected = (own_loop_of(model, ids, 6, edit=at(step, EDITS[what])) for model in (ours, stock))
    assert_alike(found, expected)
    assert len(steps) == 6


@torch.no_grad()
def test_a_cache_that_gets_other_sequences(device, steps):
    """States move with the sequences; stock is given these sequences from the beginning."""
    stock, ours = pair("lfm2", device)
    ids = prompt(device, 2) % stock.config.vocab_size
    cache, new = ours(ids, use_cache=True)[CACHE], ids[:, :3]
    ours(new[:, :1], **{CACHE: cache})
    cache.batch_repeat_interleave(2)
    found = [ours(new[:, 1:2].repeat_interleave(2, dim=0), **{CACHE: cache}).logits[3:]]
    cache.reorder_cache(torch.tensor([3, 0, 1, 2], device=device))
    cache.batch_select_indices(torch.tensor([0], device=device))
    found.append(ours(new[1:, 2:], **{CACHE: cache}).logits)
    expected = stock(torch.cat((ids, new), dim=1)[1:], use_cache=False).logits[:, -2:]
    assert torch.allclose(torch.cat(found, dim=1), expected, rtol=1e-4, atol=1e-4) and len(steps) == 3


@torch.no_grad()
@pytest.mark.parametrize("name", ("llama", "lfm2"))
def test_caches_in_turns(name, device, steps):
    """There are more of them than plans that wait, and one is a copy of another."""
    stock, ours = pair(name, device)
    ids, rows = prompt(device, 6) % stock.config.vocab_size, []
    for model in (stock, ours):
        caches = [model(ids[row : row + 1, : 5 + row], use_cache=True)[CACHE] for row in range(6)]
        row = []
        for place in range(4):
            row += [model(ids[:1, place : place + 1], **{CACHE: cache}).logits for cache in caches]
            if place == 1:
                caches.append(copy.deepcopy(caches[-1]))
        rows.append(torch.cat(row))
    assert torch.allclose(*rows, rtol=1e-4, atol=1e-4) and len(steps) == 26
    assert len(state_of(ours).own_loops._plans) <= own_loop.MAX_WAITING


@torch.no_grad()
@pytest.mark.parametrize("name", ("llama", "lfm2"))
def test_a_cache_goes_to_generate_and_back(name, device, steps):
    stock, ours = pair(name, device)
    ids, rows = prompt(device, 1) % stock.config.vocab_size, []
    for model in (stock, ours):
        cache = model(ids, use_cache=True)[CACHE]
        row = [model(ids[:, :1], **{CACHE: cache}).logits]
        text = torch.cat((ids, ids[:, :2]), dim=1)
        out = model.generate(text, **{CACHE: cache}, **SHORT, return_dict_in_generate=True, output_logits=True)
        row += [each[:, None] for each in out.logits]
        row += [model(out.sequences[:, -1:], **{CACHE: out[CACHE]}).logits for _ in range(2)]
        rows.append(torch.cat(row, dim=1))
    assert torch.allclose(*rows, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_plan_does_not_keep_a_cache_alive(device):
    _, ours = pair("llama", device)
    out = ours(prompt(device), use_cache=True)
    for _ in range(2):
        out = ours(prompt(device, 1, 1), **{CACHE: out[CACHE]})
    cache, memory = weakref.ref(out[CACHE]), weakref.ref(out[CACHE].layers[0].k_buffer)
    gc.disable()
    try:
        del out
        assert cache() is None and memory() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_a_cache_of_another_batch_is_refused(device):
    _, ours = pair("glm4", device)
    cache = ours(prompt(device, 2) % 100, use_cache=True)[CACHE]
    with pytest.raises(RuntimeError, match="batch"):
        ours(prompt(device, 3, 1) % 100, **{CACHE: cache})
        ours(prompt(device, 3, 1) % 100, **{CACHE: cache})


# ---- models that are changed between forwards ---------------------------------------------------------------------


def scaled(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)


def replaced(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight * 0.5 + 0.01)


def hooked(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: out * 0.5)


def rescaled(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 0.7


def moved(model: PreTrainedModel) -> None:
    """Other calls look at the model as it is then."""
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9
    model.generate(prompt(model.device) % 100, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("change", (scaled, replaced, hooked, rescaled, moved), ids=lambda change: change.__name__)
@pytest.mark.parametrize("is_recorded", (False, True))
def test_a_model_that_is_changed_between_two_forwards(change, is_recorded, device):
    stock, ours = pair("glm4" if is_recorded else "llama", device)
    ids, results = prompt(device, 2) % stock.config.vocab_size, []
    for model in (stock, ours):
        results.append(own_loop_of(model, ids, 8, edit=at(4, lambda cache, model=model: change(model))))
    assert_alike(*results[::-1])


def renewed(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.clone())


def test_a_model_that_changes_all_the_time_is_left_to_stock(device, steps, monkeypatch):
    made: list[int] = []
    init = own_loop.WaitingPlan.__init__
    monkeypatch.setattr(own_loop.WaitingPlan, "__init__", lambda self, *given: (made.append(1), init(self, *given))[1])
    stock, ours = pair("llama", device)
    ids, results = prompt(device), []
    for model in (stock, ours):
        results.append(own_loop_of(model, ids, 40, edit=lambda cache, model=model: renewed(model)))
    assert_alike(*results[::-1])
    assert 0 < len(made) < 12
    steps.clear()
    own_loop_of(ours, ids, 100)
    assert len(steps) > 30, "it is looked at again"


@pytest.mark.parametrize("name", ("llama", "glm4"))
def test_a_reason_that_comes_and_goes(name, device, steps):
    _, ours = pair(name, device)
    ids, layer = prompt(device) % 100, ours.model.layers[0].mlp
    handle = layer.register_forward_hook(lambda module, given, out: out * 0.5)
    own_loop_of(ours, ids, 3)
    with torch.no_grad():
        assert not steps and type(ours(ids, use_cache=True)[CACHE]) is DynamicCache
    handle.remove()
    own_loop_of(ours, ids, 4)
    assert len(steps) == 4


def test_unpatched_between_two_forwards(device, steps):
    stock, ours = pair("llama", device)
    found = own_loop_of(ours, prompt(device), 6, edit=at(3, lambda cache: hf_fastpath.unpatch(ours)))
    assert_alike(found, own_loop_of(stock, prompt(device), 6))
    assert len(steps) == 3 and list(instances(ours)) == list(instances(stock)) and "forward" not in vars(ours)


# ---- other loops, threads, reasons --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("llama", "glm4"))
def test_guidance_and_loops_that_generate_is_given(name, device, steps):
    stock, ours = pair(name, device)
    ids = prompt(device) % stock.config.vocab_size

    def loop(model, input_ids, generation_config=None, **kwargs):
        for _ in range(6):
            inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=None, **kwargs)
            new = input_ids[:, kwargs[CACHE].get_seq_length() :]
            inputs |= {"input_ids": new, "position_ids": None, "attention_mask": None}
            del inputs["logits_processor"], inputs["stopping_criteria"]
            out = model(**inputs)
            input_ids = torch.cat((input_ids, out.logits[:, -1:].argmax(-1)), dim=1)
        return input_ids

    for options in (dict(guidance_scale=1.5), dict(custom_generate=loop)):
        steps.clear()
        found, expected = (model.generate(ids, **SHORT, **options) for model in (ours, stock))
        assert torch.equal(found, expected)
        assert len(steps) > 3


def test_threads_with_caches_of_their_own(device):
    stock, ours = pair("llama", device)
    texts, found = [prompt(device, 1, 8, seed) for seed in range(4)], {}

    def work(place: int) -> None:
        for _ in range(3):
            found[place] = own_loop_of(ours, texts[place], 10)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for place, text in enumerate(texts):
        assert_alike(found[place], own_loop_of(stock, text, 10))


@torch.no_grad()
def test_reasons_are_counted(device):
    """Patched modules tell their own; of a recorded model, a forward over our cache that stock code runs is told."""
    _, ours = pair("glm4", device)
    ids = prompt(device) % 100
    with counting(ours) as counts:
        cache = ours(ids, use_cache=True)[CACHE]
        ours(ids[:, :1], **{CACHE: cache})
        ours(ids[:, :4], **{CACHE: cache})
        ours(ids, output_hidden_states=True)
    assert not counts.reasons
    with counting(ours) as counts:
        ours(ids[:, :1], **{CACHE: cache}, output_hidden_states=True)
    assert counts.reasons == {"attention_outputs": 1}


@torch.no_grad()
def test_strict(device):
    _, ours = pair("glm4", device, strict=True)
    ids = prompt(device) % 100
    cache = ours(ids, use_cache=True)[CACHE]
    ours(ids[:, :1], **{CACHE: cache})
    with pytest.raises(hf_fastpath.FallbackError, match="output_hidden_states"):
        ours(ids[:, :1], **{CACHE: cache}, output_hidden_states=True)


# ---- the forward as an object -------------------------------------------------------------------------------------


def test_the_forward_looks_like_stocks(device, steps):
    stock, ours = pair("llama", device)
    assert inspect.signature(ours.forward) == inspect.signature(stock.forward)
    assert ours.forward.__doc__ == stock.forward.__doc__
    other = copy.deepcopy(ours)
    assert other.forward.__self__ is other
    assert_alike(own_loop_of(other, prompt(device), 4), own_loop_of(stock, prompt(device), 4))
    assert len(steps) == 4
    loaded = pickle.loads(pickle.dumps(ours.cpu()))
    assert "forward" not in vars(loaded) and state_of(loaded) is None
    with pytest.raises(ValueError, match="model_kwargs"):
        ours.to(device).generate(prompt(device), unknown_argument=1, **SHORT)
    before = instances(ours)
    hf_fastpath.unpatch(ours)
    hf_fastpath.patch(ours, quiet=True)
    assert list(instances(ours)) == list(before)


def test_a_replica_of_data_parallel_is_stock(device):
    """DataParallel copies what an instance holds, and a method that is bound to the original would run that."""
    _, ours = pair("llama", device)
    for module in ours.modules():
        replica = module._replicate_for_data_parallel()
        assert "forward" not in vars(replica) and state_of(replica) is None


def test_wrong_arguments_raise_what_stock_raises(device):
    stock, ours = pair("llama", device)
    ids = prompt(device)
    for args, kwargs in (((ids,) * 12, {}), ((ids,), {"input_ids": ids}), ((), {}), ((ids,), {"unknown": 1})):
        said = []
        for model in (stock, ours):
            with torch.no_grad():
                try:
                    said.append(type(model(*args, **kwargs)).__name__)
                except (TypeError, ValueError) as error:
                    said.append(str(error))
        assert said[0] == said[1]


def test_compiled(device, steps):
    stock, ours = pair("llama", device)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    with torch.no_grad():
        found, expected = (model(prompt(device), use_cache=False).logits for model in (compiled, stock))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4) and not steps


def test_a_listed_model_without_its_file(device, steps):
    with hidden_files():
        stock, ours = pair("mistral", device)
        assert_alike(own_loop_of(ours, prompt(device, 2)), own_loop_of(stock, prompt(device, 2)))
    assert len(steps) == 20
