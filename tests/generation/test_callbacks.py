"""Changes of the model by the user's code between two tokens take effect with the next token, as in stock."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from itertools import product

import pytest
import torch
from models import CPU, build, counting, heldout_tokens, left_padded, prompt, require_native, tokenizer, trained
from parity import assert_same_tokens
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import LogitsProcessorList, StoppingCriteriaList, TextStreamer
from transformers.generation.streamers import BaseStreamer

import hf_fastpath
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.state.snapshot import Snapshot
from hf_fastpath.errors import FallbackError
from hf_fastpath.patching.state import state_of

AT = 5  # the turn in which the callback changes the model
OPTIONS = dict(max_new_tokens=14, do_sample=False)


def mlp(model):
    return model.model.layers[1].mlp


def hook(model):
    mlp(model).register_forward_hook(lambda module, args, out: -2 * out)


def hook_in_front(model):
    model.lm_head.register_forward_pre_hook(lambda module, args: (-args[0],))


def hook_of_all(model):
    handle = torch_module.register_module_forward_hook(lambda module, args, out: -out if module is mlp(model) else None)
    model.undo = handle.remove  # for the test to call


def parameter(model):
    mlp(model).up_proj.weight = nn.Parameter(-2 * mlp(model).up_proj.weight.detach())


def data(model):
    mlp(model).up_proj.weight.data = -2 * mlp(model).up_proj.weight.data


def values(model):
    mlp(model).up_proj.weight.data.mul_(-2)


def module(model):
    other = nn.Linear(112, 204, bias=False)
    other.weight = nn.Parameter(-2 * mlp(model).up_proj.weight.detach())
    mlp(model).up_proj = other


def other_module(model):
    mlp(model).act_fn = nn.Sigmoid()


def embedding(model):
    model.set_input_embeddings(copy.deepcopy(model.get_input_embeddings()))
    model.get_input_embeddings().weight.data.mul_(1.5)


def training(model):
    """No activation is dropped here; train mode has effects elsewhere."""
    model.train()


def forward(model):
    inner = mlp(model).down_proj
    inner.forward = lambda x: -2 * type(inner).forward(inner, x)


def forward_of_a_layer(model):
    layer = model.model.layers[0]
    layer.forward = (lambda ours: lambda hidden, *args, **kwargs: ours(-hidden, *args, **kwargs))(layer.forward)


def adapter(model):
    """Put in a module that holds the module it stands for, as PEFT does."""

    class Lora(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return -2 * self.base(x)

    mlp(model).down_proj = Lora(mlp(model).down_proj)


def setting(model):
    model.model.layers[0].self_attn.scaling = 0.5


def attention(model):
    model.set_attn_implementation("eager")
    mlp(model).up_proj.weight.data.mul_(-2)


def unpatched(model):
    hf_fastpath.unpatch(model)
    mlp(model).up_proj.weight.data.mul_(-2)


#: change -> the reason that our loop counts for it; None if a plan of the changed model goes on
CHANGES: dict[Callable, str | None] = {
    hook: "hooks",
    hook_in_front: "hooks",
    hook_of_all: "hooks",
    parameter: None,
    data: None,
    values: None,
    module: None,
    other_module: None,
    embedding: None,
    training: None,
    forward: "instance_forward",
    forward_of_a_layer: "instance_forward",
    adapter: None,
    setting: None,
    attention: None,
    unpatched: "unpatched",
}


class Change:
    """Changes a model at its turn ``AT``."""

    def __init__(self, model, change):
        self.model, self.change, self.turns = model, change, 0

    def step(self) -> None:
        self.turns += 1
        if self.turns == AT:
            self.change(self.model)


class Streamer(Change, BaseStreamer):
    def put(self, value):
        self.step()

    def end(self):
        pass


def processor(model, change) -> dict:
    changing = Change(model, change)
    return dict(logits_processor=LogitsProcessorList([lambda ids, scores: (changing.step(), scores)[1]]))


def criterion(model, change) -> dict:
    changing = Change(model, change)
    goes_on = lambda ids, scores, **_: (changing.step(), torch.zeros(len(ids), dtype=torch.bool))[1]  # noqa: E731
    return dict(stopping_criteria=StoppingCriteriaList([goes_on]))


def streamer(model, change) -> dict:
    return dict(streamer=Streamer(model, change))


def allowed_tokens(model, change) -> dict:
    changing = Change(model, change)
    everything = list(range(model.config.vocab_size))
    return dict(prefix_allowed_tokens_fn=lambda row, ids: (changing.step(), everything)[1])


CALLBACKS = (processor, criterion, streamer, allowed_tokens)
WAYS = {
    "greedy": {},
    "sampling": dict(do_sample=True, top_k=40),
    "prompt lookup": dict(prompt_lookup_num_tokens=3),
    "sampled prompt lookup": dict(prompt_lookup_num_tokens=3, do_sample=True),
}


def run(patched: bool, callback, change, strict: bool = False, architecture: str = "llama", **options):
    """Return (tokens, what our model counted, the model) of a generate() whose callback changes the model."""
    model = build(architecture)
    if patched:
        hf_fastpath.patch(model, quiet=True, strict=strict)
    stats = state_of(model).stats if patched else None
    torch.manual_seed(3)
    try:
        found = model.generate(**callback(model, change), **(OPTIONS | options))
    finally:
        if hasattr(model, "undo"):
            model.undo()
    return found, stats, model


def assert_counted(stats, change, tokens: int) -> None:
    reason = CHANGES[change]
    if reason is None:
        assert stats.fast_tokens == tokens and not stats.fallback_tokens
    else:
        assert 0 < stats.fast_tokens < tokens and stats.fast_tokens + stats.fallback_tokens == tokens
    users = {"custom_logits_processor", "custom_stopping_criteria", "custom_streamer"}
    others = set(stats.reasons) - users
    assert others == ({reason} if reason not in (None, "unpatched") else set())


@pytest.mark.each_value
@pytest.mark.parametrize("callback", CALLBACKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_changes_of_the_model(change, callback):
    require_native(CPU)
    ids = prompt(CPU)
    expected, _, stock = run(False, callback, change, input_ids=ids)
    found, stats, ours = run(True, callback, change, input_ids=ids)
    assert_same_tokens(found, expected)
    if change is not training:
        unchanged = build("llama").generate(ids, **OPTIONS)
        assert not torch.equal(found, unchanged), "the change makes no difference"
    assert_counted(stats, change, 14)
    # the next call sees the model as it is now
    if change is not hook_of_all:
        assert_same_tokens(ours.generate(ids, **OPTIONS), stock.generate(ids, **OPTIONS))


@pytest.mark.each_pair
@pytest.mark.parametrize("change", (hook, parameter, values, unpatched), ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("callback", (criterion, streamer), ids=lambda f: f.__name__)
def test_every_loop_sees_changes(callback, way, change):
    require_native(CPU)
    options = dict(input_ids=prompt(CPU, 1, 30).remainder(7) + 1, **WAYS[way])
    expected, *_ = run(False, callback, change, **options)
    found, stats, _ = run(True, callback, change, **options)
    assert_same_tokens(found, expected)
    assert_counted(stats, change, 14)


@pytest.mark.each_pair
@pytest.mark.parametrize("turn", (1, 2, 3))
@pytest.mark.parametrize("change", (hook, parameter), ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", ("prompt lookup", "sampled prompt lookup"))
@pytest.mark.parametrize("callback", (processor, criterion), ids=lambda f: f.__name__)
def test_changes_around_the_first_drafts(callback, way, change, turn, monkeypatch):
    """Processors, and criteria in some versions, are called for a draft before the prompt is read."""
    require_native(CPU)
    monkeypatch.setattr(sys.modules[__name__], "AT", turn)
    options = dict(input_ids=prompt(CPU, 1, 6).repeat(1, 4), **WAYS[way])
    expected, *_ = run(False, callback, change, **options)
    found, stats, _ = run(True, callback, change, **options)
    assert_same_tokens(found, expected)
    assert stats.fast_tokens + stats.fallback_tokens == 14


class Recorder(BaseStreamer):
    """Notes what a streamer, a criterion and a processor are given; ``stop`` says in which turns the criterion ends the
    text."""

    def __init__(self, stop: Callable[[int], bool]):
        self.calls, self.stop, self.turns = [], stop, 0

    def put(self, value):
        self.calls.append(("put", value.dtype, value.tolist()))

    def end(self):
        self.calls.append(("end",))

    def criterion(self, ids, scores, **_):
        self.turns += 1
        self.calls.append(("criterion", ids.tolist(), None if scores is None else len(scores)))
        return torch.full((len(ids),), self.stop(self.turns), device=ids.device)

    def processor(self, ids, scores):
        self.calls.append(("processor", ids.tolist()))
        return scores

    def arguments(self, names: str) -> dict:
        """Return the arguments of ``generate()`` that bring in the objects of ``names``."""
        given = dict(
            streamer=self,
            stopping_criteria=StoppingCriteriaList([self.criterion]),
            logits_processor=LogitsProcessorList([self.processor]),
        )
        return {name: value for name, value in given.items() if name in names}


#: turns of a criterion in which it ends the text; if it is asked about drafts, "third" comes after drafts only
STOPS = {"never": lambda turn: False, "third": lambda turn: turn % 4 == 3, "fourth": lambda turn: turn == 4}


def near_copy(model: nn.Module, patched: bool) -> nn.Module:
    """Make an assistant with which a trained model often agrees."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for index, weight in enumerate(made.parameters()):
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(index))
            weight.add_(0.02 * weight.std() * noise)
    made.generation_config.num_assistant_tokens = 3
    made.generation_config.assistant_confidence_threshold = 0
    return hf_fastpath.patch(made, quiet=True) if patched else made


