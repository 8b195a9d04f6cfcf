"""What a user may give as input_ids, attention_mask, position_ids and other arguments: input that stock takes is fast
or counted, and input that stock refuses is refused with the same type of error."""

from __future__ import annotations

import pytest
import torch
from models import CPU, VOCAB, counting, fresh, left_padded, over_architectures, pair, prompt
from parity import assert_same_tokens, both
from torch import nn
from transformers import DynamicCache, Seq2SeqTrainer, Seq2SeqTrainingArguments

import hf_fastpath
from hf_fastpath import FastpathCache
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.plans import angles
from hf_fastpath.decode.plans.angles import AngleTables

FEW = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
LEARNED, ROTARY = ("gpt2", "opt"), ("llama", "gemma3_text")


def outcome(call) -> object:
    """Return what ``call`` returns, or the type of error that it raises."""
    try:
        return call()
    except (IndexError, RuntimeError, ValueError) as error:
        return type(error)


def same_outcome(stock: nn.Module, ours: nn.Module, *args, **options) -> object:
    """Assert that generate() gives stock's tokens or raises stock's type of error; return what ours gave."""
    expected, found = (outcome(lambda m=model: m.generate(*args, **options)) for model in (stock, ours))
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        assert found.dtype == expected.dtype
        assert_same_tokens(found, expected)
    else:
        assert found is expected
    return found


# ---- types ---------------------------------------------------------------------------------------------------


@pytest.mark.each_pair
@pytest.mark.parametrize("named", ("input_ids", "attention_mask", "position_ids"))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int16, torch.uint8, torch.bool, torch.float16, torch.float32))
@pytest.mark.parametrize("architecture", ("llama", "gpt2"))
def test_other_types(architecture, dtype, named):
    """Masks of every type and int32 ids are fast; types that stock refuses or rounds in its own way run stock."""
    stock, ours = pair(architecture, CPU)
    inputs = left_padded(CPU, 2, 7)
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    inputs[named] = inputs[named].to(dtype)
    with counting(ours) as counts:
        found = same_outcome(stock, ours, **inputs, **FEW)
    if named == "attention_mask" or dtype == torch.int32:
        assert isinstance(found, torch.Tensor) and counts.fast == 12 and not counts.reasons
    else:
        code = "unsupported_input" if named == "input_ids" else "position_ids"
        assert not counts.fast and code in counts.reasons
        assert any(str(dtype) in what for what in hf_fastpath.report(ours).stats["details"][code])


WAYS = {
    "sampling": dict(do_sample=True, top_k=20),
    "processors": dict(repetition_penalty=1.0, min_new_tokens=3),
    "stock's assistant": {"assistant_model": 0},
    "patched assistant": {"assistant_model": 1},
    "prompt lookup": dict(prompt_lookup_num_tokens=3),
    "several sequences": dict(do_sample=True, num_return_sequences=2),
    "beams": dict(num_beams=2),
    "chunks": dict(prefill_chunk_size=3),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ("llama", "gpt2"))
def test_int32_ids_every_way(architecture, way, device):
    stock, ours = models = pair(architecture, device)
    given = dict(
        input_ids=prompt(device, 1, 9).int(), position_ids=torch.arange(9, device=device, dtype=torch.int32)[None]
    )
    options = FEW | WAYS[way]
    if "assistant_model" in options:
        options["assistant_model"] = models[options["assistant_model"]]
    results = both(stock, ours, **given, **options)
    assert results[0].dtype == results[1].dtype
    assert_same_tokens(*results)


@pytest.mark.parametrize("architecture", ("llama", "gpt2"))
def test_int32_conversation_and_verify(architecture, device):
    stock, ours = pair(architecture, device)
    ends = []
    for model in (stock, ours):
        ids, cache = prompt(device, 2, 6).int(), {}
        for turn in range(2):
            out = model.generate(ids, return_dict_in_generate=True, **cache, **FEW)
            cache = {CACHE: out[CACHE]}
            ids = torch.cat((out.sequences, prompt(device, 2, 3, seed=turn)), dim=1).int()
        ends.append(out.sequences)
    assert_same_tokens(*ends)
    assert hf_fastpath.verify(ours, prompt(device, 1, 20).int(), 4).ok


def over_cache(model: nn.Module, dtype: torch.dtype, first: int, new: int, padded: bool) -> torch.Tensor:
    """Return logits of ``new`` tokens, given as ``dtype``, at positions from ``first`` on, behind a cached prompt."""
    device = model.device
    inputs = left_padded(device, 2, 7 + new)
    ids, mask = inputs["input_ids"].to(dtype), inputs["attention_mask"] if padded else None
    positions = (torch.arange(7 + new, device=device) + first).to(dtype).expand(2, -1)
    ours = hasattr(model, "_hf_fastpath")
    cache = FastpathCache(model.config) if ours else DynamicCache(config=model.config)
    for piece in (slice(0, 7), slice(7, 7 + new)):
        seen = {} if mask is None else {"attention_mask": mask[:, : piece.stop]}
        given = {CACHE: cache, "use_cache": True, "position_ids": positions[:, piece], **seen}
        with torch.no_grad():
            out = model(ids[:, piece], **given)
    return out.logits


