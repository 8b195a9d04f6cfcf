"""What a recording did not look at is not proven: what a model makes of lengths, masks, errors and first uses."""

from __future__ import annotations

import gc
import math

import encoder_decoder_types
import habits
import pytest
import torch
from habits import HABITS, MASKS, RECORDABLE, habit_model
from models import counting
from own_decoders import VOCAB
from torch._subclasses.fake_tensor import FakeTensor
from transformers.models.bart.modeling_bart import BartDecoder

import hf_fastpath
from hf_fastpath.recording.math_functions import functions_of_lengths

#: bounds of habits are at 16, 20, 30, 32, 40, 48
PROMPT, NEW = 9, 44


@pytest.fixture(autouse=True)
def first_uses():
    habits.forget_first_uses()
    yield
    habits.forget_first_uses()


def both(*names, prompt=PROMPT, new=NEW, calls=2, **how):
    """Return stock's tokens, ours and the counts of each call; no counts if ``patch()`` refuses the model."""
    ids = torch.randint(3, VOCAB, (1, prompt), generator=torch.Generator().manual_seed(5))
    options = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False)
    expected = habit_model(*names, **how).generate(ids, **options)
    habits.forget_first_uses()
    model = habit_model(*names, **how)
    try:
        hf_fastpath.patch(model, quiet=True)
    except hf_fastpath.UnsupportedModelError as error:
        return expected, [(model.generate(ids, **options), None)], str(error)
    found = []
    for _ in range(calls):
        with counting(model) as counts:
            found.append((model.generate(ids, **options), counts))
    return expected, found, ""


def check(expected, found):
    for tokens, counts in found:
        assert torch.equal(tokens, expected)
        assert counts is None or counts.fast or counts.reasons
    return [counts for _, counts in found]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", HABITS)
def test_habits(name):
    """Stock's tokens on both sides of every bound; fast, where the habit can be written down."""
    expected, found, error = both(name)
    counts = check(expected, found)[-1]
    if name in RECORDABLE:
        assert counts is not None and counts.fast == NEW and not counts.reasons, error or counts


@pytest.mark.parametrize("name", ("as_float", "in_a_loop"))
def test_numbers_made_of_lengths_are_told_by_their_line(name):
    *_, error = both(name, calls=0)
    assert "made of a length, at habits.py:" in error, error


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    expected, found, error = both(mask=mask)
    counts = check(expected, found)[-1]
    if mask in ("narrow_far_on", "window_of_eight"):
        assert counts is not None and counts.fast == NEW, error or counts


@pytest.mark.parametrize("how", (dict(mask="narrow_far_on"), dict(names=("far_beyond",))), ids=("mask", "number"))
def test_far_bounds(how):
    """A prompt in front of a bound that is further away than the text that was recorded, and tokens behind it."""
    expected, found, _ = both(*how.pop("names", ()), **how, prompt=4194, new=14, calls=1, layers=1)
    counts = check(expected, found)[-1]
    assert counts.fast == 14 or "text_length" in counts.reasons, counts


