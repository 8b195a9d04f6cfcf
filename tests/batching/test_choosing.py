"""Tokens of many members are chosen at once, and each as ``torch.multinomial`` chooses it for its member alone."""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_fastpath.batching.choosing import Chooser, choose
from hf_fastpath.compat import sampling_settings

WAYS = (
    (TemperatureLogitsWarper(0.7), TopKLogitsWarper(20)),
    (TopPLogitsWarper(0.8),),
    (),
)


def sampler(way: int, seed: int | None, device) -> Chooser:
    processors = LogitsProcessorList(WAYS[way])
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    return Chooser(tuple(sampling_settings(processors)), processors, generator)


def test_each_member_has_the_tokens_that_it_has_alone(device):
    logits = torch.randn(12, 301, device=device, generator=torch.Generator(device).manual_seed(0)) * 3
    greedy = logits.argmax(-1).tolist()
    members = [(Chooser(), [3]), (sampler(0, 5, device), [0, 7]), (sampler(1, 6, device), [2])]
    members += [(sampler(0, 7, device), [9]), (Chooser(), [1, 4]), (sampler(2, 8, device), [5, 6, 11])]
    members += [(sampler(1, None, device), [8, 10])]
    for _ in range(3):
        expected = []
        for chooser, rows in members:
            if chooser.settings is None:
                expected.append([greedy[row] for row in rows])
                continue
            state = None if chooser.generator is None else chooser.generator.get_state()
            torch.manual_seed(1)
            probabilities = chooser.processors(None, logits[rows].float()).softmax(-1)
            expected.append(torch.multinomial(probabilities, 1, generator=chooser.generator)[:, 0].tolist())
            if state is not None:
                chooser.generator.set_state(state)
        torch.manual_seed(1)
        assert choose(logits, greedy, members) == expected


def test_probabilities_that_are_not_finite_are_of_their_member_alone(device):
    logits = torch.randn(4, 50, device=device)
    logits[2, 7] = torch.nan
    members = [(sampler(0, 1, device), [0]), (sampler(0, 2, device), [1, 2]), (sampler(0, 3, device), [3])]
    found = choose(logits, [0] * 4, members)
    assert found[1] is None and len(found[0]) == len(found[2]) == 1
