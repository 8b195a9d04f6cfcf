"""transformers' KV caches: their names, layers and windows."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.generation import GenerationMixin

__all__ = ["Cache", "CacheLayerMixin", "DynamicCache", "DynamicSlidingWindowLayer", "LinearAttentionLayer"]


_OLD_CACHE = "past_key_values"
#: name of the KV cache among the arguments of ``generate()`` and of forwards, and in their outputs; from 5.24 on the
#: name is ``"cache"``, and the old name is still taken with a warning. Remove the choice when 5.23 is not supported.
CACHE = (
    "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else _OLD_CACHE
)


#: what Mamba's classes call it before 5.24; remove it when 5.23 is not supported
_STATES_CACHE = "cache_params"
#: names under which any model's forward takes a cache
CACHES = frozenset({CACHE, _OLD_CACHE})


def cache_name(model: Any) -> str:
    """Return the name that a model's forward and ``generate()`` take the cache by, and that their outputs have."""
    names = inspect.signature(type(model).forward).parameters
    return _STATES_CACHE if _STATES_CACHE in names and CACHE not in names else CACHE


def cache_of(arguments: Mapping[str, Any], own_name: str | None) -> Any:
    """Return the KV cache among a forward's arguments.

    Args:
        own_name: the name that only this module gives it, or None for the usual name.
    """
    if own_name is not None:
        return arguments.get(own_name)
    return arguments.get(CACHE, arguments.get(_OLD_CACHE))


def is_continuous_batch(arguments: Mapping[str, Any]) -> bool:
    """Whether these are arguments of a forward in ``generate_batch()``: several prompts and tokens in one row."""
    kinds = type(arguments.get("cache")).__mro__
    return any(kind.__name__ == "PagedAttentionCache" for kind in kinds)  # its module is only imported for such batches


def record_past_of(layer: Any) -> bool:
    """Whether a transformers cache layer records its past (full layers have no such state)."""
    return getattr(layer, "record_past", False)


#: with a smaller window transformers' cache keeps everything, and prompts and single tokens see different positions
MIN_WINDOW = 2


@dataclass(frozen=True)
class LayerKind:
    """What a layer of a cache holds.

    Attributes:
        keys: whether it holds keys and values.
        window: the sliding window of these, None for all positions.
        states: how many pairs of a convolution's window and a recurrent state it holds, of which either may be missing.
    """

    keys: bool = True
    window: int | None = None
    states: int = 0


#: transformers' own layers: name of the class, and whether it holds keys and values, has a window, holds states
_LAYERS = (
    ("DynamicLayer", True, False, False),
    ("DynamicSlidingWindowLayer", True, True, False),
    ("DummyLayer", False, False, False),
    ("LinearAttentionLayer", False, False, True),
    ("LinearAttentionAndFullAttentionLayer", True, False, True),
    ("LinearAttentionAndSlidingWindowAttentionLayer", True, True, True),
)


def layer_kind(layer: Any) -> LayerKind | None:
    """Return what a layer of transformers' own caches holds, or None if this project has no layer of that kind."""
    found = next((each for each in _LAYERS if getattr(cache_utils, each[0], None) is type(layer)), None)
    if found is None:
        return None
    _, keys, windowed, has_states = found
    return LayerKind(keys, layer.sliding_window if windowed else None, layer.number_of_states if has_states else 0)


def made_layer(kind: LayerKind) -> Any:
    """Make an empty layer of transformers' own that holds what ``kind`` says."""
    wanted = kind.keys, kind.window is not None, kind.states > 0
    name = next(name for name, *holds in _LAYERS if tuple(holds) == wanted)
    arguments: dict[str, Any] = {} if kind.window is None else {"sliding_window": kind.window}
    if kind.states:
        arguments["number_of_states"] = kind.states
    return getattr(cache_utils, name)(**arguments)


def layer_kinds(config: Any) -> list[LayerKind] | None:
    """Return what the cache of a model holds of each decoder layer, or None if a layer is of another kind."""
    kinds = [layer_kind(layer) for layer in DynamicCache(config=config).layers]
    if None in kinds:
        return None
    return kinds or [LayerKind()] * config.get_text_config(decoder=True).num_hidden_layers


def layer_windows(config: Any) -> list[int | None] | None:
    """Return the sliding window of each decoder layer (None: full attention), or None if a layer is of another kind."""
    kinds = layer_kinds(config)
    if kinds is None or any(kind != LayerKind(window=kind.window) for kind in kinds):
        return None
    return [kind.window for kind in kinds]


def _update_waits() -> bool:
    try:
        return "prefetch_stream.wait_stream" in inspect.getsource(Cache.update)
    except OSError:  # there is no source; to wait once too often does no harm
        return False


_PREFETCH_WAITS = _update_waits()


def prefetch_waits() -> bool:
    """Whether an offloading cache's copies back to the GPU wait for those to the host; in 5.17 they do not.

    Remove this, and :func:`order_offloading`, when 5.17 is not supported.
    """
    return _PREFETCH_WAITS


def is_offloading(cache: Any) -> bool:
    """Whether a cache keeps layers in host memory, and brings each back to the GPU before it is read."""
    return bool(getattr(cache, "offloading", False))


def order_offloading(cache: Any, device: torch.device) -> None:
    """Make copies that an offloading ``cache`` will start to the GPU wait for all that was started there so far.

    Without that, and without :func:`prefetch_waits`, a fast model would read layers that have not reached the host yet.
    Other caches are left alone.
    """
    if is_offloading(cache):
        cache.prefetch_stream.wait_stream(torch.cuda.default_stream(device))


def prepare_cache_stock(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the ``_prepare_cache_for_generation`` of the model's class."""
    return type(model)._prepare_cache_for_generation(model, *args, **kwargs)


def named_arguments(function: Any, model: Any, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a method by their names, which a release may have put into another order.

    Args:
        function: the method as it is in its class.
        model: what it was called on.
        args, kwargs: what it was given.

    Raises:
        TypeError: there are more arguments than the method takes.
    """
    names = _positional_names(function)
    if len(args) >= len(names):
        inspect.signature(function).bind_partial(model, *args)  # raises
    return dict(zip(names[1:], args)) | kwargs


@functools.lru_cache(maxsize=64)
def _positional_names(function: Any) -> tuple[str, ...]:
    """Return the names of what a function takes by place, ``self`` included."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)


def makes_dynamic_caches(model: Any) -> bool:
    """Whether a model's class has ``generate()`` make its cache as transformers' classes do, a ``DynamicCache``."""
    is_stocks = type(model)._prepare_cache_for_generation is GenerationMixin._prepare_cache_for_generation
    return is_stocks and model._supports_default_dynamic_cache()


PREPARE_CACHE = "_prepare_cache_for_generation"
