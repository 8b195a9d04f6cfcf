"""Prompts whose tokens are read as sequences of one token each: what a step may do so that this is the same, from which
call on the last tokens are enough, and that no other model is read so."""

from __future__ import annotations

import copy

import pytest
import torch
from causal_lm_types import small_model
from habits import habit_model
from models import CPU, require_native
from recorded_types import pair_or_skip
from test_recorded_prompts import GREEDY, assert_equal, ids_of, reads
from torch import nn

import hf_fastpath
from hf_fastpath.compat import CACHE
from hf_fastpath.recording import marks
from hf_fastpath.recording import prompts as recorded_prompts
from hf_fastpath.recording.errors import Unrecordable
from hf_fastpath.recording.skeleton import Skeleton
from hf_fastpath.recording.token_rows import last_rows
from hf_fastpath.recording.whole_step import count_like, whole_rows

#: of each test every third case; all of them with ``--full``
pytestmark = pytest.mark.every(3)

#: type -> what there is of it in prompts
STATES = {
    "falcon_h1": "states beside attention",
    "mamba2": "states alone",
    "olmo_hybrid": "a delta net with negative eigenvalues",
    "qwen3_5_text": "a delta net, and attention with a gate",
}
#: types whose generate() passes a text from its beginning, in some releases of transformers
PASSES_TEXTS_AGAIN = {"falcon_h1", "mamba2"}
#: types without states, which are read so if no other list can be made
OTHERS = ("apertus", "glm4", "mpt", "minicpm3", "gpt_neo")


def patched(name: str):
    require_native(CPU)
    return pair_or_skip(name)


@pytest.mark.parametrize("name", STATES)
def test_a_conversation(name, monkeypatch):
    """Prompts, and turns behind them, of one token and of several; with several sequences."""
    stock, ours = patched(name)
    for batch in (1, 2):
        for attempt in range(2):
            found: list[list[torch.Tensor]] = []
            for model in (ours, stock):
                text, cache, texts = ids_of(11, batch), None, []
                with reads(monkeypatch) as shapes:
                    for length in (1, 7, 70):
                        kept = {CACHE: cache} if cache else {}
                        made = model.generate(text, return_dict_in_generate=True, **kept, **GREEDY)
                        text, cache = torch.cat((made.sequences, ids_of(length, batch)), dim=1), getattr(made, CACHE)
                        texts.append(made.sequences)
                if model is ours and attempt:
                    read = [(batch, length) for length in (11, 2, 8)]
                    assert shapes == read or (name in PASSES_TEXTS_AGAIN and shapes[:1] == read[:1])
            found.append(texts)
            assert all(torch.equal(*pair) for pair in zip(found[0], texts))


@pytest.mark.parametrize("name", STATES)
def test_padding_is_left_to_modules(name, monkeypatch):
    stock, ours = patched(name)
    ids = ids_of(20, 2)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    for is_padded in (False, False, True):
        options = dict(attention_mask=mask) if is_padded else {}
        with reads(monkeypatch) as shapes:
            found = ours.generate(ids * mask, **GREEDY, **options)
        assert torch.equal(found, stock.generate(ids * mask, **GREEDY, **options))
    assert not shapes


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_without_states(name, monkeypatch):
    """Where no list of several tokens can be made, the one of a token reads prompts."""
    stock, ours = patched(name)
    monkeypatch.setattr(recorded_prompts, "whole_prompt", None)
    for batch, length in ((1, 9), (1, 9), (1, 40), (1, 2), (2, 21), (2, 21)):
        with reads(monkeypatch) as shapes:
            assert_equal(ours, stock, ids_of(length, batch))
    assert shapes == [(2, 21)]


def test_from_which_call_on_the_last_tokens_are_enough():
    """The head, and the last layer's MLP, are those of the last token of each sequence."""
    model = small_model("glm4")
    recording = whole_rows(Skeleton(model), count_like(0, model))
    place, carried = last_rows(recording)
    before, behind = recording.calls[:place], recording.calls[place:]
    assert not any(call.op in marks.OF_CACHES for call in behind)
    assert sum(call.op is marks.gated for call in behind) == 1
    assert sum(call.op is marks.gated for call in before) == model.config.num_hidden_layers - 1
    assert all(recording.fact(each).shape[0] == recording.batch for each in carried)


class _Mixing(nn.Module):
    """Does something with the hidden states of all sequences."""

    def __init__(self, inner: nn.Module, kind: str):
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.kind == "mean":
            return x - x.mean(0, keepdim=True)
        if self.kind == "first":
            return x + x[:1]
        return x


@pytest.mark.parametrize("kind", ("mean", "first"))
def test_a_step_that_puts_sequences_together_is_refused(kind):
    model = small_model("glm4")
    model.model.layers[0].mlp = _Mixing(model.model.layers[0].mlp, kind)
    with pytest.raises(Unrecordable, match="several sequences together"):
        whole_rows(Skeleton(model), count_like(0, model))


@pytest.mark.parametrize("habit", ("grows", "rows_of_places", "at_multiples"))
def test_a_step_that_counts_on_from_the_cache_is_refused(habit):
    """Its place in the text is that of the newest token, for all of them; a step of some lengths serves these alone."""
    model = habit_model(habit)
    if habit == "at_multiples":
        served = whole_rows(Skeleton(model), count_like(0, model)).served
        assert not served.is_all and not served.serves_prompt(0, 40)
        return
    with pytest.raises(Unrecordable, match="counts on"):
        whole_rows(Skeleton(model), count_like(0, model))


class _Halved(nn.Module):
    """Halves what it makes of long prompts, and of nothing else."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (0.5 if x.shape[1] > 30 else 1.0)


def test_a_model_with_code_of_its_own_is_left_to_modules(monkeypatch):
    """Nobody has looked at what its code does of many tokens."""
    require_native(CPU)
    stock = small_model("falcon_h1")
    for layer in stock.model.layers:
        layer.feed_forward = _Halved(layer.feed_forward)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    with reads(monkeypatch) as shapes:
        for length in (9, 9, 40):
            assert_equal(ours, stock, ids_of(length))
    assert not shapes


def test_a_list_that_is_wrong_reads_nothing(monkeypatch):
    stock, ours = patched("mamba2")
    real = recorded_prompts.whole_rows

    def other(*given):
        made = real(*given)
        made.calls.remove(next(call for call in made.calls if call.op is marks.gated_norm))
        return made

    monkeypatch.setattr(recorded_prompts, "whole_rows", other)
    with reads(monkeypatch) as shapes:
        for length in (9, 11, 40):
            assert_equal(ours, stock, ids_of(length))
    assert not shapes
