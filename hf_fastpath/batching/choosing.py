"""How the leader chooses tokens: for all members at once, as far as their settings are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..decode.run.graph import random_numbers_in_turn
from ..decode.run.to_host import to_host


@dataclass(frozen=True)
class Chooser:
    """How tokens of a member are chosen.

    Attributes:
        settings: temperature, top_k, top_p and min_p; None for greedy search.
        processors: transformers' warpers of these settings, which are given scores alone.
        generator: draws samples; None for the default one of the device.
        end_tokens: tokens that end a row.
        pad: the token of rows that have ended.
        max_length: tokens of a row at which all end, with the prompt; None for no limit.
    """

    settings: tuple[float, ...] | None = None
    processors: Any = None
    generator: torch.Generator | None = None
    end_tokens: frozenset[int] = frozenset()
    pad: int = 0
    max_length: int | None = None


def choose(
    logits: torch.Tensor, greedy: Sequence[int], wanted: Sequence[tuple[Chooser, Sequence[int]]]
) -> list[list[int] | None]:
    """Choose the next tokens of several members.

    A sample is drawn as ``torch.multinomial`` draws it: probabilities race by exponential noise, of which each
    generator gives as much for its rows as if they were alone.

    Args:
        logits: [rows, vocab_size] of a step.
        greedy: the most likely token of each row.
        wanted: of each member, its chooser and its rows.

    Returns:
        Of each member, a token for each of its rows; None if its probabilities are not finite.
    """
    found: list[list[int] | None] = [[greedy[row] for row in rows] for _, rows in wanted]
    groups: dict[tuple[float, ...], list[int]] = {}
    for number, (chooser, _) in enumerate(wanted):
        if chooser.settings is not None:
            groups.setdefault(chooser.settings, []).append(number)
    for numbers in groups.values():
        numbers.sort(key=lambda number: wanted[number][0].generator is not None)  # those of the default one together
        chosen, finite = _sampled(logits, [wanted[number] for number in numbers])
        first = 0
        for number in numbers:
            end = first + len(wanted[number][1])
            found[number] = chosen[first:end] if all(finite[first:end]) else None
            first = end
    return found


def _sampled(logits: torch.Tensor, members: Sequence[tuple[Chooser, Sequence[int]]]) -> tuple[list[int], list[bool]]:
    """Draw the tokens of members that have the same settings, and first those without a generator of their own; return
    the tokens, and whether the probabilities of their rows are finite."""
    rows = [row for _, own in members for row in own]
    scores = members[0][0].processors(None, logits[rows].float())
    probabilities = torch.nn.functional.softmax(scores, dim=-1)
    noise = torch.empty_like(probabilities)
    by_default = sum(len(own) for chooser, own in members if chooser.generator is None)
    with random_numbers_in_turn(logits.device):
        if by_default:
            noise[:by_default].exponential_()
        first = by_default
        for chooser, own in members:
            if chooser.generator is not None:
                noise[first : first + len(own)].exponential_(generator=chooser.generator)
                first += len(own)
    chosen = (probabilities / noise).argmax(-1)
    tokens, finite = to_host(chosen, probabilities.isfinite().all(-1))
    return tokens.tolist(), finite.tolist()
