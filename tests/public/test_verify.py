"""verify(): what it finds on right models and on wrong ones."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from models import CPU, VOCAB, WINDOW, assert_same_instances, build, heldout_tokens, instances, prompt, trained
from parity import rng_state

import hf_fastpath
from hf_fastpath.decode.loops.sample import _Loop
from hf_fastpath.decode.plans.decode_plan import DecodePlan

ROWS = ["short", "padded", "long", "sampling"]
WITH_WINDOW = ["short", "padded", "long", "window edge", "sampling"]


def names(result, ok: bool) -> list[str]:
    """Return the names of the rows with that verdict."""
    return [row.name for row in result.rows if row.ok == ok]


def test_verify_on_the_trained_model(device):
    stock, ours = trained(device)
    ids = heldout_tokens(20).to(device)
    before, config, state = instances(stock), stock.generation_config, rng_state(device)
    for model in (stock, ours):
        result = hf_fastpath.verify(model, {"input_ids": ids}, max_new_tokens=12)
        assert result.ok and result.tokens_equal and result.top1_agreement == 1
        assert result.max_error >= result.mean_error > 0 and result.max_floor >= result.mean_floor > 0
        for row in result.rows:
            assert row.ok and row.positions == 12 and row.first_divergence is None
        found = json.loads(json.dumps(result.to_dict()))
        assert found["ok"] and [row["name"] for row in found["rows"]] == names(result, True)
        assert "ok over" in str(result) and all(row.name in str(result) for row in result.rows)
    assert_same_instances(instances(stock), before)
    assert stock.generation_config is config and torch.equal(rng_state(device), state)
    assert hf_fastpath.report(ours).loop == "fast"


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("architecture", ("gpt2", "mistral"))
def test_verify_rows(architecture, dtype, device):
    """Rows are right in every type, with and without windows, tied weights and several sequences."""
    model = build(architecture).to(device, dtype)
    parameters = dict(model.named_parameters())
    result = hf_fastpath.verify(model, prompt(device, 2, 20), max_new_tokens=12)
    assert names(result, True) == (WITH_WINDOW if architecture == "mistral" else ROWS)
    assert [row.batch for row in result.rows] == [2] * len(result.rows)
    assert result.row("long").prompt_len == 512 and result.row("short").prompt_len == 16
    if architecture == "mistral":
        edge = result.row("window edge")
        assert edge.prompt_len < WINDOW < edge.prompt_len + edge.positions
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


def test_verify_explains_draws_that_rounding_changes(device):
    """Of 256 draws in bfloat16, some differ from stock's, and from those of logits whose prompt was read otherwise."""
    model = build("mistral").to(device, torch.bfloat16)
    ids = torch.randint(3, VOCAB, (8, 21), generator=torch.Generator().manual_seed(2)).to(device)
    result = hf_fastpath.verify(model, ids)
    assert result.ok, result


def test_verify_keeps_within_the_positions_a_model_knows():
    result = hf_fastpath.verify(build("gpt2", n_positions=64), prompt(CPU, 1, 20), max_new_tokens=8)
    assert result.ok and result.row("long").prompt_len == 56


def _flip_logits(monkeypatch) -> None:
    real = DecodePlan.step
    monkeypatch.setattr(DecodePlan, "step", lambda self, tokens=None: real(self, tokens).flip(-1))


def _forget_padding(monkeypatch) -> None:
    real = DecodePlan.begin

    def begin(self, cache, positions, starts, *rest, **named):
        real(self, cache, positions, None, *rest, **named)

    monkeypatch.setattr(DecodePlan, "begin", begin)


def _other_greedy_tokens(monkeypatch) -> None:
    real = _Loop._finish_step
    monkeypatch.setattr(_Loop, "_finish_step", lambda self, tokens: real(self, (tokens + 1) % VOCAB))


def _another_draw(monkeypatch) -> None:
    real = _Loop._choose

    def choose(self, logits):
        torch.rand(1, device=logits.device)
        return real(self, logits)

    monkeypatch.setattr(_Loop, "_choose", choose)


#: fault -> the rows that must show it
WRONG = {
    "logits": (_flip_logits, set(WITH_WINDOW)),
    "padding": (_forget_padding, {"padded"}),
    "greedy choice": (_other_greedy_tokens, set(WITH_WINDOW)),
    "draw": (_another_draw, {"sampling"}),
}


@functools.cache
def right_result(device: torch.device):
    return hf_fastpath.verify(build("mistral").to(device), prompt(device, 1, 20), max_new_tokens=6)


@pytest.mark.each_value
@pytest.mark.parametrize(("break_it", "rows"), WRONG.values(), ids=WRONG)
def test_verify_sees_a_wrong_model(break_it, rows, monkeypatch, device):
    """A fault is reported in the rows that it touches, and is not averaged away."""
    model = build("mistral").to(device)
    right = right_result(device)
    break_it(monkeypatch)
    result = hf_fastpath.verify(model, prompt(device, 1, 20), max_new_tokens=6)
    assert not result.ok and set(names(result, False)) == rows and "DIFFERENT" in str(result)
    for row, before in zip(result.rows, right.rows):
        if break_it is _flip_logits:
            assert row.kl > before.kl and row.max_error > before.max_error
        elif row.name not in rows:
            assert row == before


def test_verify_gives_clear_errors():
    stock, _ = trained(CPU)
    before = instances(stock)
    for ids in (torch.ones(5), torch.ones(1, 1), torch.ones(17, 5)):
        with pytest.raises(ValueError, match="expected \\[1 to 16 sequences, at least 2 tokens\\]"):
            hf_fastpath.verify(stock, ids.long())
    with pytest.raises(ValueError, match="got a padded batch"):
        ids = torch.ones(2, 5, dtype=torch.long)
        hf_fastpath.verify(stock, {"input_ids": ids, "attention_mask": ids.tril()})
    assert_same_instances(instances(stock), before)
