"""Modules of a model that is spread over ranks, while a rank's step is recorded: what ranks put together are calls of
the step, in the places where transformers' forwards of these modules have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..compat import ShardStyle
from ..decode.ranks.rank_calls import Shard, gathered, own_embeddings, own_inputs, own_rows, shard_of, summed
from .recorder import Recorder

#: styles of modules whose outputs are summed over ranks
_SUMMED = (
    *(ShardStyle.ROWS, ShardStyle.SPLIT_ROWS, ShardStyle.VOCABULARY),
    *(ShardStyle.EXPERTS, ShardStyle.SOME_EXPERTS, ShardStyle.PICKED_EXPERTS),
)


@contextmanager
def spread_modules(recorder: Recorder) -> Iterator[None]:
    """Let modules of a local model's copy do what ranks do together, for the length of a ``with`` block."""
    bound: list[tuple[nn.Module, Any]] = []
    try:
        for path, module in recorder.skeleton.copy.named_modules():
            shard = shard_of(recorder.skeleton.model.get_submodule(path))
            if shard is not None:
                bound.append((module, vars(module).get("forward")))
                vars(module)["forward"] = _forward(recorder, module, shard)
        yield
    finally:
        for module, before in bound:
            vars(module).pop("forward")
            if before is not None:
                vars(module)["forward"] = before


def _forward(recorder: Recorder, module: Any, shard: Shard) -> Callable[..., Any]:
    inner, style = module.forward, shard.style

    def together(op: Callable[..., Any], features: int | None = None, /, **tensors: Any) -> torch.Tensor:
        """Note a call; its result is as the first tensor, with another number of features if one is given."""
        like = next(iter(tensors.values()))
        with recorder.quiet():
            out = like.new_empty(like.shape if features is None else (*like.shape[:-1], features))
        if not recorder.is_rehearsing:
            recorder.emit(op, tensors | {"shard": shard}, out)
        return out

    def forward(given: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = given
        if style is ShardStyle.VOCABULARY:
            x = together(own_rows, tokens=x, embedding=module.weight)
        elif style is ShardStyle.SPLIT_ROWS:
            x = together(own_inputs, module.weight.shape[1], x=x)
        out = inner(x, *args, **kwargs)
        if style is ShardStyle.VOCABULARY:
            out = together(own_embeddings, x=out, tokens=given, embedding=module.weight)
        if style in _SUMMED:
            return together(summed, x=out, residual=None)
        return together(gathered, shard.total, x=out) if style is ShardStyle.GATHERED else out

    return forward
