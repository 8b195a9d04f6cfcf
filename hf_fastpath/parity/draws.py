"""Whether the installed transformers draws tokens as our plans do: its warpers and its draw, beside the formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..compat import generate_over, sequences_of
from ..decode.loops.patched import paused
from .comparison import SEED, drawn, plain_generation

#: settings that are tried, each with what ``generate()`` would take by default switched off
_OFF = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=None)
_SETTINGS: tuple[dict[str, Any], ...] = (
    dict(temperature=0.6),
    dict(top_k=9),
    dict(top_p=0.7),
    dict(min_p=0.4),
    dict(temperature=1.4, top_k=40, top_p=0.9, min_p=0.1),
)
#: cases in which other tokens may come of rounding, which moves the bounds between two tokens
_MOST_OTHER = 1
_NEW_TOKENS = 8
#: relative distance at which float32 may put a token on either side of a limit
_NEAR = 1e-4


def warped(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float | None) -> torch.Tensor:
    """Return what tokens are drawn from, [..., vocab_size] float64: softmax over these of 1, and 0 for the others.

    Each setting is applied to what the one before has left.
    """
    scores = logits.double() / temperature
    if top_k:
        least = scores.topk(min(top_k, scores.shape[-1])).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if top_p < 1:
        ascending, order = scores.sort()
        is_out = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        is_out[..., -1] = False
        scores = scores.masked_fill(is_out.scatter(-1, order, is_out), -torch.inf)
    if min_p:
        chances = scores.softmax(-1)
        scores = scores.masked_fill(chances < min_p * chances.amax(-1, keepdim=True), -torch.inf)
    return scores.softmax(-1)


@torch.no_grad()
def different_draws(model: nn.Module, ids: torch.Tensor, encoded: torch.Tensor | None = None) -> str | None:
    """Return how stock code draws other tokens than a patched model, or None.

    Args:
        model: the patched model.
        ids: [1, seq_len], the beginning of the text.
        encoded: of an encoder-decoder, [1, length, features] of the encoder's output.
    """

    def generate(**options: Any) -> Any:
        torch.manual_seed(SEED)
        options |= dict(do_sample=True, max_new_tokens=_NEW_TOKENS)
        return model.generate(ids, **options) if encoded is None else generate_over(model, encoded, ids, **options)

    others = []
    with plain_generation(model, ids):
        for settings in _SETTINGS:
            options, name = _OFF | settings, ", ".join(f"{name}={value}" for name, value in settings.items())
            with paused(model):
                stock = generate(**options, return_dict_in_generate=True, output_scores=True, output_logits=True)
            logits, scores = (torch.stack(each, 1).float() for each in (stock.logits, stock.scores))
            expected, chances = warped(logits, **options), scores.double().softmax(-1)
            # of a token at a limit, both ways are right; its chance is what the others then differ by
            off = (chances - expected).abs().amax(-1)
            if bool((off > _NEAR).sum() > _MOST_OTHER):
                return f"with {name}, stock draws from other chances: they are {float(off.max()):.1e} away"
            tokens = sequences_of(stock)[:, -_NEW_TOKENS:]
            if not torch.equal(drawn(scores), tokens):
                return f"with {name}, stock does not draw by softmax and multinomial"
            if not torch.equal(sequences_of(generate(**options))[:, -_NEW_TOKENS:], tokens):
                others.append(name)
    return f"with {'; with '.join(others)}, stock draws other tokens" if len(others) > _MOST_OTHER else None
