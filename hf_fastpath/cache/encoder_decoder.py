"""The cache of an encoder-decoder whose text is in a FastpathCache."""

from __future__ import annotations

from typing import Any

import torch

from ..compat import CACHE, EncoderDecoderCache, text_cache


class FastpathEncoderDecoderCache(EncoderDecoderCache):
    """transformers' ``EncoderDecoderCache`` of a FastpathCache, which holds the text, and a ``DynamicCache``, which
    holds keys and values of what the encoder has read.

    Attributes:
        is_alike_in_beams: while this is True, :meth:`reorder_cache` leaves keys and values of what the encoder has read
            as they are, because all beams of a sentence hold the same.

    Source: transformers ``cache_utils.py@5.24``, ``EncoderDecoderCache``.
    """

    is_alike_in_beams = False

    def check_dynamic_cache(self, method: str) -> None:
        """Raise nothing: a FastpathCache can do what a ``DynamicCache`` can."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.is_alike_in_beams:
            self.self_attention_cache.reorder_cache(beam_idx)
        else:
            super().reorder_cache(beam_idx)


def for_stock(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of ``generate()`` for stock code, which gets the cache that it has made itself.

    A cache that the user has given, or whose storage the user has chosen, stays.
    """
    cache = model_kwargs.get(CACHE)
    text = text_cache(cache)
    stocks = getattr(text, "stands_for", None)
    if stocks is None or text.kv_dtype is not None or text.page_size is not None:
        return model_kwargs
    if text is not cache:
        stocks = EncoderDecoderCache(stocks, cache.cross_attention_cache)
    return model_kwargs | {CACHE: stocks}