@pytest.mark.each_pair
@pytest.mark.parametrize(
    ("names", "stop"),
    [("streamer", "never"), ("logits_processor", "never"), *product(("stopping_criteria", "all"), STOPS)],
)
@pytest.mark.parametrize("do_sample", (False, True), ids=("greedy", "sampled"))
@pytest.mark.parametrize("drafts", ("lookup", "long lookup", "assistant", "patched assistant"))
def test_calls_of_a_loop_over_drafts(drafts, do_sample, names, stop):
    """The user's objects are given what stock gives them, as often and in the same order; scores, random numbers and
    the cache are stock's as well."""
    stock, ours = trained(CPU)
    names = "streamer stopping_criteria logits_processor" if names == "all" else names
    options = dict(input_ids=heldout_tokens(150), max_length=170, do_sample=do_sample)
    options |= dict(return_dict_in_generate=True, output_scores="logits" not in names, output_logits=True)
    results = []
    for model in (stock, ours):
        if "assistant" in drafts:
            how = dict(assistant_model=near_copy(stock, patched=model is ours and drafts.startswith("patched")))
        else:
            how = dict(prompt_lookup_num_tokens=20 if drafts.startswith("long") else 3)
        recorder = Recorder(STOPS[stop])
        torch.manual_seed(3)
        with counting(model) if model is ours else contextlib.nullcontext() as counts:
            out = model.generate(**options, **how, **recorder.arguments(names))
        results.append((out, recorder.calls, torch.get_rng_state()))
    (expected, calls, state), (found, our_calls, our_state) = results
    assert torch.equal(found.sequences, expected.sequences) and torch.equal(our_state, state)
    ours_in_room, in_room = (  # stock also reads drafts that the text has no room for
        [call for call in made if call[0] != "processor" or len(call[1][0]) < 170] for made in (our_calls, calls)
    )
    assert ours_in_room == in_room
    for rows, wanted in ((found.scores, expected.scores), (found.logits, expected.logits)):
        assert (rows is None) == (wanted is None)
        for row, other in zip(rows or (), wanted or (), strict=True):
            torch.testing.assert_close(row, other, rtol=1e-3, atol=1e-3)
    assert found[CACHE].get_seq_length() == expected[CACHE].get_seq_length()
    assert counts.fast == found.sequences.shape[1] - 150 and not counts.reasons


