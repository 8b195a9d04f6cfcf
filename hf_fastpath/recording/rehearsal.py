"""What a first forward leaves in a cache: the states of each layer, seen over tensors without data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import compat
from . import modes
from .recorder import Recorder
from .spread import spread_modules

#: tokens of the forward
_TOKENS = 3
#: types of attributes that tell layers that are alike from others
_SETTINGS = (bool, int, float, str, tuple, list, torch.dtype)


def rehearse(recorder: Recorder, batch: int, cache: Any, arguments: dict[str, Any]) -> None:
    """Run the copy of a model for a few tokens of ``batch`` sequences into an empty cache."""
    shape = batch, _TOKENS, *recorder.skeleton.token_shape
    tokens = torch.zeros(shape, dtype=torch.long, device=recorder.skeleton.device)
    with recorder.rehearsing(), spread_modules(recorder), modes.Functions(recorder):
        recorder.skeleton.run(tokens, None, cache, arguments)


def cache_with_states(recorder: Recorder, batch: int) -> compat.RecordingCache:
    """Return a cache with the states that a first forward leaves.

    Of layers that are alike one runs, since a layer's first forward takes as long as its step; all run if the model
    does not let this be, because a layer takes what another one has left outside of the cache.
    """
    cache = recorder.new_cache()
    try:
        with layers_alike(recorder.skeleton.copy, cache):
            rehearse(recorder, batch, cache, {})
    except Exception:  # nobody has tried this code: anything may be raised
        cache, recorder.refused = recorder.new_cache(), None
        rehearse(recorder, batch, cache, {})
    return cache


@contextmanager
def layers_alike(model: nn.Module, cache: compat.RecordingCache) -> Iterator[None]:
    """Let one of layers that are alike run, for the length of a ``with`` block: the others give what that one gave, and
    their layers of the cache get states like its."""
    stacks = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == len(cache.kinds)]
    layers = [(index, layer) for stack in stacks for index, layer in enumerate(stack)]
    before = [(layer, vars(layer).get("forward")) for _, layer in layers]
    ran: dict[Any, tuple[int, Any]] = {}
    try:
        for index, layer in layers:
            if (made_of := _made_of(layer, index)) is not None:
                key = cache.kinds[index], made_of
                vars(layer)["forward"] = functools.partial(_forward, ran, key, cache, index, layer.forward)
        yield
    finally:
        for layer, forward in before:
            vars(layer).pop("forward", None)
            if forward is not None:
                vars(layer)["forward"] = forward


def _forward(ran: dict, key: Any, cache: Any, index: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any):
    key = key, *(str(each.shape) for each in args if isinstance(each, torch.Tensor))  # sizes may be symbols
    if key not in ran:
        ran[key] = index, forward(*args, **kwargs)
    first, out = ran[key]
    if first != index:
        cache.copy_states(first, index)
    return out


def _made_of(layer: nn.Module, index: int) -> tuple | None:
    """Return what is the same in layers that are alike: classes, settings and tensors, but for the layer's number; None
    if it does not say that its states are those of the cache's layer ``index``."""
    found, indices = [], set()
    for path, module in layer.named_modules():
        settings = {name: value for name, value in vars(module).items() if type(value) in _SETTINGS}
        if compat.LAYER_INDEX in settings:
            indices.add(settings.pop(compat.LAYER_INDEX))
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        facts = ((name, each.shape, each.dtype) for name, each in tensors)
        found.append((path, type(module), str(settings), *facts))
    return tuple(found) if indices == {index} else None
