"""Processors that hold a text to a grammar: our loop, stock's tokens, and masks that are filled while a step runs."""

from __future__ import annotations

import copy
import string

import pytest
import torch
from models import build, counting, fresh, prompt, require_native, tokenizer, trained
from transformers import LogitsProcessor

import hf_fastpath
from hf_fastpath.compat import grammars
from hf_fastpath.decode.loops import sample

ROWS = 3


class EveryThird(LogitsProcessor):
    """A stand-in for these packages' processors: the first call makes a state for each row, and the others tell it the
    newest token. A token may follow that leaves another rest by 3 than the one before."""

    def __init__(self):
        self.newest: list[int | None] = []
        self.seen: list[list[list[int]]] = []  # ids of each call
        self.on: list[str] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        self.on.append(scores.device.type)
        if not self.newest:
            self.newest = [None] * len(input_ids)
        else:
            assert len(input_ids) == len(self.newest)
            self.newest = [int(row[-1]) for row in input_ids]
        for row, newest in enumerate(self.newest):
            if newest is not None:
                scores[row, newest % 3 :: 3] = -torch.inf
        return scores


class Derived(EveryThird):
    pass


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    known = grammars._GRAMMARS | {(EveryThird.__module__, EveryThird.__qualname__)}
    monkeypatch.setattr(grammars, "_GRAMMARS", known)


def ahead(monkeypatch) -> None:
    monkeypatch.setattr(sample, "fills_masks_ahead", lambda device: True)


@pytest.mark.parametrize("is_ahead", (False, True))
@pytest.mark.parametrize("how", (dict(do_sample=False), dict(do_sample=True, temperature=0.7, top_k=5)), ids=str)
def test_tokens_are_stocks(how, is_ahead, device, monkeypatch):
    """Each call of the processor sees the tokens so far, once, whether the mask is filled ahead or not."""
    stock, ours = fresh("llama", device)
    if is_ahead:
        ahead(monkeypatch)
    ids, made, found = prompt(device, ROWS), [], []
    for model in (stock, ours):
        made.append(EveryThird())
        torch.manual_seed(3)
        with counting(ours) as counts:
            out = model.generate(
                ids,
                max_new_tokens=12,
                logits_processor=[made[-1]],
                output_scores=True,
                return_dict_in_generate=True,
                **how,
            )
        found.append(out)
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert all(torch.equal(one.isinf(), other.isinf()) for one, other in zip(found[0].scores, found[1].scores))
    new = found[1].sequences[:, ids.shape[1] :]
    assert ((new[:, 1:] - new[:, :-1]) % 3 != 0).all()
    assert made[0].seen == made[1].seen and len(made[0].seen) == 12
    assert counts.fast == 12 * ROWS and not counts.fallback and counts.reasons == {"grammar_mask": 1}, counts.reasons
    if is_ahead:
        assert made[1].on[1:] == ["cpu"] * 11


def test_a_mask_that_is_ahead_is_of_the_end(device, monkeypatch):
    """Rows end at other times: no call of the processor is left out or made twice."""
    ahead(monkeypatch)
    stock, ours = fresh("llama", device)
    ids = prompt(device, ROWS)
    usual = stock.generate(ids, max_new_tokens=12, do_sample=False, logits_processor=[EveryThird()])
    ends = usual[:, ids.shape[1] + 3].tolist()
    made = EveryThird(), EveryThird()
    how = dict(max_new_tokens=12, do_sample=False, eos_token_id=ends, pad_token_id=0)
    expected = stock.generate(ids, logits_processor=[made[0]], **how)
    assert torch.equal(ours.generate(ids, logits_processor=[made[1]], **how), expected)
    assert made[0].seen == made[1].seen


@pytest.mark.parametrize("is_ahead", (False, True))
def test_requests_of_a_batch(is_ahead, device, monkeypatch):
    """Each request has a grammar of its own, beside requests without one."""
    require_native(device)
    if is_ahead:
        ahead(monkeypatch)
    stock = build("llama").to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    texts = [prompt(device, 1, 5 + number, seed=number) for number in range(5)]
    how = dict(max_new_tokens=10, do_sample=False)
    given = [{} if number % 2 else {"logits_processor": [EveryThird()]} for number in range(5)]
    with hf_fastpath.batch(ours, slots=4) as batch:
        requests = [batch.submit(text, **how, **more) for text, more in zip(texts, given)]
        found = [request.result(60).tokens for request in requests]
    again = [{} if number % 2 else {"logits_processor": [EveryThird()]} for number in range(5)]
    for text, tokens, more in zip(texts, found, again):
        assert stock.generate(text, **how, **more)[0, text.shape[1] :].tolist() == tokens
    report = hf_fastpath.report(ours).stats
    assert not report["fallback_tokens"] and set(report["reasons"]) == {"grammar_mask"}, report["reasons"]
    assert max(report["shared_steps"]) > 1