@pytest.mark.parametrize("change", (hook, parameter), ids=lambda f: f.__name__)
@pytest.mark.parametrize("callback", (criterion, streamer), ids=lambda f: f.__name__)
def test_rows_that_have_ended_stay_so(callback, change):
    """A batch has padded rows, one of which ends before the change."""
    require_native(CPU)
    inputs = left_padded(CPU, 3)
    first = build("llama").generate(**inputs, **OPTIONS)
    options = dict(**inputs, eos_token_id=int(first[1, 11 + 2]), pad_token_id=0)
    options |= dict(return_dict_in_generate=True, output_scores=True) if callback is criterion else {}
    expected, *_ = run(False, callback, change, **options)
    found, stats, _ = run(True, callback, change, **options)
    if callback is criterion:
        torch.testing.assert_close(torch.stack(found.scores), torch.stack(expected.scores), rtol=1e-3, atol=1e-3)
        assert all(a.get_seq_length() == b.get_seq_length() for a, b in [(found[CACHE], expected[CACHE])])
        found, expected = found.sequences, expected.sequences
    assert_same_tokens(found, expected)
    assert (expected[1, 11 + 3 :] == 0).all() and stats.fast_tokens


def test_dropout_that_is_turned_on():
    """The random numbers of dropout and of sampling are drawn as stock draws them."""
    require_native(CPU)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.2)
    results = []
    for patched in (True, False):
        model = build("gpt2", **rates)
        if patched:
            hf_fastpath.patch(model, quiet=True)
        torch.manual_seed(7)
        found = model.generate(prompt(CPU), **criterion(model, training), max_new_tokens=14, do_sample=True)
        results.append((found, torch.get_rng_state()))
        if patched:
            assert state_of(model).stats.reasons["dropout"] == 1
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("way", ("greedy", "prompt lookup"))
@pytest.mark.parametrize("callback", CALLBACKS, ids=lambda f: f.__name__)
def test_strict_refuses_what_stock_code_would_have_to_run(callback, way):
    require_native(CPU)
    options = dict(input_ids=prompt(CPU), strict=True, **WAYS[way])
    with pytest.raises(FallbackError, match="hooks"):
        run(True, callback, hook, **options)
    found, stats, _ = run(True, callback, parameter, **options)
    assert_same_tokens(found, run(False, callback, parameter, input_ids=prompt(CPU), **WAYS[way])[0])
    assert stats.fast_tokens == 14


