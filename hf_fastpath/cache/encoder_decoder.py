"""The cache of an encoder-decoder whose text is in a FastpathCache."""

from __future__ import annotations

from typing import Any

import torch

from ..compat import CACHE, EncoderDecoderCache


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
    """Return keyword arguments of ``generate()`` for stock code, which is faster over transformers' own cache: an empty
    cache that holds the text as the model computes it is replaced."""
    cache = model_kwargs.get(CACHE)
    if type(cache) is not FastpathEncoderDecoderCache or cache.get_seq_length():
        return model_kwargs
    text = cache.self_attention_cache
    if text.kv_dtype is not None or text.page_size is not None:
        return model_kwargs
    return model_kwargs | {CACHE: EncoderDecoderCache(text.to_dynamic(), cache.cross_attention_cache)}
