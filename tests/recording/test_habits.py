"""Decoders at random from a grammar of habits: patched, each gives stock's tokens or is refused."""

from __future__ import annotations

import random

import habits
import pytest
import torch
from habits import CLASSES, HABITS, MASKS, RECORDABLE, habit_model
from models import counting
from own_decoders import VOCAB

import hf_fastpath

#: tokens at which habits change their ways
_BOUNDS = (16, 20, 24, 30, 32, 40, 48, 64)


def sentence(seed: int) -> tuple[dict, dict]:
    """Return a model of the grammar, and a call of ``generate()``, by their arguments."""
    draw = random.Random(seed)
    names = draw.sample(RECORDABLE if draw.random() < 0.7 else list(HABITS), draw.choice((0, 1, 1, 2, 2, 3)))
    model = dict(names=names, layers=draw.choice((1, 2, 3)))
    model["mask"] = draw.choice(list(MASKS)) if draw.random() < 0.3 else None
    model["kind"] = draw.choice(list(CLASSES)) if draw.random() < 0.3 else "HabitDecoderForCausalLM"
    bound = draw.choice(_BOUNDS)
    batch, prompt, new = draw.choice((1, 1, 1, 2, 3)), draw.randint(max(2, bound - 12), bound + 1), draw.randint(3, 24)
    ids = torch.randint(3, VOCAB, (batch, prompt), generator=torch.Generator().manual_seed(seed))
    call = dict(inputs=ids, max_new_tokens=new, min_new_tokens=new, do_sample=draw.random() < 0.3)
    if batch > 1 and draw.random() < 0.5:
        mask = torch.ones_like(ids)
        mask[-1, : prompt // 2] = 0
        call["attention_mask"] = mask
    elif batch == 1 and draw.random() < 0.2:
        call["prompt_lookup_num_tokens"] = 3
        call["do_sample"] = False
    return model, call


def generated(model, call):
    torch.manual_seed(1)
    try:
        return model.generate(**call).tolist()
    except Exception as error:  # what stock raises, ours has to raise, too
        return f"{type(error).__name__}: {error}"


@pytest.mark.every(75)
@pytest.mark.parametrize("seed", range(300))
def test_tokens_are_those_of_stock(seed):
    how, call = sentence(seed)
    names = how.pop("names")
    print(f"seed {seed}: {names}, {how}, {list(call)}, {tuple(call['inputs'].shape)}")
    try:
        habits.forget_first_uses()
        expected = generated(habit_model(*names, **how), call)
        habits.forget_first_uses()
        model = habit_model(*names, **how)
        try:
            hf_fastpath.patch(model, quiet=True)
        except hf_fastpath.UnsupportedModelError as error:
            print(error)
            assert generated(model, call) == expected
            return
        for _ in range(2):
            with counting(model) as counts:
                assert generated(model, call) == expected, counts.reasons
            assert isinstance(expected, str) or counts.fast or counts.reasons, counts
    finally:
        habits.forget_first_uses()
