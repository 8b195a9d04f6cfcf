"""Attention of several streams (ProphetNet): the text's own, and streams that predict what follows, each of which sees
the text and itself. One call of attention serves all: streams are heads that share keys, and what a stream is to itself
takes part in its softmax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ... import compat
from ..recorded_step import Unrecordable
from ..recorder import Recorder


@contextmanager
def attention_of_streams(recorder: Recorder) -> Iterator[None]:
    """Let attention of several streams run through the recorder, for the length of a ``with`` block."""
    bound = []
    try:
        for over_text, over_encoded in compat.attentions_of_streams(recorder.skeleton.copy):
            for module, attend in ((over_text, _over_text), (over_encoded, _over_encoded)):
                vars(module)["forward"] = functools.partial(attend, recorder, module, module.forward)
                bound.append(module)
        yield
    finally:
        for module in bound:
            vars(module).pop("forward", None)


def _over_text(
    recorder: Recorder, module: Any, forward: Callable[..., Any], hidden_states: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, None, None]:
    """Attend to the text: every stream to its keys and values, and all but the first stream to their own as well."""
    if recorder.is_rehearsing:
        return forward(hidden_states, **given)
    _refuse_masks(given)
    recorder.is_unpadded = True  # behind a prompt the model masks nothing
    heads, dim = module.num_attn_heads, module.head_dim
    projections = module.query_proj, module.key_proj, module.value_proj
    q, k, v = (each(hidden_states).unflatten(-1, (heads, dim)) for each in projections)  # [batch, streams, heads, dim]
    q = q / dim**0.5
    new = (each[:, :1].transpose(1, 2) for each in (k, v))
    keys, values = compat.text_cache(given[compat.CACHE]).update(*new, module.layer_idx)
    buckets = module.relative_pos_embeddings(hidden_states).unflatten(-1, (module.num_buckets, heads))
    with recorder.quiet(), compat.without_modes():
        distances = torch.arange(module.relative_max_distance + 2, device=recorder.skeleton.device)
        of_distances = compat.buckets_of(module, distances).long()
    biases = [buckets[:, :1].index_select(2, of_distances[:-1]), buckets[:, 1:].index_select(2, of_distances[1:])]
    own = (q * k).sum(-1) + buckets[:, :, 0]  # a key that is no distance away is of the first bucket
    own = torch.cat((torch.full_like(own[:, :1], -torch.inf), own[:, 1:]), 1)
    others = torch.cat((torch.zeros_like(v[:, :1]), v[:, 1:]), 1)
    out, _ = recorder.attend(
        module,
        _as_heads(q),
        keys,
        values,
        None,
        scaling=1.0,
        row_biases=torch.cat(biases, 1).permute(0, 3, 1, 2).flatten(1, 2).float(),
        other=others.transpose(1, 2).flatten(1).unsqueeze(1),
        other_lse=own.transpose(1, 2).flatten(1).unsqueeze(1).float(),
    )
    return module.out_proj(_as_streams(out, heads)), None, None


def _over_encoded(
    recorder: Recorder, module: Any, forward: Callable[..., Any], hidden_states: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, None]:
    """Attend to what an encoder has read."""
    if recorder.is_rehearsing:
        return forward(hidden_states, **given)
    _refuse_masks(given)
    heads, dim = module.num_attn_heads, module.head_dim
    q = module.query_proj(hidden_states).unflatten(-1, (heads, dim)) / dim**0.5
    states = compat.encoded_states(given[compat.CACHE])[module.layer_idx]
    if states is None:
        raise Unrecordable("attention to what no encoder has read")
    k, v = states
    out, _ = recorder.attend(module, _as_heads(q), k, v, None, scaling=1.0)
    return module.out_proj(_as_streams(out, heads)), None


def _refuse_masks(given: dict[str, Any]) -> None:
    if any(value is not None for name, value in given.items() if name.endswith("mask")):
        raise Unrecordable("masks of several streams")


def _as_heads(rows: torch.Tensor) -> torch.Tensor:
    """Return [batch, streams, heads, dim] as queries [batch, heads * streams, 1, dim] whose neighbors share keys."""
    return rows.transpose(1, 2).flatten(1, 2).unsqueeze(2)


def _as_streams(out: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [batch, 1, heads * streams, dim] as features [batch, streams, heads * dim]."""
    return out[:, 0].unflatten(1, (heads, -1)).transpose(1, 2).flatten(2)
