"""Log-probabilities of given tokens."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ..decode.loops.shared_calls import logprobs_of

#: bytes that the logits of the texts that are read at once take at most, if a single text does not take more
_MOST_BYTES = 1 << 30


def logprobs(
    model: nn.Module, ids: torch.Tensor, attention_mask: torch.Tensor | None = None, last: int | None = None
) -> torch.Tensor:
    """Score given tokens: return how likely each is behind those before it, by the model's own logits.

    The model's forward reads as many texts at once as their logits have room for in 1 GiB. No gradient is computed.

    Args:
        model: a causal language model, patched or not.
        ids: int64 [batch, seq_len]; seq_len is at least 2.
        attention_mask: [batch, seq_len], 0 where there is padding, on the left or on the right; None for none.
        last: score the last so many tokens alone, at least 1; None for all but the first.

    Returns:
        float32 [batch, last] or [batch, seq_len - 1]; 0 where a token or the one before it is padding.

    Raises:
        ValueError: an argument has another shape or value.
        RuntimeError: what the model's forward raises.
    """
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"ids is {list(ids.shape)}, expected [batch, seq_len] with at least 2 tokens")
    if attention_mask is not None and attention_mask.shape != ids.shape:
        raise ValueError(f"attention_mask is {list(attention_mask.shape)}, expected that of ids, {list(ids.shape)}")
    count = ids.shape[1] - 1 if last is None else last
    if not 1 <= count < ids.shape[1]:
        raise ValueError(f"last is {last}, expected 1 to {ids.shape[1] - 1}, one less than the tokens of a text")
    accepted = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
    if "logits_to_keep" in accepted:
        options["logits_to_keep"] = count + 1
    found: list[torch.Tensor] = []
    while (first := sum(map(len, found))) < len(ids):
        rows = slice(first, first + _rows_at_once(model, count))
        given = options | {"input_ids": ids[rows]}
        if attention_mask is not None:
            given["attention_mask"] = attention_mask[rows]
            if "position_ids" in accepted:  # as generate() counts them
                given["position_ids"] = (attention_mask[rows].long().cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(**given).logits[:, -count - 1 : -1]
            found.append(torch.stack([logprobs_of(each, its) for each, its in zip(logits, ids[rows, -count:])]))
    scores = torch.cat(found) if found else torch.zeros(0, count, device=ids.device)
    if attention_mask is None:
        return scores
    is_text = attention_mask[:, -count - 1 :].bool()
    return scores.masked_fill(~(is_text[:, 1:] & is_text[:, :-1]), 0.0)


def _rows_at_once(model: Any, count: int) -> int:
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None:
        return 1
    return max(1, _MOST_BYTES // max(1, (count + 1) * weight.shape[0] * 4))
