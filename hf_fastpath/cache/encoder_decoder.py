"""The cache of an encoder-decoder whose text is in a FastpathCache."""

from __future__ import annotations

from ..compat import EncoderDecoderCache


class FastpathEncoderDecoderCache(EncoderDecoderCache):
    """transformers' ``EncoderDecoderCache`` of a FastpathCache, which holds the text, and a ``DynamicCache``, which
    holds keys and values of what the encoder has read.

    Source: transformers ``cache_utils.py@5.24``, ``EncoderDecoderCache``.
    """

    def check_dynamic_cache(self, method: str) -> None:
        """Raise nothing: a FastpathCache can do what a ``DynamicCache`` can."""
