"""Which drafts a text takes and what follows them, if there are logits processors or tokens are sampled."""

from __future__ import annotations

from typing import Any

import torch


def processed(logits: torch.Tensor, text: torch.Tensor, count: int, processors: Any) -> torch.Tensor:
    """Apply logits processors to each row of logits, given the tokens in front of that row.

    Args:
        logits: float32 [count + 1, vocab_size], for the token behind the text and the token behind each draft.
        text: int64 [1, length + count], drafts included.
        count: number of drafts.
        processors: callables that take ids [1, length] and scores [1, vocab_size].

    Returns:
        [count + 1, vocab_size].
    """
    if not len(processors):
        return logits
    length = text.shape[1] - count
    # each row is cloned because processors may write to what they are given
    return torch.cat([processors(text[:, : length + i], logits[i : i + 1].clone()) for i in range(count + 1)])


def accept(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    draft_scores: torch.Tensor | None,
    do_sample: bool,
    dropped: int = 0,
    ends: bool = False,
) -> torch.Tensor:
    """Return the drafts up to the first that is rejected, and one token more.

    Random numbers are drawn from the default generator, as many and in the same order as transformers draws them: equal
    scores and seeds give equal tokens.

    Args:
        scores: [count + 1, vocab_size], the model's.
        drafts: int64 [count].
        draft_scores: [count, vocab_size], of the distributions that the drafts were sampled from; if None, a draft is
            accepted if it equals the model's own choice.
        do_sample: the model's choice is a sample; else it is the most likely token.
        dropped: number of further drafts that the text has no room for: random numbers are drawn for them as well.
        ends: nothing follows the drafts if all are accepted.

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
    if agree < count:  # sample from what the model finds more likely than the assistant did
        rest = (rest - q[agree]).clamp(min=0)
        rest = rest / rest.sum()
    return torch.cat((drafts[:agree], torch.multinomial(rest, 1)))


def _agreeing(taken: torch.Tensor) -> int:
    """Return how many entries are True before the first that is False."""
    return int(taken.long().cumprod(0).sum())
