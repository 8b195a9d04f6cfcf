"""What only a model's own forward tells of itself, which is asked with a few tokens."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ... import compat
from ...cache.fastpath_cache import FastpathCache
from ..sources.step_source import StepSource
from .patched import paused

#: tokens of a text that a token follows, and those of them that are padding in one of two rows
_LENGTH, _PADDING = 6, 2
#: tokens of a text that is read at once and in two pieces, and those of the first piece
_TEXT, _CUT = 40, 12


def count_on(part: StepSource, is_padded: bool) -> bool:
    """Return whether a token's default position is the number of tokens, padding among them, that the cache holds.

    Most code counts on from the length of the cache. RoBERTa's skips the padding token's number, OPT's counts the ones
    of the mask, Bamba's begins at zero in every forward.

    Args:
        part: a model without a reason against a decode plan.
        is_padded: the mask shows padding in front of the text.
    """
    if not part.takes_positions:
        return True
    device = part.embedding.weight.device
    ids = (5 + 7 * torch.arange(2 * (_LENGTH + 1), device=device)).view(2, -1) % part.num_embeddings
    mask = torch.ones_like(ids)
    if is_padded:
        mask[1, :_PADDING] = 0
    cache = FastpathCache(part.source.config)
    del cache.layers[len(part.kinds) :]
    try:
        with paused(part.source):  # no reason of these forwards is counted
            _logits(part, ids[:, :_LENGTH], mask[:, :_LENGTH], cache)
            other = copy.deepcopy(cache)
            found = _logits(part, ids[:, _LENGTH:], mask, cache)
            expected = _logits(part, ids[:, _LENGTH:], mask, other, position_ids=torch.full_like(ids[:, :1], _LENGTH))
    except Exception:  # nobody has tried this code: anything may be raised
        return False
    error, size = (found - expected).abs().max(), expected.abs().max()
    return bool(error <= torch.finfo(found.dtype).eps * size)


def goes_on_from_states(part: StepSource) -> bool:
    """Return whether a model's own forward reads several tokens behind states as it reads them behind their text.

    Some code begins with empty states whenever there is more than one token. A single token is always read behind
    states, so that its error is what rounding makes.

    Args:
        part: a model without a reason against a decode plan.
    """
    device = part.embedding.weight.device
    ids = (5 + 7 * torch.arange(_TEXT, device=device))[None] % part.num_embeddings
    places = torch.arange(_TEXT, device=device)[None]
    try:
        with paused(part.source):
            expected = _read_in_pieces(part, ids, places, _TEXT)
            errors = [(_read_in_pieces(part, ids, places, cut) - expected).abs().max() for cut in (_TEXT - 1, _CUT)]
    except Exception:  # as in count_on()
        return False
    most = 64 * torch.finfo(expected.dtype).eps * expected.abs().max()
    return bool(errors[1] <= torch.maximum(4 * errors[0], most))


def _read_in_pieces(part: StepSource, ids: torch.Tensor, places: torch.Tensor, cut: int) -> torch.Tensor:
    """Return the logits behind a text that is read up to a token, and then the rest of it."""
    cache = FastpathCache(part.source.config)
    del cache.layers[len(part.kinds) :]
    for piece in (slice(0, cut), slice(cut, None)):
        if ids[:, piece].numel():
            given = {"position_ids": places[:, piece]} if part.takes_positions else {}
            mask = torch.ones_like(ids[:, : piece.stop])
            found = _logits(part, ids[:, piece], mask, cache, **given)[:, -1]
    return found


def _logits(part: StepSource, ids: torch.Tensor, mask: torch.Tensor, cache: FastpathCache, **given: Any) -> Any:
    """Run the forward of the model's class."""
    model: Any = part.source
    given |= {"attention_mask": mask, compat.cache_name(model): cache}
    return type(model).forward(model, input_ids=ids, use_cache=True, **given).logits
