"""Greedy search and sampling with drafts, of an assistant or found in the text itself, give stock's tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from models import CPU, build, counting, fresh, heldout_tokens, left_padded, over_architectures, pair, prompt, trained
from parity import assert_same_tokens, both, rng_state
from torch import nn
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer
from transformers.generation import utils as generation_utils

import hf_fastpath
from hf_fastpath.compat import CACHE, CRITERIA_SEE_DRAFTS
from hf_fastpath.decode.loops.acceptance import accept
from hf_fastpath.decode.plans import decode_plan as plan_module
from hf_fastpath.decode.plans.draft_plan import WIDTHS, DraftPlan
from hf_fastpath.errors import FallbackError


def draft_plans(model: nn.Module) -> list[DraftPlan]:
    return [plan for plan in vars(model)["_hf_fastpath"].plans if type(plan) is DraftPlan]


def assistant(architecture: str, device: torch.device, drafted: int = 5, threshold: float = 0.0) -> nn.Module:
    """Make a patched model of one layer, with whose tokens the other models agree now and then."""
    changes = {"n_layer": 1} if architecture == "gpt2" else {"num_hidden_layers": 1}
    made = hf_fastpath.patch(build(architecture, **changes).to(device), quiet=True)
    made.generation_config.num_assistant_tokens = drafted
    made.generation_config.assistant_confidence_threshold = threshold
    return made


def noisy_copy(model: nn.Module, scale: float = 0.02) -> nn.Module:
    """Make a patched copy of a patched model with slightly other weights, so that most of its drafts are accepted."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(scale * parameter.std() * torch.randn_like(parameter))
    return made


@over_architectures
def test_tokens_of_an_assistant(architecture, device):
    """Drafts are accepted and rejected, and windows move on; the assistant's own loop makes no call."""
    stock, ours = pair(architecture, device)
    options = dict(input_ids=prompt(device), max_new_tokens=40, do_sample=False)
    plain = stock.generate(**options)
    for helper in (assistant(architecture, device), noisy_copy(ours)):
        with counting(ours) as counts, counting(helper) as drafts:
            found = ours.generate(assistant_model=helper, **options)
        assert_same_tokens(found, plain, stock)
        assert counts.fast == 40 and not counts.reasons
        assert not drafts.fallback and not drafts.reasons
    assert {plan.query_len for plan in draft_plans(ours)} <= set(WIDTHS)