@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("new", (1, 4))
@pytest.mark.parametrize("first", (0, -20, 10**6))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_forward_over_a_cache(dtype, first, new, padded, device):
    stock, ours = pair("llama", device)
    found, expected = (over_cache(model, dtype, first, new, padded) for model in (ours, stock))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# ---- positions -----------------------------------------------------------------------------------------------


def given_positions(device: torch.device) -> dict[str, torch.Tensor]:
    """Return int64 [2, 7] position_ids of unusual kinds."""
    near = torch.arange(7, device=device).expand(2, -1)
    rows = torch.tensor([[1], [1]], device=device)
    return {
        "negative": near - 20,
        "from negative to positive": near - 9,
        "far": near + 10**6,
        "very far": near + 10**9,
        "rows far apart": near + rows * torch.tensor([[-300], [10**6]], device=device),
        "rows that overlap": near + rows * torch.tensor([[70000], [70003]], device=device),
        "one near, one far": near + rows * torch.tensor([[0], [10**7]], device=device),
        "with a gap": torch.cat((near[:, :4], near[:, 4:] + 5000), dim=1),
        "one for all": torch.full_like(near, 50),
        "one row": near[:1] + 12345,
    }


@pytest.mark.each_value
@pytest.mark.parametrize("name", given_positions(CPU))
@pytest.mark.parametrize("architecture", ROTARY)
def test_any_position(architecture, name, device):
    """Rotary models take any position, also tokens that lead from one end of the tables to the other."""
    stock, ours = pair(architecture, device)
    given = dict(input_ids=prompt(device, 2, 7), position_ids=given_positions(device)[name])
    with counting(ours) as counts:
        found, expected = both(stock, ours, **given, max_new_tokens=40, do_sample=False)
    assert counts.fast == 80 and not counts.reasons
    assert_same_tokens(found, expected)
    again, expected = both(stock, ours, input_ids=prompt(device, 3, 7), **FEW)  # an ordinary call works afterwards
    assert_same_tokens(again, expected)


@pytest.mark.parametrize("name", ("negative", "far"))
@pytest.mark.parametrize("way", ("sampling", "stock's assistant", "patched assistant", "prompt lookup"))
def test_any_position_every_way(way, name, device):
    stock, ours = models = pair("llama", device)
    options = FEW | WAYS[way] | dict(max_new_tokens=24)
    if "assistant_model" in options:
        options["assistant_model"] = models[options["assistant_model"]]
    given = dict(input_ids=prompt(device, 1, 7), position_ids=given_positions(device)[name][:1])
    assert_same_tokens(*both(stock, ours, **given, **options))


def test_tables_hold_only_the_positions_that_come(device, monkeypatch):
    """Far positions take no more memory than near ones, and runs that end go on in another place of the tables."""
    monkeypatch.setattr(angles, "_ANGLE_ROWS", {device.type: 32})
    monkeypatch.setattr(angles, "_MOST_ANGLE_ROWS", 64)
    sizes, fill = [], AngleTables._fill
    monkeypatch.setattr(AngleTables, "_fill", lambda *given: (fill(*given), sizes.append(given[0]._rows))[0])
    stock, ours = fresh("llama", device)
    for first in (10**9, 10**5, -(10**5)):
        starts = torch.tensor([[0], [10**7]], device=device) + first
        given = dict(input_ids=prompt(device, 2, 7), position_ids=torch.arange(7, device=device) + starts)
        found, expected = both(stock, ours, **given, max_new_tokens=90, do_sample=False)
        assert_same_tokens(found, expected)
    assert len(sizes) > 6 and max(sizes) <= 2 * (32 + 16), sizes


@pytest.mark.parametrize("first", (0, -1, -2, -3, 10**6))
@pytest.mark.parametrize("architecture", LEARNED)
def test_positions_that_were_not_learned(architecture, first):
    """OPT's embedding begins at position -2."""
    stock, ours = pair(architecture, CPU)
    positions = torch.arange(7)[None] + first
    same_outcome(stock, ours, prompt(CPU, 1, 7), position_ids=positions, **FEW)


@pytest.mark.parametrize("way", ("greedy", "prompt lookup", "patched assistant"))
@pytest.mark.parametrize("architecture", LEARNED)
def test_more_tokens_than_learned_positions(architecture, way):
    stock, ours = fresh(architecture, max_position_embeddings=24)
    options = FEW | WAYS.get(way, {}) | dict(max_new_tokens=40)
    if "assistant_model" in options:
        options["assistant_model"] = ours
    tokens = []
    for model in (stock, ours):
        with pytest.raises(IndexError, match=None if model is stock else "position"):
            model.generate(prompt(CPU, 1, 7), **options)
        tokens.append(model.generate(prompt(CPU, 1, 7), **(options | dict(max_new_tokens=14))))
    assert_same_tokens(*tokens)