def test_sequences_of_a_batch_cross_bounds_together():
    ids = torch.randint(3, VOCAB, (3, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    options = dict(attention_mask=mask, max_new_tokens=30, min_new_tokens=30, do_sample=True)
    stock, ours = habit_model("between", "grows"), hf_fastpath.patch(habit_model("between", "grows"), quiet=True)
    torch.manual_seed(3)
    expected = stock.generate(ids, **options)
    torch.manual_seed(3)
    with counting(ours) as counts:
        assert torch.equal(ours.generate(ids, **options), expected)
    assert counts.fast == 90, counts


@pytest.mark.every(2)
@pytest.mark.parametrize("name", [each for each in HABITS if each.startswith(("filled", "remembered"))])
@pytest.mark.parametrize("unpatched", (False, True), ids=("patched", "unpatched"))
def test_recordings_leave_no_tensors_behind(name, unpatched):
    """Another model that was never patched uses what the first one has filled."""
    ids = torch.randint(3, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(5))
    expected = habit_model(name).generate(ids, max_new_tokens=4, do_sample=False)
    habits.forget_first_uses()
    model = habit_model(name)
    try:
        hf_fastpath.patch(model, quiet=True)
        if unpatched:
            hf_fastpath.unpatch(model)
    except hf_fastpath.UnsupportedModelError:
        pass
    held = [habits.FIRST, *habits.TABLE, vars(habits.HabitLayer).get("scale"), *(x.filled for x in model.model.layers)]
    assert not any(isinstance(each, FakeTensor) for each in held)
    other = habit_model(name)
    assert torch.equal(other.generate(ids, max_new_tokens=4, do_sample=False), expected)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", [each for each in HABITS if each.startswith(("filled", "remembered"))])
def test_no_tensor_without_data_is_reachable(name):
    """The garbage collector finds none that anything but our own recordings holds."""
    before = {id(each) for each in gc.get_objects() if type(each) is FakeTensor}
    model = habit_model(name)
    try:
        hf_fastpath.patch(model, quiet=True)
        hf_fastpath.unpatch(model)
    except hf_fastpath.UnsupportedModelError:
        pass
    del model
    gc.collect()
    held = [each for each in gc.get_objects() if type(each) is FakeTensor and id(each) not in before]
    of_habits = [id(each) for each in (*vars(habits).values(), *habits.TABLE)]
    assert not [each for each in held if id(each) in of_habits]
    assert not any(isinstance(each, FakeTensor) for each in gc.get_referents(habits.scale_of))


def test_a_profiler_may_run():
    """cProfile's object is no function, and goes on behind a recording."""
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.enable()
    try:
        model = hf_fastpath.patch(habit_model("beyond"), quiet=True)
    finally:
        profile.disable()
    assert hf_fastpath.report(model).loop == "fast"
    assert len(pstats.Stats(profile).stats) > 100


def test_verify_tries_both_sides_of_each_bound():
    model = hf_fastpath.patch(habit_model("between", "far_beyond"), quiet=True)
    result = hf_fastpath.verify(model, torch.randint(3, VOCAB, (1, 8)), max_new_tokens=8)
    assert result.ok, result
    lengths = [row.prompt_len for row in result.rows if row.name.startswith("length ")]
    assert any(length < 19 <= length + 8 for length in lengths), result
    assert any(length < 4200 <= length + 8 for length in lengths), result


class ScalesLongInputs(BartDecoder):
    """What an encoder has read decides: there is more of it than 20 places, or not."""

    def forward(self, *args, encoder_hidden_states=None, **named):
        out = super().forward(*args, encoder_hidden_states=encoder_hidden_states, **named)
        if encoder_hidden_states.shape[1] > 20:
            out.last_hidden_state = out.last_hidden_state * 0.3
        return out


def test_lengths_of_an_encoders_output():
    stock, ours = (encoder_decoder_types.small_model("bart") for _ in range(2))
    for model in (stock, ours):
        model.model.decoder.__class__ = ScalesLongInputs
    hf_fastpath.patch(ours, quiet=True)
    for length in (8, 20, 21, 40, 8):
        given = encoder_decoder_types.text(1, length) | dict(max_new_tokens=12, do_sample=False)
        with counting(ours) as counts:
            assert torch.equal(ours.generate(**given), stock.generate(**given)), length
        assert counts.fast and not counts.reasons, counts.reasons


def test_functions_of_math_come_back_whichever_thread_ends_last():
    before, first, second = math.sqrt, functions_of_lengths(), functions_of_lengths()
    first.__enter__()
    second.__enter__()
    assert math.sqrt is not before and math.sqrt(16) == 4.0 and math.log(8, 2) == 3.0
    first.__exit__(None, None, None)
    assert math.sqrt is not before
    second.__exit__(None, None, None)
    assert math.sqrt is before