@pytest.mark.parametrize("drafted", (1, 3, 15, 16, 40))
def test_drafts_of_any_length(drafted, device, monkeypatch):
    """Drafts may be longer than a plan is wide; the assistant is the very model, so that all drafts are accepted."""
    reads, finish = [], DraftPlan.finish
    monkeypatch.setattr(DraftPlan, "finish", lambda self, count: reads.append(count) or finish(self, count))
    stock, ours = fresh("llama", device)
    ours.generation_config.num_assistant_tokens = drafted
    ours.generation_config.assistant_confidence_threshold = 0
    options = dict(input_ids=prompt(device), max_new_tokens=60, do_sample=False)
    with counting(ours) as counts:
        found = ours.generate(assistant_model=ours, **options)
    assert_same_tokens(found, stock.generate(**options), stock)
    assert counts.fast == 60 and not counts.reasons
    assert max(reads) == min(drafted + 1, 16)
    rounds = -(-59 // (drafted + 1)) * -(-(drafted + 1) // 16)  # the first token comes from the prompt
    assert len(reads) <= rounds + 1
    assert {plan.query_len for plan in draft_plans(ours)} <= set(WIDTHS)


@pytest.mark.parametrize("length", (120, 300))
def test_tokens_of_a_prompt_lookup(length, device):
    """The text has repetitions; with 300 tokens, drafts are cropped from windows that have moved on."""
    stock, ours = trained(device)
    for drafted in (2, 8, 20):
        options = dict(input_ids=heldout_tokens(length).to(device), max_new_tokens=80, do_sample=False)
        with counting(ours) as counts:
            found = ours.generate(prompt_lookup_num_tokens=drafted, **options)
        assert_same_tokens(found, stock.generate(**options), stock)
        assert counts.fast == found.shape[1] - length and not counts.reasons


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_half_precision(dtype, device):
    """Logits are rounded, so that a token may differ if two are nearly as likely."""
    stock, ours = pair("llama", device, dtype)
    options = dict(input_ids=prompt(device, 1, 6).repeat(1, 4), max_new_tokens=24, do_sample=False)
    found = ours.generate(prompt_lookup_num_tokens=4, **options)
    assert_same_tokens(found, stock.generate(**options), stock)


def test_draft_lengths_follow_stocks_schedules(device):
    """Every round drafts as many tokens as transformers does, with a threshold and without."""
    stock, ours = pair("llama", device)
    helper = noisy_copy(ours, 0.1)
    options = dict(input_ids=prompt(device), max_new_tokens=60, do_sample=False)
    for schedule, threshold in (("heuristic", 0), ("heuristic_transient", 0), ("constant", 0.3), ("constant", 0)):
        left = []
        for model in (stock, ours):
            config = helper.generation_config
            config.num_assistant_tokens, config.num_assistant_tokens_schedule = 5, schedule
            config.assistant_confidence_threshold = threshold
            found = model.generate(assistant_model=helper, **options)
            left.append((found, config.num_assistant_tokens))
        assert_same_tokens(left[1][0], left[0][0], stock)
        assert left[1][1] == left[0][1]
        assert schedule != "heuristic" or left[0][1] != 5


def test_padding_ends_and_what_is_returned(device):
    """There are left padding, end tokens inside a draft, scores, a streamer, and the cache for the next turn."""
    stock, ours = pair("mistral", device)
    helper = noisy_copy(ours)
    inputs = {name: tensor[2:] for name, tensor in left_padded(device, 3, 20).items()}
    ends = prompt(device, 1, 200)[0, :60].unique().tolist()
    options = dict(max_new_tokens=40, do_sample=False, eos_token_id=ends, return_dict_in_generate=True)
    options |= dict(output_scores=True, output_logits=True)
    expected = stock.generate(**inputs, **options)
    for how in ({"assistant_model": helper}, {"prompt_lookup_num_tokens": 3}):
        state = rng_state(device)
        with counting(ours) as counts:
            found = ours.generate(**inputs, **options, **how)
        assert torch.equal(rng_state(device), state)
        assert counts.fast == expected.sequences.shape[1] - 20 and not counts.reasons
        assert torch.equal(found.sequences, expected.sequences)
        for rows, wanted in ((found.scores, expected.scores), (found.logits, expected.logits)):
            torch.testing.assert_close(torch.cat(rows), torch.cat(wanted), rtol=1e-3, atol=1e-3)
        assert found[CACHE].get_seq_length() == expected[CACHE].get_seq_length()
        more = torch.cat((found.sequences, prompt(device, 1, 3)), dim=1)
        mask = torch.cat((inputs["attention_mask"], torch.ones_like(more[:, 20:])), dim=1)
        again = dict(input_ids=more, attention_mask=mask, max_new_tokens=12, do_sample=False)
        then = ours.generate(**{CACHE: found[CACHE]}, **again, **how)
        assert_same_tokens(then, stock.generate(**again), stock, mask)


@pytest.mark.parametrize("do_sample", (False, True))
@pytest.mark.parametrize("how", ("lookup", "assistant"))
def test_a_prompt_that_ends_in_an_end_token(how, do_sample, device):
    """If transformers asks the criteria about drafts, this token ends the text, and there is no draft."""
    stock, ours = pair("llama", device)
    arguments = dict(prompt_lookup_num_tokens=3) if how == "lookup" else dict(assistant_model=noisy_copy(ours))
    others = torch.arange(20, 32, device=device)[None]  # the last of them occurs nowhere else
    for ids in (others, prompt(device, 1, 6).repeat(1, 2)):
        options = dict(input_ids=ids, eos_token_id=int(ids[0, -1]), max_new_tokens=20, **arguments)
        found, expected = both(stock, ours, do_sample=do_sample, **options)
        assert_same_tokens(found, expected)


class _Words:
    """A stand-in for a tokenizer: a token's text is its number."""

    @staticmethod
    def decode(ids, **_) -> str:
        return " ".join(map(str, ids)) + " "


class _Streamed(TextStreamer):
    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text = getattr(self, "text", "") + text


def test_streamer(device):
    stock, ours = pair("llama", device)
    texts = []
    for model in (stock, ours):
        streamer = _Streamed(_Words())
        out = model.generate(
            prompt(device, 1, 6).repeat(1, 4), prompt_lookup_num_tokens=4, streamer=streamer, max_new_tokens=30
        )
        texts.append((streamer.text, out[0, :].tolist()))
    assert texts[0] == texts[1]


def test_lengths_are_kept(device):
    """A draft never goes beyond the longest text; a single token needs no draft."""
    stock, ours = pair("gpt2", device)
    ids = prompt(device, 1, 6).repeat(1, 4)
    for new_tokens in (1, 2, 3, 4, 7):
        found, expected = both(
            stock, ours, input_ids=ids, prompt_lookup_num_tokens=5, max_new_tokens=new_tokens, do_sample=False
        )
        assert found.shape[1] == 24 + new_tokens
        assert_same_tokens(found, expected, stock)


def test_up_to_the_last_position(device):
    """The tokens that fill up a plan have no positions of their own, because GPT-2's table ends."""
    stock, ours = fresh("gpt2", device, n_positions=40)
    ids = prompt(device, 1, 6).repeat(1, 4)
    options = dict(input_ids=ids, max_new_tokens=16, do_sample=False)
    for drafted in (2, 4, 8):
        found = ours.generate(prompt_lookup_num_tokens=drafted, **options)
        assert_same_tokens(found, stock.generate(**options), stock)


#: arguments of generate() with which transformers' loop and ours draw and compute in the same order
CHOICES = {
    "sampling": dict(do_sample=True, top_k=0),
    "warped": dict(do_sample=True, temperature=0.7, top_k=30, top_p=0.95),
    "processors": dict(do_sample=False, repetition_penalty=1.3),
    "sampled processors": dict(do_sample=True, top_k=50, repetition_penalty=1.2, min_new_tokens=10),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_of_a_prompt_lookup(name, device):
    """The seed's tokens, scores and random numbers are those of transformers' loop over drafts."""
    stock, ours = trained(device)
    options = dict(input_ids=heldout_tokens(150).to(device), max_new_tokens=60, prompt_lookup_num_tokens=4)
    options |= dict(return_dict_in_generate=True, output_scores=True, output_logits=True) | CHOICES[name]
    with counting(ours) as counts:
        found, expected = both(stock, ours, **options)
    assert_same_tokens(found.sequences, expected.sequences)
    for rows, wanted in ((found.scores, expected.scores), (found.logits, expected.logits)):
        torch.testing.assert_close(torch.cat(rows), torch.cat(wanted), rtol=1e-3, atol=1e-3)
    assert found[CACHE].get_seq_length() == expected[CACHE].get_seq_length()
    assert counts.fast == found.sequences.shape[1] - 150 and not counts.reasons


@pytest.mark.each_value
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("patched", (True, False), ids=("patched", "stock"))
def test_choices_of_an_assistant(name, patched, device):
    """Drafts are samples as well; the assistant is near enough that most of them are accepted."""
    stock, ours = pair("llama", device)
    helper = noisy_copy(ours if patched else stock)
    helper.generation_config.assistant_confidence_threshold = 0
    options = dict(**{k: v[2:] for k, v in left_padded(device, 3, 20).items()}, max_new_tokens=40, **CHOICES[name])
    reads, read = [], DraftPlan.read  # of each read: whether a plan of the model made it, not one of the assistant
    plans = vars(ours)["_hf_fastpath"].plans
    with pytest.MonkeyPatch.context() as patch, counting(ours) as counts:
        patch.setattr(
            DraftPlan, "read", lambda self, tokens: reads.append(self.on_end.__self__ is plans) or read(self, tokens)
        )
        found, expected = both(stock, ours, assistant_model=helper, **options)
    assert_same_tokens(found, expected)
    assert counts.fast == found.shape[1] - 20 and not counts.reasons
    assert 0 < sum(reads) < counts.fast - 5  # some drafts were accepted
    if patched:
        with counting(helper) as drafted:
            ours.generate(assistant_model=helper, **options)
        assert drafted.fast > 0 and not drafted.reasons  # the plan of the assistant has drafted


@pytest.mark.parametrize("ends", (False, True) if CRITERIA_SEE_DRAFTS else (False,))
@pytest.mark.parametrize("rows", (0, 1, 5))
def test_acceptance_draws_what_transformers_draws(rows, ends, device):
    """Algorithm 1 of speculative sampling draws the same random numbers."""
    reference = generation_utils._speculative_sampling
    extra = {"is_done_candidate": ends} if CRITERIA_SEE_DRAFTS else {}
    taken = set()
    for seed in range(20):
        torch.manual_seed(seed)
        scores = torch.randn(rows + 1, 40, device=device)
        draft_scores = scores[:rows] + 0.5 * torch.randn(rows, 40, device=device)
        drafts = torch.multinomial(draft_scores.softmax(-1), 1)[:, 0] if rows else scores.new_empty(0, dtype=torch.long)
        torch.manual_seed(seed + 100)
        found = accept(scores, drafts, draft_scores if rows else None, do_sample=True, ends=ends)
        state = rng_state(device)
        torch.manual_seed(seed + 100)
        if rows:
            text = torch.cat((drafts.new_zeros(3), drafts))[None]
            expected, _ = reference(text, draft_scores[None], rows, scores[None], **extra)
        else:
            expected = torch.multinomial(scores.softmax(-1), 1)[:, : 0 if ends else 1]
        assert found.tolist() == expected[0].tolist()
        assert torch.equal(rng_state(device), state)
        taken.add(len(found))
    assert max(taken) == rows + 1 - ends and (rows > 1 or min(taken) == max(rows, 1 - ends))


def test_acceptance_keeps_the_models_distribution():
    """Whatever the drafts' distribution is, the first token is a sample of the model's."""
    torch.manual_seed(0)
    count, vocab = 20000, 5
    scores, draft_scores = torch.randn(2, vocab), 2 * torch.randn(1, vocab)
    drafts = torch.multinomial(draft_scores.softmax(-1), count, replacement=True)[0]
    first = torch.stack([accept(scores, draft[None], draft_scores, do_sample=True)[0] for draft in drafts])
    expected = scores[0].double().softmax(-1)
    spread = (expected * (1 - expected) / count).sqrt()
    assert ((first.bincount(minlength=vocab) / count - expected).abs() < 5 * spread).all()
    assert (draft_scores[0].softmax(-1) - expected).abs().max() > 10 * spread.max()


def test_criteria_of_the_user(device):
    """The criteria are asked after every round, as in transformers."""

    class Longer(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 45, device=input_ids.device)

    stock, ours = pair("llama", device)
    options = dict(input_ids=prompt(device, 1, 6).repeat(1, 4), max_new_tokens=60, prompt_lookup_num_tokens=3)
    for do_sample in (False, True):
        with counting(ours) as counts:
            found, expected = both(
                stock, ours, stopping_criteria=StoppingCriteriaList([Longer()]), do_sample=do_sample, **options
            )
        assert_same_tokens(found, expected)
        assert 45 <= found.shape[1] < 50 and not counts.reasons


def test_what_is_left_to_transformers_loop(device):
    """The loop runs over patched modules, with a reason, and ``strict=True`` refuses it."""
    stock, ours = fresh("llama", device)
    options = dict(input_ids=prompt(device), max_new_tokens=12, do_sample=False, assistant_early_exit=1)
    with counting(ours) as counts:
        found, expected = both(stock, ours, **options)
    assert counts.reasons["generation_mode"] == 1 and not counts.fast
    assert_same_tokens(found, expected)
    strict = hf_fastpath.patch(copy.deepcopy(stock), strict=True, quiet=True)
    with pytest.raises(FallbackError, match="generation_mode"):
        strict.generate(**options)


def test_an_interrupt_leaves_the_cache_in_one_piece(monkeypatch):
    """A draft breaks off in the middle of a read."""
    stock, ours = fresh("llama")
    cache = hf_fastpath.FastpathCache(ours.config)
    options = dict(input_ids=prompt(CPU, 1, 6).repeat(1, 4), max_new_tokens=20, do_sample=False)
    real, reads = DraftPlan.read, []

    def read(self, tokens):
        reads.append(tokens)
        if len(reads) == 3:
            raise KeyboardInterrupt
        return real(self, tokens)

    monkeypatch.setattr(DraftPlan, "read", read)
    with pytest.raises(KeyboardInterrupt):
        ours.generate(**{CACHE: cache}, prompt_lookup_num_tokens=4, **options)
    assert len({layer.cumulative_length for layer in cache.layers}) == 1
    monkeypatch.setattr(DraftPlan, "read", real)
    found = ours.generate(prompt_lookup_num_tokens=4, **options)
    assert_same_tokens(found, stock.generate(**options), stock)


def test_one_capture_serves_every_draft(cuda, monkeypatch):
    """Other draft lengths, prompts and growing caches need one capture for each width; crops move no buffer."""
    made, real = [], plan_module.capture
    monkeypatch.setattr(plan_module, "capture", lambda *given: made.append(given) or real(*given))
    stock, ours = fresh("mistral", cuda)
    helper = noisy_copy(ours)
    for turn in range(2):
        for drafted in (1, 2, 3, 5, 7, 12, 15, 20):
            helper.generation_config.num_assistant_tokens = drafted
            helper.generation_config.assistant_confidence_threshold = 0
            options = dict(input_ids=prompt(cuda, 1, 10 * drafted), max_new_tokens=200, do_sample=False)
            assert_same_tokens(ours.generate(assistant_model=helper, **options), stock.generate(**options), stock)
        if turn == 0:
            captured = len(made)
            assert captured <= len(WIDTHS) + 2  # the assistant has a plan of one token and a plan of two
    assert len(made) == captured