@pytest.mark.parametrize("kind", ("derived", "other call", "beside own"))
def test_what_may_do_more_is_the_users_own(kind, device):
    stock, ours = fresh("llama", device)
    made = []
    for model in (stock, ours):
        processor = Derived() if kind == "derived" else EveryThird()
        if kind == "other call":
            processor.process_logits = lambda ids, scores: scores
        more = [lambda ids, scores: scores + 1.0] if kind == "beside own" else []
        with counting(ours) as counts:
            made.append(
                model.generate(prompt(device), max_new_tokens=6, do_sample=False, logits_processor=[processor, *more])
            )
    assert torch.equal(*made) and counts.reasons["custom_logits_processor"] and not counts.fallback


# ---- the packages ----------------------------------------------------------------------------------------------------

PATTERN = r"[a-z_]{3,8}\((x|y|z)\):\n"


def of_xgrammar():
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    import xgrammar.contrib.hf  # noqa: F811

    grammar = compiled(xgrammar)
    return lambda: xgrammar.contrib.hf.LogitsProcessor(grammar)


def compiled(xgrammar):
    words = tokenizer()
    info = xgrammar.TokenizerInfo.from_huggingface(words, vocab_size=trained(torch.device("cpu"))[0].config.vocab_size)
    return xgrammar.GrammarCompiler(info).compile_regex(PATTERN)


def of_outlines_and_xgrammar():
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    backend = pytest.importorskip("outlines.backends.xgrammar", reason="outlines is not installed")
    grammar = compiled(xgrammar)
    return lambda: backend.XGrammarLogitsProcessor(grammar, "torch")


def of_outlines_and_llguidance():
    llguidance = pytest.importorskip("llguidance", reason="llguidance is not installed")
    backend = pytest.importorskip("outlines.backends.llguidance", reason="outlines is not installed")
    from llguidance import hf

    words, size = tokenizer(), trained(torch.device("cpu"))[0].config.vocab_size
    known = hf.from_tokenizer(words, size)
    grammar = llguidance.grammar_from("regex", PATTERN)
    return lambda: backend.LLGuidanceLogitsProcessor(grammar, known, "torch")


def of_outlines_core():
    core = pytest.importorskip("outlines_core", reason="outlines is not installed")
    backend = pytest.importorskip("outlines.backends.outlines_core", reason="outlines is not installed")
    words = tokenizer()
    plain = set(string.ascii_lowercase + "_(xyz):\n")
    texts = {number: words.decode([number]) for number in range(len(words))}
    known: dict[str, list[int]] = {}
    for number, text in texts.items():
        if text and set(text) <= plain:
            known.setdefault(text, []).append(number)
    index = core.Index(PATTERN, core.Vocabulary(words.eos_token_id or 0, known))
    return lambda: backend.OutlinesCoreLogitsProcessor(index, "torch")


@pytest.mark.parametrize("is_ahead", (False, True))
@pytest.mark.parametrize(
    "package",
    (
        of_xgrammar,
        of_outlines_and_xgrammar,
        pytest.param(of_outlines_and_llguidance, marks=pytest.mark.full),  # which compiles
        pytest.param(of_outlines_core, marks=pytest.mark.full),
    ),
    ids=lambda made: made.__name__,
)
def test_a_packages_processors(package, is_ahead, device, monkeypatch):
    """The tokens are those that the package's processor gives in stock code, and the text follows the grammar."""
    make = package()
    stock, ours = trained(device)
    if is_ahead:
        ahead(monkeypatch)
    ids = tokenizer()(["import os\n\n\ndef ", "class Node:\n    def "], return_tensors="pt", padding=True)["input_ids"]
    how = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    with counting(ours) as counts:
        found = ours.generate(ids.to(device), logits_processor=[make()], **how)
    expected = stock.generate(ids.to(device), logits_processor=[make()], **how)
    assert torch.equal(found, expected)
    assert counts.fast and not counts.fallback and counts.reasons == {"grammar_mask": 1}, counts.reasons
    plain = stock.generate(ids.to(device), **how)
    assert not torch.equal(plain[:, : found.shape[1]], found), "the grammar forbids nothing"