def test_patched_anew_with_other_options():
    """A callback may unpatch the model and patch it with quantized weights, also in transformers' loop."""
    require_native(CPU)

    def quantize(model):
        hf_fastpath.unpatch(model)  # stock's model is not patched
        hf_fastpath.patch(model, quiet=True, weights="int8")

    ids = prompt(CPU)
    expected, *_ = run(False, criterion, quantize, input_ids=ids)
    found, _, model = run(True, criterion, quantize, input_ids=ids)
    assert_same_tokens(found, expected)
    assert state_of(model).stats.fast_tokens == 14


def test_an_assistant_that_changes():
    """The plan of a patched assistant is not used any more once the assistant has changed."""
    require_native(CPU)
    for change in (hook, parameter):
        stock, ours = build("llama"), hf_fastpath.patch(build("llama"), quiet=True)
        helper = hf_fastpath.patch(build("llama"), quiet=True)
        expected = stock.generate(prompt(CPU), **OPTIONS)
        found = ours.generate(prompt(CPU), **OPTIONS, assistant_model=helper, **streamer(helper, change))
        assert_same_tokens(found, expected)
        assert state_of(ours).stats.fast_tokens == 14 and not state_of(ours).stats.fallback_tokens


def test_a_model_that_is_another_one_with_every_token():
    require_native(CPU)

    class Turning(Streamer):
        def step(self):
            parameter(self.model)

    results = []
    for patched in (True, False):
        model = build("llama")
        if patched:
            hf_fastpath.patch(model, quiet=True)
        results.append(model.generate(prompt(CPU), streamer=Turning(model, None), **OPTIONS))
    assert_same_tokens(*results)


@pytest.mark.parametrize("kind", ("none", "transformers' own", "subclass", "method of the instance"))
def test_nobody_looks_where_no_code_of_the_user_runs(kind, monkeypatch, capsys):
    _, ours = trained(CPU)
    looks, holds = [], Snapshot.holds
    monkeypatch.setattr(Snapshot, "holds", lambda self: (looks.append(1), holds(self))[1])
    made = TextStreamer(tokenizer()) if kind != "subclass" else type("Own", (TextStreamer,), {})(tokenizer())
    if kind.startswith("method"):
        made.on_finalized_text = lambda text, stream_end=False: None
    with counting(ours) as counts:
        ours.generate(prompt(CPU).remainder(250), **OPTIONS, **({} if kind == "none" else dict(streamer=made)))
    watched = kind in ("subclass", "method of the instance")
    assert (len(looks) > 10) == watched and set(counts.reasons) == ({"custom_streamer"} if watched else set())


def test_the_functions_of_the_models_file(monkeypatch):
    """A callback replaces a function that every layer calls."""
    require_native(CPU)
    home = sys.modules[type(build("llama")).__module__]
    real = home.apply_rotary_pos_emb

    def replace(model):
        monkeypatch.setattr(home, "apply_rotary_pos_emb", lambda q, k, *rest, **named: (q, k))

    expected, *_ = run(False, criterion, replace, input_ids=prompt(CPU))
    monkeypatch.setattr(home, "apply_rotary_pos_emb", real)
    found, stats, _ = run(True, criterion, replace, input_ids=prompt(CPU))
    assert_same_tokens(found, expected)
    assert stats.reasons["class_forward"] == 1
