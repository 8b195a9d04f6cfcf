"""Tokens of calls that pass by our loops: a loop of the user's or of the hub, a class with a loop of its own, several
requests in one row. Stock code makes them, and here they are counted."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ... import compat
from ..ranks.rank_arguments import arguments_of
from . import adapter_rows
from .generate_calls import for_patched_models
from .patched import Patched


@for_patched_models
def generate(state: Patched, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what ``GenerationMixin.generate`` does, with its arguments, while a patched model is alive."""
    started, before = time.perf_counter(), state.stats.made_here
    given = args, dict(kwargs)
    if callable(loop := kwargs.get("custom_generate")):
        kwargs["custom_generate"] = _counted(loop, state)
    with _on_all_ranks(state, "generate()", original, model, *given), adapter_rows.in_call(model):
        result = original(model, *args, **kwargs)
    if state.stats.made_here == before:  # else a loop has counted, which knows the prompt better
        prompt = args[0] if args else kwargs.get("inputs")
        tokens = compat.num_tokens_behind(model, prompt, kwargs, result)
        state.stats.generated(tokens, started, stock=True)
    return result


@for_patched_models
def generate_batch(state: Patched, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what ``GenerationMixin.generate_batch`` does, with its arguments, while a patched model is alive."""
    started = time.perf_counter()
    with _on_all_ranks(state, "generate_batch()", original, model, args, kwargs):
        result = original(model, *args, **kwargs)
    tokens = sum(len(request.generated_tokens) for request in result.values())
    state.stats.generated(tokens, started, stock=True)
    return result


@contextmanager
def _on_all_ranks(state: Patched, what: str, method: Any, model: Any, args: tuple, kwargs: dict) -> Iterator[None]:
    """Be in a call that all ranks make with the same arguments, for the length of a ``with`` block.

    Raises:
        RankError: a rank was given other arguments, makes another call, or does not come.
    """
    if state.ranks is None:
        yield
        return
    with state.ranks.call(what):
        state.ranks.check_arguments(what, arguments_of(method, model, args, kwargs))
        yield


def by_stock(state: Patched, input_ids: torch.Tensor, loop: Callable[[], Any], needs_modules: bool = False) -> Any:
    """Return what ``loop``, stock code that goes on with ``input_ids``, gives, and count its new tokens.

    What it generates with the model meanwhile (drafts of the model for itself) are no tokens of the call. The model's
    modules step aside, unless our forwards are faster in stock's loop.

    Args:
        needs_modules: our forwards do in ``loop`` what stock's would not.
    """
    started = time.perf_counter()
    model, is_chosen = state.model, state.loop_reason is not None or needs_modules
    aside = nullcontext() if is_chosen or model is None else state.aside(model, input_ids.device)
    with state.stats.left_to_stock(), state.stats.uncounted(), aside:
        result = loop()
    sequences = compat.sequences_of(result)
    state.stats.generated(sequences.numel() - input_ids.shape[1] * len(sequences), started, stock=True)
    return result


def _counted(loop: Callable[..., Any], state: Patched) -> Callable[..., Any]:
    """Return a user's decode loop, which counts the tokens that our loops do not make inside it."""

    @functools.wraps(loop)
    def method(model: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        started, before = time.perf_counter(), state.stats.made_here
        result = loop(model, input_ids, *args, **kwargs)
        found = compat.sequences_of(result)
        if isinstance(found, torch.Tensor):
            tokens = found.numel() - input_ids.shape[1] * len(found) - (state.stats.made_here - before)
            state.stats.generated(max(0, tokens), started, stock=True)
        return result

    return method
