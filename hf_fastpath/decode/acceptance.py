"""Which of the drafted tokens a text takes, and what follows them, behind logits processors and in samples."""

from __future__ import annotations

from typing import Any

import torch


def processed(logits: torch.Tensor, text: torch.Tensor, count: int, processors: Any) -> torch.Tensor:
    """Logits behind processors, each row behind the tokens in front of it.

    Args:
        logits: float32 [count + 1, vocab_size], of the tokens behind the text and behind each draft.
        text: int64 [1, length + count], drafts included.
        count: of drafts.
        processors: callables of ids [1, length] and scores [1, vocab_size].

    Returns:
        [count + 1, vocab_size].
    """
    if not len(processors):
        return logits
    length = text.shape[1] - count
    # a copy: processors may write what they are given
    return torch.cat([processors(text[:, : length + i], logits[i : i + 1].clone()) for i in range(count + 1)])


def accept(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    draft_scores: torch.Tensor | None,
    do_sample: bool,
    dropped: int = 0,
    ends: bool = False,
) -> torch.Tensor:
    """Drafts up to the first that is not taken, and one token more.

    Random numbers are drawn from the default generator, as many and in the same order as transformers draws them: equal
    scores and seeds give equal tokens.

    Args:
        scores: [count + 1, vocab_size], of the model.
        drafts: int64 [count].
        draft_scores: [count, vocab_size], of the distributions that the drafts were sampled from; None where a draft is
            taken if it is what the model chooses itself.
        do_sample: the choice is a sample; else it is the most likely token.
        dropped: drafts behind these that the text has no room for: random numbers are drawn for them as well.
        ends: nothing follows the drafts if all are taken.

    Returns:
        int64 [1 to count + 1], or [0 to count] if ``ends``.

    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1.
    """
    count = len(drafts)
    if not do_sample or draft_scores is None or not count:
        if do_sample:
            drawn = torch.cat((scores, scores[-1:].expand(dropped, -1)))
            chosen = torch.multinomial(drawn.softmax(-1), 1)[: count + 1, 0]
        else:
            chosen = scores.argmax(-1)
        return chosen[: min(_agreeing(chosen[:-1] == drafts) + 1, count if ends else count + 1)]
    p, q = scores.softmax(-1), draft_scores.softmax(-1)
    places = torch.arange(count, device=drafts.device)
    ratios = p[places, drafts] / q[places, drafts]
    agree = _agreeing(torch.rand_like(ratios) <= ratios)
    if ends and agree == count:
        return drafts
    rest = p[agree]
    if agree < count:  # what the model likes better than the assistant did
        rest = (rest - q[agree]).clamp(min=0)
        rest = rest / rest.sum()
    return torch.cat((drafts[:agree], torch.multinomial(rest, 1)))


def _agreeing(taken: torch.Tensor) -> int:
    """How many come before the first that is not."""
    return int(taken.long().cumprod(0).sum())
