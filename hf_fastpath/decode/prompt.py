"""A whole prompt, op by op: what a decode plan does for one token, for many.

The layers are the calls of :mod:`.steps`; those ops that are made for a few rows are replaced by what is fast for many
(:mod:`.many_rows`): matrix products of PyTorch's libraries and its fused attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import compat
from ..cache import FastpathCache
from ..ops.gemv import MAX_ROWS
from . import steps
from .attend import Attention, has_tensor_cores
from .many_rows import ManyRows
from .parts import MoEPart
from .structure import ModelPart, full_angles


@dataclass
class Prompt:
    """New tokens that follow what a cache holds.

    Attributes:
        tokens: int64 [batch, query_len].
        positions: int64 [batch or 1, query_len], their position ids.
        starts: int64 [batch], left padding of each row, or None for none.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor | None

    def chunks(self, size: int | None) -> Iterator[Prompt]:
        """Its tokens in chunks of ``size``, or all at once."""
        size = size or max(1, self.tokens.shape[1])
        for tokens, positions in zip(self.tokens.split(size, dim=1), self.positions.split(size, dim=1)):
            yield Prompt(tokens, positions, self.starts)


def repeats(tokens: torch.Tensor, count: int | None, cache: FastpathCache) -> int:
    """How many neighboring rows of ``tokens``, [batch, seq_len], are one prompt, to be read once: ``count``, where an
    empty ``cache`` in pages lets them share it, else 1."""
    if not count or count == 1 or len(tokens) % count or cache.page_size is None or cache.get_seq_length():
        return 1
    groups = tokens.unflatten(0, (-1, count))
    return count if bool((groups == groups[:, :1]).all()) else 1


def is_readable(part: ModelPart, cache: FastpathCache, prompt: Prompt) -> bool:
    """Whether :func:`read` can take it; else stock code has to.

    It cannot where attention is more than softmax and no kernel has that, a window ends inside of the prompt, or MLPs
    are mixtures.
    """
    batch, query_len = prompt.tokens.shape
    if prompt.positions.shape[-1] != query_len or query_len == 0:
        return False
    if cache.get_seq_length() and any(layer.batch_size != batch for layer in cache.layers):
        return False
    length = cache.get_seq_length() + query_len
    for layer in part.layers:
        attention = layer.attention
        if isinstance(layer.mlp, MoEPart):
            return False
        if attention.softcap or attention.sinks is not None:
            if not has_tensor_cores(prompt.tokens.device, part.embedding.weight.dtype, attention.head_dim):
                return False
        if attention.window is not None and length > attention.window:
            return False
    return True


def read(part: ModelPart, cache: FastpathCache, prompt: Prompt) -> torch.Tensor:
    """Run the model over the prompt and append it to ``cache``.

    Args:
        part: the model, without a reason against a decode plan.
        cache: of the same batch, or empty.
        prompt: one that :func:`is_readable`.

    Returns:
        [batch, vocab_size] logits of the token that follows.
    """
    batch, query_len = prompt.tokens.shape
    past, dtype, device = cache.get_seq_length(), part.embedding.weight.dtype, prompt.tokens.device
    for index, layer in enumerate(part.layers):
        heads, head_dim = layer.attention.cache_shape
        like = torch.empty((batch, heads, 0, head_dim), dtype=dtype, device=device)
        cache.prepare(index, like)
    cache.reserve(query_len)
    lengths = cache.seq_lens(0, query_len)
    starts = None if prompt.starts is None else prompt.starts.to(torch.int32)
    rows = batch * query_len
    emit: steps.Emit
    if device.type == "cpu" and rows <= MAX_ROWS:
        emit = steps.run  # a few tokens of a conversation are one pass over the weights, as a token is
    else:
        emit = ManyRows(Attention(query_len, past + query_len, lengths, starts), rows)
    hidden, _ = steps.step_inputs(emit, part, prompt.tokens, prompt.positions.expand(batch, -1), [])
    at = steps.Positions(_angles(part, hidden, prompt.positions), lengths, starts)
    for index, layer in enumerate(part.layers):
        hidden = steps.decoder_layer(emit, layer, hidden, cache.layers[index].buffers, at, index)
    logits = steps.head(steps.run if batch <= MAX_ROWS else emit, part, hidden[:, -1:])
    cache.advance(query_len)
    return steps.scaled_logits(steps.run, part, logits)[:, 0]


def _angles(part: ModelPart, like: torch.Tensor, positions: torch.Tensor) -> dict:
    """cos and sin of every kind of layer at ``positions``, by the model's own module."""
    made = {}
    for kind in part.rope_kinds:
        tables = part.rotary.forward(like, positions, *(() if kind is None else (kind,)))
        made[kind] = tuple(full_angles(part.architecture, table.to(like.dtype)) for table in tables)
    return made


def read_text(
    model: Any, part: ModelPart, ids: torch.Tensor, config: Any, model_kwargs: dict, starts: torch.Tensor | None
) -> torch.Tensor:
    """Run the prompt of ``generate()``, by :func:`read` or else by the model, and append it to the cache.

    Args:
        model, part: the model.
        ids, config, model_kwargs: of ``generate()``.
        starts: [batch], left padding of each row, or None.

    Returns:
        [batch, vocab_size] logits of the first token.
    """
    cache = model_kwargs["past_key_values"]
    alike = repeats(ids, config.num_return_sequences, cache)
    if alike == 1:
        return _read_rows(model, part, ids, config, model_kwargs, starts)
    rows = {name: model_kwargs.get(name) for name in ("attention_mask", "position_ids")}
    rows = {name: t[::alike] for name, t in rows.items() if t is not None and len(t) == len(ids)}
    starts = None if starts is None else starts[::alike]
    logits = _read_rows(model, part, ids[::alike], config, model_kwargs | rows, starts)
    cache.batch_repeat_interleave(alike)
    return logits.repeat_interleave(alike, dim=0)


def _read_rows(
    model: Any, part: ModelPart, ids: torch.Tensor, config: Any, model_kwargs: dict, starts: torch.Tensor | None
) -> torch.Tensor:
    """:func:`read_text`, every row of ``ids``."""
    cache = model_kwargs["past_key_values"]
    tokens = compat.new_tokens(ids, config, model_kwargs)
    positions = model_kwargs["position_ids"][:, -tokens.shape[1] :]
    given = Prompt(tokens, positions, starts if starts is not None and starts.any() else None)
    if is_readable(part, cache, given):
        with compat.below_autograd():
            for chunk in given.chunks(config.prefill_chunk_size):
                logits = read(part, cache, chunk)
        return logits
    return compat.prefill(model, ids, config, model_kwargs).logits[:, -1]