# ---- tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", (-1, -(2**40), VOCAB, 2**40))
@pytest.mark.parametrize("length", (1, 7, 40))
@pytest.mark.parametrize("architecture", ("llama", "gpt2"))
def test_token_out_of_range(architecture, length, token):
    stock, ours = pair(architecture, CPU)
    ids = prompt(CPU, 1, length)
    ids[0, -1] = token
    with pytest.raises(IndexError):
        stock.generate(ids, **FEW)
    with pytest.raises(IndexError, match=rf"{token}\D.*{VOCAB}\D"):
        ours.generate(ids, **FEW)
    assert_same_tokens(ours.generate(prompt(CPU), **FEW), stock.generate(prompt(CPU), **FEW))


@pytest.mark.parametrize("pad", (-1, VOCAB))
def test_pad_token_out_of_range(pad):
    """A row that has ended would go on with tokens that the model does not know: stock's error is raised, or the tokens
    are stock's if all rows end at once."""
    stock, ours = pair("llama", CPU)
    ids = prompt(CPU, 2, 7)
    first = stock.generate(ids, **FEW)[0, 7:9].tolist()
    for ends in (first[0], VOCAB - 1):
        with counting(ours) as counts:
            same_outcome(stock, ours, ids, **(FEW | dict(pad_token_id=pad, eos_token_id=ends)))
        assert set(counts.reasons) == {"unsupported_input"}
    with counting(ours) as counts:
        same_outcome(stock, ours, ids, **(FEW | dict(pad_token_id=pad)))
    assert counts.fast == 12


# ---- other arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("labels", "num_items_in_batch"))
@over_architectures
def test_arguments_without_effect(architecture, name, device):
    """These arguments only serve to make a loss."""
    stock, ours = pair(architecture, device)
    ids = prompt(device, 2, 7)
    given = {name: ids if name == "labels" else 3}
    with counting(ours) as counts:
        found, expected = both(stock, ours, input_ids=ids, **given, **FEW)
    assert counts.fast == 12 and not counts.reasons
    assert_same_tokens(found, expected)


def test_seq2seq_trainer_predicts_fast(tmp_path):
    """``predict_with_generate`` passes labels."""
    found = []
    stock, ours = fresh("llama")
    for model in (stock, ours):
        arguments = Seq2SeqTrainingArguments(
            str(tmp_path), predict_with_generate=True, per_device_eval_batch_size=2, report_to=[], use_cpu=True
        )
        rows = [dict(input_ids=row, labels=row) for row in prompt(CPU, 2, 7)]
        trainer = Seq2SeqTrainer(model=model, args=arguments)
        found.append(trainer.predict(rows, **FEW))
    assert (found[0].predictions == found[1].predictions).all() and found[0].metrics.keys() == found[1].metrics.keys()
    stats = hf_fastpath.report(ours).stats
    assert stats["fast_tokens"] == 12 and not stats["fallback_tokens"]


@pytest.mark.parametrize(
    ("given", "code", "what"),
    (
        (dict(token_type_ids=torch.zeros(1, 7, dtype=torch.long)), "unsupported_input", "token_type_ids"),
        (dict(output_router_logits=True), "attention_outputs", "output_router_logits"),
        (dict(output_router_logits=False), None, None),
    ),
)
def test_arguments_are_named(given, code, what):
    stock, ours = fresh("gpt2")
    given = dict(input_ids=prompt(CPU, 1, 7)) | given
    found, expected = both(stock, ours, **given, **FEW)
    assert_same_tokens(found, expected)
    stats = hf_fastpath.report(ours).stats
    assert stats["reasons"] == ({} if code is None else {code: 1})
    assert stats["details"] == ({} if code is None else {code: [what]})


# ---- numbers that are none -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("way", ("greedy", "sampling", "prompt lookup"))
def test_nonfinite_logits_are_reported(way, value):
    """One row of one projection is not finite: any token may come, and sampling has no distribution to draw from."""
    stock, ours = fresh("llama")
    for model in (stock, ours):
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[3] = value
    with counting(ours) as counts:
        same_outcome(stock, ours, prompt(CPU, 1, 7), **(FEW | WAYS.get(way, {})))
    assert counts.reasons == {"nonfinite_logits": 1}
    ours.model.layers[1].mlp.down_proj.weight.data[3] = 0
    with counting(ours) as counts:
        ours.generate(prompt(CPU, 1, 7), **(FEW | WAYS.get(way, {})))
    assert not counts.reasons


def test_nonfinite_token_is_reported_where_it_ends_sampling():
    """The plan draws a token whose embedding is NaN behind the prompt."""
    _, ours = fresh("llama")
    with torch.no_grad():
        ours.model.embed_tokens.weight[:] = float("nan")
        ours.model.embed_tokens.weight[prompt(CPU, 1, 7)] = 1
    with counting(ours) as counts, pytest.raises(RuntimeError, match="nan"):
        ours.generate(prompt(CPU, 1, 7), do_sample=True, top_k=0, max_new_tokens=40)
    assert counts.reasons == {"nonfinite_logits": 1}
